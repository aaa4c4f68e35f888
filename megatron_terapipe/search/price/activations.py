"""Activations: bytes of a token in a layer from forward to backward, and the peak of a pipeline rank over its schedule.

The same accounting as `deepspeed_ext.plan.memory`, for the order of a rank instead of its times (between two ops of a
rank no memory is allocated or freed), and with the working memory of a running op.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from deepspeed_ext.plan.costs import EXPANDED_AT_ONCE, SCORES_AT_ONCE, longest_in_window
from deepspeed_ext.plan.ops import LIVE_CHANGE, Op, OpKind, PipelineShape, result
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.schedules import KEEPING_ALL, SCHEDULES
from deepspeed_ext.plan.simulate.arrays import KINDS, OpColumns
from deepspeed_ext.plan.simulate.host_copies import CopyColumns
from megatron_terapipe.config.flops import (
    LOG_SUM_EXP_BYTES,
    expanded_channels,
    kept_channels,
    latent_channels,
    routed_activation_bytes,
    state_bytes,
)
from megatron_terapipe.search.machine.software import ELEMENT_BYTES, Software
from megatron_terapipe.search.price.layer_times import Numbers, ScalarOrArray, held_rows, key_heads
from megatron_terapipe.search.price.workload import Attention, Layer
from megatron_terapipe.strategy import USUAL_KEYS, KeptKeys

LOSS_BYTES = 4
"""Bytes that the loss keeps of each logit: it computes in fp32 (Korthikanti section 4.3: 4sbv)."""


class TokenMemory(NamedTuple):
    """Bytes of one token of one sequence in one layer; or of one of a micro-batch, for each stage of a pipeline."""

    activations: ScalarOrArray
    """Kept from forward to backward, without keys and values that are kept for whole sequences."""
    key_values: ScalarOrArray = 0.0
    """Keys and values, kept for whole sequences while one of their token slices is live."""
    key_value_gradients: ScalarOrArray = 0.0
    """Sums of their gradients, for all token slices but the last of a sequence."""
    logits: ScalarOrArray = 0.0
    """Kept by head and loss, up to the limit of the software (`limits_of`)."""
    working: ScalarOrArray = 0.0
    """Extra memory while the backward of the layer runs: recomputed activations, and gradients."""
    freed_by_input_gradient: ScalarOrArray = 0.0
    """`activations` less the tensors that wait for the weight gradients, where the backward is in two parts: inputs of
    products, and gradients of their outputs. Negative where these are larger."""
    scores: ScalarOrArray = 0.0
    """Extra memory of the backward of attention that is written out, `SCORE_LIMIT` at most."""
    window_gradients: ScalarOrArray = 0.0
    """Of a sequence, not of a token: sums of the gradients of keys and values in the reach of a sliding window, where a
    sequence has several token slices. Its keys and values are among `activations`: each token slice's are freed by its
    own backward."""
    state: ScalarOrArray = 0.0
    """Of a token slice, not of a token: states that its recurrences leave to the next one, in either recomputation;
    none where a sequence is one token slice."""
    attending: ScalarOrArray = 0.0
    """Part of `working` in the backward of attention, less the activations of the MLP, which are free again by then."""
    expanded: ScalarOrArray = 0.0
    """Of a sequence, not of a token: extra memory of the backward of attention that has kept latents, with keys and
    values of all heads; as many heads are computed at once as `EXPANDED_AT_ONCE` has room for, and one at least."""
    expanded_head: ScalarOrArray = 0.0
    """The same of one head."""
    recomputed: ScalarOrArray = 0.0
    """Activations of all layers of the stage, which its backward recomputes at once and holds while it runs."""

    def at_once(self, still_kept: ScalarOrArray = 0.0) -> "TokenMemory":
        """Return the bytes (scalars or arrays) of the layer in a recomputed stage, from those without recomputation."""
        waiting = self.activations - self.freed_by_input_gradient
        return self._replace(
            activations=still_kept,
            recomputed=self.activations - still_kept,
            freed_by_input_gradient=still_kept - waiting,
        )


SCORE_BYTES = 16
"""Bytes of a score in the backward of attention that is written out: scores, weights and the gradients of both, in
fp32."""

SCORE_LIMIT = SCORE_BYTES * SCORES_AT_ONCE
"""Bytes that these take at most, tile by tile."""


class Limits(NamedTuple):
    """Bytes that a rank holds at most."""

    kept: float = inf
    """Of logits that are kept."""
    working: float = inf
    """In the working of the head."""
    expanded: float = inf
    """Of keys and values from latents, beyond one head's."""


