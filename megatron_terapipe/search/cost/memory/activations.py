"""Bytes that a layer keeps of a token from its forward to its backward, on one rank of those that share the layer.

Korthikanti et al. (arXiv 2205.05198), s tokens, b sequences, h wide, a heads, t tensor-parallel ranks, 2-byte numbers:

    equation 1   sbh (34 + 5as/h)               one rank
    equation 2   sbh (10 + 24/t + 5as/(ht))     tensor parallel
    equation 4   sbh/t (34 + 5as/h)             and sequence parallel
    section 5    sbh/t 34                       and selective: scores, probabilities and their masks are computed again
    section 5    2sbh                           full: the input of the layer alone

Those count masks of dropout, and a trainer that stores the s x s scores. Ours stores neither (`config.model.flops`,
`block_activation_bytes_per_token`), cuts sequences into token slices, and keeps keys and values of whole sequences.
The formulas here are the same ones by the shapes of any layer, and broadcast over arrays.
"""

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.costs.attention_tiles import SCORES_AT_ONCE, longest_in_window
from megatron_terapipe.config.model.flops import LOG_SUM_EXP_BYTES
from megatron_terapipe.search.inputs.layer import Attention, Layer
from megatron_terapipe.search.op_times.layer_times import key_heads
from megatron_terapipe.search.software.description import ELEMENT_BYTES, Software

ScalarOrArray = NDArray[np.float64] | float

LOSS_BYTES = 4
"""Bytes that the loss keeps of each logit: it computes in fp32 (Korthikanti section 4.3: 4sbv)."""


class TokenMemory(NamedTuple):
    """Bytes of one token of one sequence in one layer."""

    activations: ScalarOrArray
    """Kept from forward to backward; in a layer whose keys and values are kept for whole sequences, without those."""
    key_values: ScalarOrArray
    """Keys and values, kept for whole sequences while one of their token slices is live."""
    key_value_gradients: ScalarOrArray
    """Sums of their gradients, for all token slices but the last of a sequence."""
    logits: ScalarOrArray
    """What head and loss keep, held to a limit where software has one (`logit_limits`)."""
    working: ScalarOrArray
    """What the backward of the layer holds more while it runs: what it computes again, and gradients."""
    freed_by_input_gradient: ScalarOrArray
    """How much less than `activations` waits for the weight gradients, where the backward is in two parts: the inputs
    of products, and the gradients of their outputs (docs/adr/0017). Below zero where that is more."""
    scores: ScalarOrArray = 0.0
    """What the backward holds more of attention that is written out, `SCORE_LIMIT` at most."""
    window_gradients: ScalarOrArray = 0.0
    """Of a sequence, not of a token: sums of the gradients of keys and values in the reach of a sliding window, where a
    sequence has several token slices. Its keys and values are among `activations`: each token slice's are freed by its
    own backward (docs/adr/0035)."""
    recomputed: ScalarOrArray = 0.0
    """What the backward computes again of all layers of the stage at once, and holds while it runs."""

    def at_once(self, still_kept: ScalarOrArray = 0.0) -> "TokenMemory":
        """Return the bytes of a layer whose stage is computed again; here nothing was.

        Args:
            still_kept: of `activations`, what is kept all the same; an array as they are [...].
        """
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