def limits_of(software: Software, element_bytes: int, layers: Iterable[Layer]) -> Limits:
    """Limits of a trainer on logits and on expanded latents of layers, in bytes; infinite where there are none."""
    channels = [expanded_channels(each.attention.latent) for each in layers if each.attention and each.attention.latent]
    of_channel = max((held / numbers for numbers, held in channels), default=inf)
    limits = Limits(expanded=EXPANDED_AT_ONCE * of_channel * element_bytes)
    if software.logits_at_once is None:
        return limits
    return limits._replace(
        kept=float(software.logits_at_once * element_bytes),
        working=float(software.logits_at_once * _loss_working_bytes(software, element_bytes)),
    )


def _loss_working_bytes(software: Software, element_bytes: int) -> int:
    """Extra bytes of a logit while its gradient is computed: a probability in fp32, and the gradient."""
    return 0 if software.loss_in_place else LOSS_BYTES + element_bytes


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Activation bytes of a token in a layer, arrays of the shape of `tensor_parallel_size` [...].

    Sequence-parallel ranks share tokens, or heads of all tokens, which is as much; these bytes are before sharing.
    """

    layer: Layer
    software: Software
    element_bytes: int
    tensor_parallel_size: ScalarOrArray
    sequence_parallel: bool
    """Whether tensor-parallel ranks share the tokens between matrices."""
    sequence_parallel_size: ScalarOrArray = 1.0
    expert_parallel_size: ScalarOrArray = 1.0
    operand_bytes: float | None = None
    """Of a number that a product keeps for its weight gradient; None = as between products."""
    kept_keys: KeptKeys = USUAL_KEYS
    activation_is_read_off_output: bool = False
    """Whether the gradient of the activation function needs its output only (ReLU)."""

    @cached_property
    def size(self) -> ScalarOrArray:
        """Ranks that share the matrices."""
        size = np.asarray(self.tensor_parallel_size, dtype=float)
        return np.ones_like(size) if self.layer.kind in ("block", "other") and not self.layer.is_divided else size

    @cached_property
    def whole(self) -> ScalarOrArray:
        """Share of the tokens between the matrices that a rank holds."""
        return 1 / self.size if self.sequence_parallel else np.ones_like(self.size)

    def of_token(self, recompute: str) -> TokenMemory:
        """Return the bytes of a token of one sequence."""
        if recompute != "stage":
            return self._kept(recompute)
        return self._kept("none").at_once(self.keys_of_window())

    def _kept(self, recompute: str) -> TokenMemory:
        layer, software, element_bytes, size = self.layer, self.software, self.element_bytes, self.size
        if layer.kind == "embedding":
            return TokenMemory(layer.hidden_size * self.whole * software.residual_dropout)
        inputs = element_bytes * layer.hidden_size * self.whole
        if layer.kind == "norm":
            return TokenMemory(inputs, freed_by_input_gradient=inputs)
        if layer.kind != "head":
            return self.block(recompute)
        logits = sum(product.outputs for product in layer.products) / size
        limited = software.logits_at_once is not None
        kept_bytes = element_bytes if limited or software.loss_in_place else LOSS_BYTES
        working_bytes = _loss_working_bytes(software, element_bytes)
        freed = inputs if limited else -element_bytes * logits
        return TokenMemory(
            inputs, logits=kept_bytes * logits, working=working_bytes * logits, freed_by_input_gradient=freed
        )

    def keys_and_values(self, attention: Attention) -> ScalarOrArray:
        """Keys and values: for all heads where ranks pass them on, else copies of those that several ranks need.

        Latents are for all heads on every rank; sequence-parallel ranks gather them.
        """
        if attention.latent is not None and self.kept_keys.latents:
            return self.element_bytes * attention.latent.kept_size * (self.sequence_parallel_size + 0.0 * self.size)
        ring = self.software.communication.ring
        heads = key_heads(attention, self.size * (1.0 if ring else self.sequence_parallel_size))
        return self.element_bytes * heads * (attention.head_size + attention.value_size) / self.size

    def keys_of_window(self) -> ScalarOrArray:
        """Keys and values that each token slice keeps of itself, in a layer with a sliding window."""
        attention = self.layer.attention
        if attention is None or attention.sliding_window is None or not self.software.attention.keeps_keys:
            return 0.0 * self.size
        return self.keys_and_values(attention)

    def block(self, recompute: str) -> TokenMemory:
        """A transformer layer."""
        layer, size, whole, element = self.layer, self.size, self.whole, self.element_bytes
        hidden = element * layer.hidden_size * whole
        attention = layer.attention
        mlp_width = element * layer.activation_width / size
        query = exchanged = key_value = expanded = scores = log_sums = normed_heads = tile_scores = 0.0 * size
        window, expanded_head = None, 0.0
        if attention is not None:
            query = element * attention.query_heads * (attention.head_size + attention.value_size) / 2 / size
            # After a head exchange the output of attention exists twice: in parts of heads and in parts of tokens.
            if not self.software.communication.ring:
                exchanged = query * np.greater(self.sequence_parallel_size, 1)
            key_value = expanded = self.keys_and_values(attention)
            log_sums = LOG_SUM_EXP_BYTES * attention.query_heads / size
            # A gate keeps its sigmoid, and the projection the gated output.
            normed_heads = element * attention.normed_channels / size + 2 * attention.gated * query
            if (latent := attention.latent) is not None:
                latents = latent_channels(latent, normed=attention.normed, latents_kept=self.kept_keys.latents)
                normed_heads = normed_heads + element * latents * whole
                if self.kept_keys.latents:
                    # Outputs and gradients of own tokens; keys and values of all in reach are apart.
                    expanded = 4 * query
                    expanded_head = element * expanded_channels(latent)[1] * layer.tokens
            positions = attention.most_positions(layer.tokens)
            # Probabilities before and after dropout, and its mask: 5as of equation 1.
            copies = 2 * element + 1 if self.software.attention.keeps_dropped else element
            scores = copies * attention.query_heads * positions / size
            window = attention.sliding_window
            if attention.written_out:
                in_tile = layer.tokens if window is None else min(window - 1 + longest_in_window(window), layer.tokens)
                tile_scores = SCORE_BYTES * attention.query_heads * in_tile / size
        gradient_ratio = ELEMENT_BYTES[self.kept_keys.gradients] / element
        has_attention, has_mlp, sizes = attention is not None, layer.has_mlp, layer.recurrence
        num_parts = (has_attention or sizes is not None) + has_mlp
        mixing = 0.0 * size if sizes is None else element * kept_channels(sizes) / size
        masks = num_parts * layer.hidden_size * whole if self.software.residual_dropout else 0.0 * size
        # Norm inputs and outputs; query, the product of probabilities and values; the MLP's two widths, and its gate.
        operand = 1.0 if self.operand_bytes is None else self.operand_bytes / element
        norms, inputs = layer.kept_states * hidden, layer.normed_states * hidden * operand
        # Attention keeps its output too; in another type the projection has a copy.
        copied = query * operand * (operand < 1)
        widths = (1 + layer.gated) * mlp_width
        activated = 0.0 * size if self.activation_is_read_off_output else mlp_width * operand
        flash = not self.software.attention.writes_scores
        owned = self.software.attention.keeps_keys and has_attention
        core = log_sums if flash else scores
        everything = (
            norms
            + inputs
            + normed_heads
            + 2 * query
            + copied
            + mixing
            + exchanged
            + core
            + widths
            + activated
            + masks
            + self.routed()
            + (0.0 if owned else key_value)
        )
        of_mlp = has_mlp * (2 * hidden + widths + activated) + self.routed()
        widest = np.maximum(np.maximum(2 * mlp_width, query + expanded), self.routed(working=True))
        widest = np.maximum(widest, mixing)
        gradients = 2 * hidden + widest + (0.0 if flash else 0.8 * scores)
        kept, again = everything, 0.0 * size
        if recompute == "full" and layer.recomputed:
            kept = hidden + 0.0 * size
            again = everything - kept
        elif recompute == "selective" and self.software.selective_recomputes == "attention":
            kept, again = everything - core, core
        elif recompute == "selective" and self.software.selective_recomputes == "operators":
            # Kept are inputs of norms, queries, values and the output of attention, and one of two widths.
            again = inputs + normed_heads + copied + key_value / 2 + layer.gated * mlp_width + activated
            kept = everything - again
        elif recompute == "selective":
            again = inputs + (activated if layer.experts is None else 0.0)
            kept = everything - again
        # With a window each token slice keeps its own keys and values; while it runs, those in reach are put together.
        in_window = self.keys_of_window()
        of_sequence = key_value * owned - in_window
        return TokenMemory(
            activations=kept + in_window,
            key_values=of_sequence,
            key_value_gradients=of_sequence * gradient_ratio,
            working=again + gradients + in_window,
            freed_by_input_gradient=kept + in_window - self.operands(),
            scores=tile_scores * owned,
            window_gradients=((window or 1) - 1) * in_window * gradient_ratio,
            state=(0 if sizes is None else state_bytes(sizes, element)) / size,
            attending=again + gradients - widest + query + expanded - of_mlp,
            expanded=expanded_head * (0 if attention is None else attention.query_heads) / size,
            expanded_head=expanded_head + 0.0 * size,
        )

    def routed(self, *, working: bool = False) -> ScalarOrArray:
        """Bytes of a token in experts of the rank with most rows: kept, or held by the backward of their products."""
        layer, experts, element = self.layer, self.layer.experts, self.element_bytes
        if experts is None:
            return 0.0
        rows = held_rows(experts, self.expert_parallel_size)
        if working:
            # The activation, its product with the weight of the row, and the gradients of both and of its input.
            width, row = experts.width, layer.hidden_size * 2 + (1 + layer.gated) * experts.width
            return self.whole * experts.chosen * rows * element * max((4 + layer.gated) * width, row)
        sizes = experts.number, experts.chosen, layer.hidden_size, experts.width, layer.gated, element
        return np.asarray(self.whole * routed_activation_bytes(*sizes, rows=rows), dtype=float)

    def operands(self) -> ScalarOrArray:
        """Inputs of products and gradients of their outputs."""
        total = 0.0 * self.size
        if (experts := self.layer.experts) is not None:
            rows = self.whole * experts.chosen * held_rows(experts, self.expert_parallel_size)
            total = total + self.element_bytes * rows * sum(each.inputs + each.outputs for each in experts.products)
        for product in self.layer.products:
            inputs = product.inputs / self.size if product.parallel == "row" else product.inputs * self.whole
            outputs = product.outputs / self.size if product.parallel == "column" else product.outputs * self.whole
            total = total + self.element_bytes * (inputs + outputs)
        return total


class StageBytes(NamedTuple):
    """Bytes on each stage of the whole pipeline, [stages, ...] numbers."""

    token: TokenMemory
    """Of one token of a micro-batch; `IN_TURN` (`memory.py`) are of the layer with most. `window_gradients`, `expanded`
    and `expanded_head` are of a whole micro-batch, `state` of a token slice."""
    inputs: Numbers | float = 0.0
    """Of `token.activations`: the input of a recomputed stage."""
    head_working: Numbers | float = 0.0
    """`working` of the head, which is separate because it has a limit."""
    limits: Limits = Limits()
    is_recomputed: bool = False
    """Whether stages are recomputed: logits then exist only in the backward."""


def working_bytes(
    tokens: ScalarOrArray,
    of_token: TokenMemory,
    head_working: ScalarOrArray,
    limits: Limits,
    sequences: ScalarOrArray = 1.0,
) -> ScalarOrArray:
    """Return the bytes that the backward of a token slice holds while it runs; arguments broadcast.

    Args:
        sequences: for which `of_token` has one.
    """
    one_head, all_heads = sequences * of_token.expanded_head, sequences * of_token.expanded
    attending = tokens * of_token.attending + np.minimum(all_heads, np.maximum(one_head, limits.expanded))
    of_blocks = np.maximum(tokens * of_token.working, attending) + np.minimum(tokens * of_token.scores, SCORE_LIMIT)
    working = np.maximum(of_blocks, np.minimum(tokens * head_working, limits.working))
    return np.asarray(working + tokens * of_token.recomputed)


class Held(NamedTuple):
    """Bytes at the moment of the peak; numbers, or arrays that broadcast against each other."""

    activations: ScalarOrArray
    key_values: ScalarOrArray
    logits: ScalarOrArray
    working: ScalarOrArray


MOST_OPS_AT_ONCE = 200_000
"""Most ops of several ranks in one array."""

_LIVE_CHANGE = np.array([LIVE_CHANGE[kind] for kind in KINDS])
_TURNS = np.array([result(Op(kind, 0, 0, 0)).kind is OpKind.INPUT_GRADIENT for kind in KINDS])
"""Whether each kind of op computes the gradient of its input."""


def rank_order(schedule: str, shape: PipelineShape, rank: int) -> OpColumns:
    """Return the ops of a rank as arrays."""
    return OpColumns.of(list(SCHEDULES[schedule](shape, rank)))


def orders_of_ranks(schedule: str, shape: PipelineShape) -> list[OpColumns]:
    """Return the ops of all ranks as arrays of [ranks, ops], some ranks at a time, so that none is very large."""
    orders = [rank_order(schedule, shape, rank) for rank in range(shape.num_ranks)]
    together = max(MOST_OPS_AT_ONCE // max(len(orders[0].kind), 1), 1)
    parts = (orders[first : first + together] for first in range(0, len(orders), together))
    return [OpColumns(*map(np.stack, zip(*part, strict=True))) for part in parts]


def steady_micro_batches(schedule: str, num_ranks: int, num_token_slices: int, num_micro_batches: int) -> int:
    """Smallest number of micro-batches with which every rank reaches the peak that it has with `num_micro_batches`.

    More of them only repeat the steady state; `gpipe` and `breadth-first`, which hold them all, have none.
    """
    if schedule in KEEPING_ALL:
        return num_micro_batches
    least = -(-num_ranks // num_token_slices)
    if schedule != "interleaved":
        return min(num_micro_batches, 2 * least + 2)
    # Its groups of micro-batches are all as long here as its longest group.
    groups = max(num_micro_batches // least, 1)
    longest = -(-num_micro_batches // groups)
    enough = 4 * longest
    return enough if enough < num_micro_batches and enough // least == 4 else num_micro_batches


def peak_held(
    order: OpColumns, lengths: Sequence[int], of_stage: StageBytes, copies: Sequence[CopyColumns] = ()
) -> Held:
    """Return the peak bytes of ranks, by kind: [...].

    Args:
        copies: to the host, of each of the ranks; empty for none.
    """
    tokens = np.asarray(lengths, dtype=float)
    own = tokens[order.token_slice]
    change, is_turn = _LIVE_CHANGE[order.kind], _TURNS[order.kind]
    is_forward, is_last = change > 0, change < 0
    head_working = np.broadcast_to(of_stage.head_working, np.shape(of_stage.token.activations))[order.stage]
    of_token = TokenMemory(*(part[order.stage] for part in np.broadcast_arrays(*of_stage.token)))
    # The last token slice leaves no state: its part stands for the gradient of the state that it reads.
    state = (len(tokens) > 1) * of_token.state
    activations, freed = own * of_token.activations, own * of_token.freed_by_input_gradient
    # Bytes allocated as an op starts, and freed when it has ended. The last op of a backward in two parts frees the
    # remaining bytes of the first.
    comes = np.where(is_forward, activations, 0.0)
    goes = np.where(is_forward, 0.0, np.where(is_last, activations - np.where(is_turn, 0.0, freed), freed))
    comes, goes = comes + np.where(is_forward, state, 0.0), goes + np.where(is_turn, state, 0.0)
    held_activations = _during(comes, goes) - _on_host(copies, Content.INPUT, own.shape[-1])
    logits = own * of_token.logits
    held_logits = np.where(is_turn, logits, 0.0)
    if not of_stage.is_recomputed:
        held_logits = _during(np.where(is_forward, logits, 0.0), held_logits)
    held_logits = np.minimum(held_logits, of_stage.limits.kept)
    first, last = order.token_slice == 0, order.token_slice == len(lengths) - 1
    sequence = tokens.sum() * of_token.key_values
    in_reach = (len(tokens) > 1) * of_token.window_gradients
    comes, goes = np.where(is_forward & first, sequence, 0.0), np.where(is_turn & first, sequence, 0.0)
    if copies:
        # On ranks with copies of them, tensors of each token slice are apart, so that each can go by itself.
        apart = np.array([[len(of_rank.of(Content.KEYS_AND_VALUES).size) > 0] for of_rank in copies])
        of_own = own * of_token.key_values
        comes = np.where(apart, np.where(is_forward, of_own, 0.0), comes)
        goes = np.where(apart, np.where(is_turn, of_own, 0.0), goes)
    comes = comes + np.where(is_turn & last, tokens[:-1].sum() * of_token.key_value_gradients + in_reach, 0.0)
    # The backward of a token slice frees the gradients of its own keys and values; the first that runs has none yet.
    goes = goes + np.where(is_turn & ~last, own * of_token.key_value_gradients, 0.0)
    goes = goes + np.where(is_turn & first, in_reach, 0.0)
    held_key_values = _during(comes, goes)
    # Copies are of all layers; keys and values of layers with a window are among activations.
    on_host = _on_host(copies, Content.KEYS_AND_VALUES, own.shape[-1])
    held_activations = held_activations - np.maximum(on_host - held_key_values, 0.0)
    held_key_values = np.maximum(held_key_values - on_host, 0.0)
    working = np.where(is_turn, working_bytes(own, of_token, head_working, of_stage.limits), 0.0)
    at = np.argmax(held_activations + held_logits + held_key_values + working, axis=-1, keepdims=True)
    parts = held_activations, held_key_values, held_logits, working
    return Held(*(np.take_along_axis(part, at, axis=-1)[..., 0] for part in parts))


def _on_host(copies: Sequence[CopyColumns], content: Content, num_ops: int) -> ScalarOrArray:
    """[ranks, ops] bytes that are only on the host while each op runs."""
    if not copies:
        return 0.0
    found = [of_rank.of(content) for of_rank in copies]
    dropped = [np.bincount(each.drop, each.size, num_ops) for each in found]
    fetched = [np.bincount(each.fetch, each.size, num_ops) for each in found]
    return np.cumsum(np.subtract(dropped, fetched), axis=1)


def _during(comes: Numbers, goes: Numbers) -> Numbers:
    """[..., ops] amounts held while each op runs."""
    held = np.cumsum(comes, axis=-1)
    held[..., 1:] -= np.cumsum(goes, axis=-1)[..., :-1]
    return held