def token_memory(
    layer: Layer,
    software: Software,
    *,
    element_bytes: int,
    tensor_parallel_size: ScalarOrArray,
    recompute: str,
    sequence_parallel: bool,
    sequence_parallel_size: ScalarOrArray = 1.0,
    key_value_gradients: str = "fp32",
    activation_is_read_off_output: bool = False,
) -> TokenMemory:
    """Bytes that a layer keeps of a token, an array as `tensor_parallel_size` [...] is.

    Sequence-parallel ranks share tokens, or heads of all tokens, which is as much; here is what they do not share.

    Args:
        element_bytes: bytes of an activation.
        tensor_parallel_size: ranks that share the layer.
        recompute: `none`, `selective`, `full` or `stage`.
        sequence_parallel: whether tensor-parallel ranks share tokens where each would hold them all.
        sequence_parallel_size: ranks that share the tokens of a token slice.
        key_value_gradients: type in which gradients of keys and values are kept.
        activation_is_read_off_output: whether the gradient of the activation function needs its output only (ReLU).
    """
    size = np.asarray(tensor_parallel_size, dtype=float)
    if layer.kind in ("block", "other") and not layer.is_divided:
        size = np.ones_like(size)
    whole = 1 / size if sequence_parallel else np.ones_like(size)
    nothing = np.zeros_like(size)
    if layer.kind == "embedding":
        masks = layer.hidden_size * whole if software.residual_dropout else nothing
        memory = TokenMemory(masks, nothing, nothing, nothing, nothing, nothing)
        return memory.at_once() if recompute == "stage" else memory
    kept = _Kept(
        layer,
        software,
        element_bytes,
        ELEMENT_BYTES[key_value_gradients],
        size,
        whole,
        sequence_parallel_size,
        activation_is_read_off_output,
    )
    if layer.kind == "norm":
        memory = TokenMemory(kept.norm(1), nothing, nothing, nothing, nothing, kept.norm(1))
        return memory.at_once() if recompute == "stage" else memory
    if layer.kind == "head":
        logits = sum(product.outputs for product in layer.products) / size
        inputs = element_bytes * layer.hidden_size * whole
        limited = software.logits_at_once is not None
        kept_bytes, working_bytes = LOSS_BYTES, LOSS_BYTES + element_bytes
        if limited:
            kept_bytes, working_bytes = element_bytes, _loss_working_bytes(element_bytes)
        elif software.loss_in_place:
            kept_bytes, working_bytes = element_bytes, 0
        freed = inputs if limited else -element_bytes * logits
        memory = TokenMemory(inputs, nothing, nothing, kept_bytes * logits, working_bytes * logits, freed)
        return memory.at_once() if recompute == "stage" else memory
    if recompute == "stage":
        return kept.block("none").at_once(kept.keys_of_window())
    return kept.block(recompute)


class LogitLimits(NamedTuple):
    """Bytes that logits take at most on a rank: kept, and in the working of the head."""

    kept: float
    working: float


def logit_limits(software: Software, element_bytes: int) -> LogitLimits:
    """Limits of a trainer on logits, in bytes; infinite if it has none.

    Args:
        element_bytes: bytes of an activation.
    """
    if software.logits_at_once is None:
        return LogitLimits(inf, inf)
    return LogitLimits(
        float(software.logits_at_once * element_bytes),
        float(software.logits_at_once * _loss_working_bytes(element_bytes)),
    )


def _loss_working_bytes(element_bytes: int) -> int:
    """Bytes of a logit, beside itself, while its gradient is computed: a probability in fp32; a copy in fp32 too."""
    return LOSS_BYTES if element_bytes == LOSS_BYTES else 2 * LOSS_BYTES


class _Kept:
    """The parts of a block, in bytes of one token."""

    def __init__(
        self,
        layer: Layer,
        software: Software,
        element_bytes: int,
        gradient_bytes: int,
        size: ScalarOrArray,
        whole: ScalarOrArray,
        sharing: ScalarOrArray,
        reads_output: bool,
    ) -> None:
        self.layer, self.software = layer, software
        self.element_bytes, self.gradient_bytes = element_bytes, gradient_bytes
        self.size, self.whole, self.sharing = size, whole, sharing
        self.reads_output = reads_output

    def keys_and_values(self, attention: Attention) -> ScalarOrArray:
        """Keys and values."""
        heads = key_heads(attention, self.size * self.sharing)
        return 2 * self.element_bytes * heads * attention.head_size / self.size

    def keys_of_window(self) -> ScalarOrArray:
        """Keys and values that each token slice keeps of itself, in a layer with a sliding window."""
        attention = self.layer.attention
        if attention is None or attention.sliding_window is None or not self.software.attention.keeps_keys:
            return 0.0 * self.size
        return self.keys_and_values(attention)

    def norm(self, count: int) -> ScalarOrArray:
        """Inputs of norms."""
        return count * self.element_bytes * self.layer.hidden_size * self.whole

    def block(self, recompute: str) -> TokenMemory:
        """A transformer layer."""
        layer, size, whole, element = self.layer, self.size, self.whole, self.element_bytes
        hidden = element * layer.hidden_size * whole
        attention = layer.attention
        mlp_width = element * layer.activation_width / size
        query = exchanged = key_value = scores = log_sums = normed_heads = tile_scores = 0.0 * size
        window = None
        if attention is not None:
            query = element * attention.query_heads * attention.head_size / size
            # A head exchange leaves the output of attention in parts of tokens, beside that in parts of heads.
            exchanged = query * np.greater(self.sharing, 1)
            key_value = self.keys_and_values(attention)
            log_sums = LOG_SUM_EXP_BYTES * attention.query_heads / size
            normed_heads = element * attention.normed_channels / size
            positions = attention.most_positions(layer.tokens)
            # Probabilities before and after dropout, and its mask: 5as of equation 1.
            copies = 2 * element + 1 if self.software.attention.keeps_dropped else element
            scores = copies * attention.query_heads * positions / size
            window = attention.sliding_window
            if attention.written_out:
                in_tile = layer.tokens if window is None else min(window - 1 + longest_in_window(window), layer.tokens)
                tile_scores = SCORE_BYTES * attention.query_heads * in_tile / size
        has_attention, has_mlp = attention is not None, layer.activation_width > 0
        num_parts = has_attention + has_mlp
        masks = num_parts * layer.hidden_size * whole if self.software.residual_dropout else 0.0 * size
        # Norm inputs and outputs; query, the product of probabilities and values; the MLP's two widths, and its gate.
        norms, inputs = layer.kept_states * hidden, layer.normed_states * hidden
        widths = (1 + layer.gated) * mlp_width
        activated = 0.0 * size if self.reads_output else mlp_width
        flash = not self.software.attention.writes_scores
        owned = self.software.attention.keeps_keys and has_attention
        core = log_sums if flash else scores
        everything = (
            norms
            + inputs
            + normed_heads
            + 2 * query
            + exchanged
            + core
            + widths
            + activated
            + masks
            + (0.0 if owned else key_value)
        )
        gradients = 2 * hidden + np.maximum(2 * mlp_width, query + key_value) + (0.0 if flash else 0.8 * scores)
        kept, again = everything, 0.0 * size
        if recompute == "full":
            kept = hidden + 0.0 * size
            again = everything - kept
        elif recompute == "selective" and self.software.selective_recomputes == "attention":
            kept, again = everything - core, core
        elif recompute == "selective":
            again = inputs + activated
            kept = everything - again
        if owned and window is not None:
            # Each token slice keeps its own; while it runs, those in reach are put together.
            return TokenMemory(
                activations=kept + key_value,
                key_values=0.0 * size,
                key_value_gradients=0.0 * size,
                logits=0.0 * size,
                working=again + gradients + key_value,
                freed_by_input_gradient=kept + key_value - self.operands(),
                scores=tile_scores,
                window_gradients=(window - 1) * key_value * (self.gradient_bytes / element),
            )
        return TokenMemory(
            activations=kept,
            key_values=key_value if owned else 0.0 * size,
            key_value_gradients=key_value * (self.gradient_bytes / element) if owned else 0.0 * size,
            logits=0.0 * size,
            working=again + gradients,
            freed_by_input_gradient=kept - self.operands(),
            scores=tile_scores if owned else 0.0 * size,
        )

    def operands(self) -> ScalarOrArray:
        """Inputs of products and gradients of their outputs."""
        total = 0.0 * self.size
        for product in self.layer.products:
            inputs = product.inputs / self.size if product.parallel == "row" else product.inputs * self.whole
            outputs = product.outputs / self.size if product.parallel == "column" else product.outputs * self.whole
            total = total + self.element_bytes * (inputs + outputs)
        return total
