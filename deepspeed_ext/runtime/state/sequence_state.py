"""State of a micro-batch on a stage between token slices, and its view by one layer and token slice, `Past`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention import positional_dropout
from deepspeed_ext.runtime.attention.documents import Documents, DocumentsAtOnce, document_attention
from deepspeed_ext.runtime.attention.flash_kernels import kernel_for, kernel_of_runs_for
from deepspeed_ext.runtime.attention.head_exchange import (
    check_heads,
    to_all_heads,
    to_all_tokens,
    with_copies_of_keys,
)
from deepspeed_ext.runtime.attention.kernels import (
    AttentionDropout,
    AttentionKernel,
    PlainAttention,
    for_values,
)
from deepspeed_ext.runtime.attention.latent_attention import LatentTokenSliceAttention, expanded
from deepspeed_ext.runtime.attention.positional_dropout import DrawnNumbers, DropoutPlace
from deepspeed_ext.runtime.attention.token_slice_attention import (
    KeysOfSequence,
    KeysOfTokenSlices,
    KeyValueState,
    TokenSliceAttention,
)
from deepspeed_ext.runtime.micro_batch import to_device
from deepspeed_ext.runtime.state.carried_states import CarriedStates
from deepspeed_ext.runtime.state.counts import CountingLayer, Counts
from deepspeed_ext.runtime.topology import SequenceParallelRanks

__all__ = ["Past"]


Made = TypeVar("Made")


def _made(values: dict[Any, Any], key: Any, make: Callable[[], Made]) -> Made:
    """The value of a key, made at its first use."""
    if key not in values:
        values[key] = make()
    return values[key]


class SequenceState:
    """State of one live micro-batch on one stage: one `KeyValueState` per layer that attends.

    Args:
        ranks: ranks that share the tokens of each token slice; None for one.
        sequences: number of each row, unique in the run, from which its masks of dropout are drawn.
        documents: starts of the documents; None if every row is one document.
        forward_only: whether no backward will follow, so that keys and values out of the reach of a sliding window can
            be freed.
        keys_apart: whether keys and values of token slices are kept apart, as copies to the host need them.
        key_value_gradients: type in which gradients of keys and values are kept between two backwards; None for fp32,
            or the wider type of the model.
        loss_factor: returns the factor of a loss that a layer adds in the backward; None for 1.
    """

    def __init__(
        self,
        token_slices: TokenSlices,
        *,
        ranks: SequenceParallelRanks | None = None,
        seed: int = 0,
        sequences: Sequence[int] = (0,),
        documents: Documents | None = None,
        forward_only: bool = False,
        keys_apart: bool = False,
        key_value_gradients: torch.dtype | None = None,
        loss_factor: Callable[[], float] | None = None,
    ) -> None:
        self.loss_factor = loss_factor or (lambda: 1.0)
        self.token_slices, self.forward_only = token_slices, forward_only
        self._keys_apart, self._key_value_gradients = keys_apart, key_value_gradients
        self.attended: Counter[tuple[int, int]] = Counter()
        """Calls of attention, by layer and first position of this rank's part of the token slice."""
        self.ranks = ranks or SequenceParallelRanks()
        self.parts = self.ranks.parts(token_slices)
        """This rank's parts of the token slices."""
        starts = (start for start, _ in self.parts.bounds())
        self.bounds = dict(zip(starts, token_slices.bounds(), strict=True))
        """First position and end of each token slice, by the first position of this rank's part."""
        self.seed, self.sequences, self.documents = seed, tuple(sequences), documents
        self._layers: dict[int, tuple[int | None, KeyValueState | None]] = {}
        self.cached_for_slice: dict[tuple[int, str], Any] = {}
        """Values that layers share of a token slice, by its first position and a name."""
        self.carried = CarriedStates(len(token_slices) - 1, forward_only)
        """States that layers carry from token slice to token slice; see `Past.carry`."""
        self.counts: dict[int, Counts] = {}
        """Counts of a layer in the micro-batch; see `Past.counts`."""
        self.numbers = {start: number for number, start in enumerate(self.bounds)}
        """Number of each token slice, by the first position of this rank's part."""
        self.cached_for_recompute: dict[tuple[int, int, str], Any] = {}
        """Values of a forward for its recomputation, by layer, first position and name."""
        self.shared: set[tuple[int, int]] = set()
        """Layers, and first positions of their token slices, that have reached the tokens of all ranks."""
        self.drawn = DrawnNumbers(token_slices.seq_length)
        """Random numbers of dropout."""

    def past(self, layer: int, token_slice: int) -> "Past":
        """The state of one layer for one token slice."""
        return Past(self.parts.prefix_len(token_slice), layer, self)

    def forget_shared(self, token_slice: int) -> None:
        """Drop the values that layers share of a token slice; the next layer that needs one makes it again."""
        start = self.parts.prefix_len(token_slice)
        cached = self.cached_for_slice.items()
        self.cached_for_slice = {key: value for key, value in cached if key[0] != start}

    def keys_of(self, token_slice: int) -> list[Tensor]:
        """Keys and values [B, N, G, D] of a token slice, layer after layer; only where they are kept apart."""
        start = self.token_slices.prefix_len(token_slice)
        return [tensor for state in self._kept_apart() for tensor in state.kept[start]]

    def drop_keys_of(self, token_slice: int) -> None:
        """Free the keys and values of a token slice, until they are put back."""
        for state in self._kept_apart():
            del state.kept[self.token_slices.prefix_len(token_slice)]

    def put_back_keys_of(self, token_slice: int, tensors: Sequence[Tensor]) -> None:
        """Put back keys and values that were dropped.

        Args:
            tensors: keys and values [B, N, G, D], as `keys_of` gave them.
        """
        each = iter(tensors)
        for state in self._kept_apart():
            state.kept[self.token_slices.prefix_len(token_slice)] = tuple(islice(each, state.num_tensors))

    def _kept_apart(self) -> Iterator[KeysOfTokenSlices]:
        for _, state in self._layers.values():
            assert isinstance(state, KeysOfTokenSlices), "keys and values of whole sequences are not copied to the host"
            yield state

    def keys_and_values(self, layer: int, window: int | None) -> KeyValueState | None:
        """The keys and values of a layer; None if only their own token slice reads them.

        Args:
            window: tokens that its tokens attend to, themselves included; None for all before them.
        """
        if layer not in self._layers:
            self._layers[layer] = window, self._new_state(window)
        known, state = self._layers[layer]
        if known != window:
            raise UserError(
                f"layer {layer} attends with window={window}, and before with window={known}: give it one window"
            )
        return state

    def _new_state(self, window: int | None) -> KeyValueState | None:
        if len(self.token_slices) == 1 and not self._keys_apart:
            return None
        if window is None and (self.forward_only or not self._keys_apart):
            return KeysOfSequence(self.token_slices.seq_length, self._key_value_gradients)
        return KeysOfTokenSlices(window, self._key_value_gradients, forward_only=self.forward_only)


@dataclass(frozen=True, slots=True)
class Past:
    """The tokens before a token slice, for one layer: the argument `past` of its forward.

    Where sequence-parallel ranks share the token slice, a layer is given this rank's part of it. Only `attend`,
    `all_tokens` and `sum_before` reach the others.
    """

    prefix_len: int
    """Tokens before those that the layer is given."""
    _layer: int
    _sequence: SequenceState

    @property
    def seq_length(self) -> int:
        """Tokens of the whole sequence."""
        return self._sequence.token_slices.seq_length

    def document_numbers(self, first_token: int, length: int) -> tuple[Tensor, int]:
        """Numbers of the documents of tokens [B, n] from `first_token` after the first on, and of how many in all rows.

        The documents are `numbered`.
        """
        first, documents = self.prefix_len + first_token, self._sequence.documents
        return documents.numbers[:, first : first + length], sum(map(len, documents.starts))

    def counts(self, layer: CountingLayer, num_groups: int, device: torch.device) -> Counts:
        """The counts of this layer in the micro-batch, of some groups of tokens."""
        return _made(self._sequence.counts, self._layer, lambda: Counts(layer, num_groups, device))

    def sum_before(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of values [...] over the ranks with earlier tokens of the token slice, and over all of its ranks."""
        self._sequence.shared.add((self._layer, self.prefix_len))
        if self._sequence.ranks.size == 1:
            return torch.zeros_like(values), values
        by_rank = torch.stack(self._sequence.ranks.gather(values))
        return by_rank[: self._sequence.ranks.rank].sum(0), by_rank.sum(0)

    @property
    def loss_factor(self) -> float:
        """Factor of the gradient of a loss of the micro-batch that the layer adds in its backward."""
        return self._sequence.loss_factor()

    @property
    def positions_restart(self) -> bool:
        """Whether positions restart with documents; if not, they continue from `prefix_len`."""
        documents = self._sequence.documents
        return documents is not None and documents.positions_restart

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Positions of the N tokens that the layer is given: [1, N], or [B, N] where they restart with documents."""
        if not self.positions_restart:
            return torch.arange(self.prefix_len, self.prefix_len + length, device=device).unsqueeze(0)
        positions = self._sequence.documents.positions(self.prefix_len, length)
        return positions if device is None else positions.to(device)

    def cached_for_slice(self, name: str, make: Callable[[], Made]) -> Made:
        """A value that all layers of this stage share for this token slice; made by the first one."""
        return _made(self._sequence.cached_for_slice, (self.prefix_len, name), make)

    def carried(self, name: str, initial: Tensor) -> Tensor:
        """The state that this layer left after the token slice before; `initial` in the first one.

        Its gradient flows back to the token slice before. A layer that is computed again reads the same.

        Args:
            initial: [...], of the shape, type and device of the state; may depend on weights.

        Raises:
            UserError: if sequence-parallel ranks share the token slice, and the layer has not called `all_tokens`.
        """
        ranks = self._sequence.ranks.size
        if ranks > 1 and (self._layer, self.prefix_len) not in self._sequence.shared:
            raise UserError(
                f"layer {self._layer} reads its state {name!r} with a part of each token slice, because {ranks} "
                "sequence-parallel ranks share it: compute it of all tokens, which past.all_tokens(x) gives, and "
                "return past.own_tokens(output)"
            )
        return self._sequence.carried.read((self._layer, name), self._sequence.numbers[self.prefix_len], initial)

    def carry(self, name: str, state: Tensor) -> None:
        """Leave a state [...] of this layer for the token slice after. It must not be changed in place from now on."""
        self._sequence.carried.leave((self._layer, name), self._sequence.numbers[self.prefix_len], state)

    def begins(self, device: torch.device | None = None) -> Tensor | None:
        """Whether a document begins at each token of the token slice: [B, N]; None if each row is one document.

        Tokens of a document depend on no token before its begin, so a state starts again there. The N tokens are on
        all sequence-parallel ranks.
        """
        documents, (start, end) = self._sequence.documents, self._sequence.bounds[self.prefix_len]
        if documents is None or not documents.attend_apart:
            return None
        return self.cached_for_slice(
            "begins", lambda: to_device(documents.begins(start, end), device or torch.device("cpu"))
        )

    def all_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Give each sequence-parallel rank all tokens of the token slice, with its part of the heads, in one message.

        Args:
            *tensors: each [B, N / R, H, D], of this rank's part of the tokens; each of its own H and D.

        Returns:
            Each [B, N, H / R, D]; the tensors themselves on one rank.
        """
        ranks = self._sequence.ranks
        if ranks.size == 1:
            return tensors
        self._sequence.shared.add((self._layer, self.prefix_len))
        for tensor in tensors:
            check_heads(tensor.shape[2], tensor.shape[2], ranks.size)
        return to_all_tokens(ranks, *tensors)

    def own_tokens(self, output: Tensor) -> Tensor:
        """Return this rank's part of the tokens, with all heads, [B, N / R, H, D] of [B, N, H / R, D]: the way back."""
        ranks = self._sequence.ranks
        return output if ranks.size == 1 else to_all_heads(ranks, output)

    def own_heads(self, weight: Tensor) -> Tensor:
        """Return the part [H / R, ...] of a weight [H, ...] for the heads that `all_tokens` gives to this rank."""
        ranks = self._sequence.ranks
        return weight if ranks.size == 1 else weight.chunk(ranks.size)[ranks.rank]

    def cached_for_recompute(self, name: str, make: Callable[[], Made]) -> Made:
        """A value of this layer and token slice that a forward computed again gets from the first one.

        So a choice is made once, though stages or layers are computed twice. It is kept until the last backward of the
        micro-batch; without a backward it is not kept.
        """
        key = self._layer, self.prefix_len, name
        return make() if self._sequence.forward_only else _made(self._sequence.cached_for_recompute, key, make)

    def room(self, like: Tensor, window: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Tensors like keys [B, N, G, D] for keys and values, which `attend` does not copy then; None for none."""
        if self._sequence.ranks.size > 1:
            return None
        state = self._sequence.keys_and_values(self._layer, self._reach(window))
        return state.room((like, like), self.prefix_len) if isinstance(state, KeysOfSequence) else None

    def _reach(self, window: int | None) -> int | None:
        """The window; None if it hides nothing."""
        return None if window is None or window >= self._sequence.token_slices.seq_length else window

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sinks: Tensor | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        first_head: int = 0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention of this token slice to itself and to the token slices before it.

        Sequence-parallel ranks attend together, each to all tokens with its part of the heads.

        Args:
            query: [B, N, H, D], of the N tokens that the layer is given.
            key: [B, N, G, D]; H must be a multiple of G.
            value: [B, N, G, v], v at most D.
            sinks: [H], learned scores to which the queries of a head attend in every softmax, with values of 0; None
                for none.
            scale: factor of the scores; 1 / sqrt(D) if None.
            first_head: number of the first query head, where a rank has some of them.
            window: tokens that a token attends to, itself included; None for all before it. A layer has one.
            softcap: limit c of the scores: a scaled score x becomes c tanh(x / c); None for none.

        Returns:
            [B, N, H, v].
        """
        ranks, window = self._sequence.ranks, self._reach(window)
        start = self._begin_attention(query)
        if ranks.size > 1:
            query, key, value = to_all_tokens(ranks, *with_copies_of_keys(query, key, value, ranks.size))
            sinks = None if sinks is None else self.own_heads(sinks)
            first_head += ranks.rank * query.shape[2]
        output = TokenSliceAttention.apply(
            query,
            key,
            value,
            self._sequence.keys_and_values(self._layer, window),
            start,
            query.shape[-1] ** -0.5 if scale is None else scale,
            self._kernel(query, value.shape[-1], start, dropout, first_head, window, softcap),
            sinks,
        )
        return self.own_tokens(output)

    def attend_latent(
        self,
        query: Tensor,
        latent: Tensor,
        weight: Tensor,
        *,
        keep_latents: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        first_head: int = 0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention to keys and values that follow from a latent of each token; see `latent_attention`.

        Sequence-parallel ranks gather the latents, and each computes its part of the heads from them.

        Args:
            query: [B, N, H, n + r], of the N tokens that the layer is given; the last r channels are rotated.
            latent: [B, N, c + r], the rotated key last.
            weight: [H, n + v, c], of each head the rows of its keys and of its values, v at most n + r.
            keep_latents: whether latents are kept for later token slices, and not keys and values.
            scale: as the others, as for `attend`.

        Returns:
            [B, N, H, v].
        """
        ranks, window = self._sequence.ranks, self._reach(window)
        start, key_size = self._begin_attention(query), query.shape[-1] - latent.shape[-1] + weight.shape[-1]
        if ranks.size > 1:
            check_heads(query.shape[2], query.shape[2], ranks.size)
            (query,), latent, weight = to_all_tokens(ranks, query), ranks.gather_tokens(latent), self.own_heads(weight)
            first_head += ranks.rank * query.shape[2]
        value_size, state = weight.shape[1] - key_size, self._sequence.keys_and_values(self._layer, window)
        scale = query.shape[-1] ** -0.5 if scale is None else scale

        def kernel_of(query: Tensor, first: int) -> AttentionKernel:
            return self._kernel(query, value_size, start, dropout, first_head + first, window, softcap)

        if keep_latents:
            output = LatentTokenSliceAttention.apply(query, latent, weight, state, start, scale, kernel_of)
        else:
            heads = query, *expanded(latent, weight, key_size)
            output = TokenSliceAttention.apply(*heads, state, start, scale, kernel_of(query, 0))
        return self.own_tokens(output)

    def _begin_attention(self, query: Tensor) -> int:
        """Count a call of attention, and return the first token of the token slice on all ranks."""
        ranks, (start, end) = self._sequence.ranks, self._sequence.bounds[self.prefix_len]
        length = (end - start) // ranks.size
        if query.shape[1] != length:
            part = "token slice" if ranks.size == 1 else "part of the token slice"
            raise UserError(
                f"layer {self._layer} attends with {query.shape[1]} tokens, and its {part} has {length}: hand "
                "past.attend [rows, tokens, heads, dimension], and the same token_slices to every rank"
            )
        self._sequence.attended[self._layer, self.prefix_len] += 1
        return start

    def dropout(
        self,
        inputs: Tensor,
        probability: float,
        *,
        site: int,
        first_token: int = 0,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Dropout whose mask depends only on the place of each element.

        Args:
            inputs: [B, N, C], of tokens that the layer is given.
            site: a number, from 1, for each use of dropout in a layer.
            first_token: tokens of the layer before `inputs`, where tensor-parallel ranks share them.
            residual: [B, N, C], to which the result is added in the same pass; None for nothing.
        """
        place = self._place(site, self.prefix_len + first_token, self._sequence.sequences)
        return positional_dropout.dropout(inputs, probability, place, residual=residual)

    def jittered(self, inputs: Tensor, spread: float, *, site: int, first_token: int = 0) -> Tensor:
        """Return inputs [B, N, C] times numbers in 1 - spread .. 1 + spread, with arguments as of `dropout`."""
        place = self._place(site, self.prefix_len + first_token, self._sequence.sequences)
        return positional_dropout.jittered(inputs, spread, place)

    def _place(self, site: int, start: int, sequences: Sequence[int]) -> DropoutPlace:
        return DropoutPlace.at(self._sequence.seed, self._layer, site, sequences, start, self._sequence.drawn)

    def _kernel(
        self,
        query: Tensor,
        value_size: int,
        start: int,
        dropout: float,
        first_head: int,
        window: int | None,
        softcap: float | None,
    ) -> AttentionKernel:
        """Return the kernel for the queries [B, N, H, D] of all tokens of the token slice, from `start` on."""
        documents, sequences = self._sequence.documents, self._sequence.sequences
        apart = documents is not None and documents.attend_apart and any(len(row) > 1 for row in documents.starts)
        end = start + query.shape[1]

        def dropping(sequences: Sequence[int], first: int, first_key: int) -> AttentionKernel:
            place = self._place(0, first, sequences)
            of_scores = AttentionDropout(dropout, place, first_head, first_key)
            return PlainAttention(of_scores, window=window, softcap=softcap)

        if apart and dropout:
            return document_attention(
                lambda row, *place: dropping(sequences[row : row + 1], *place), documents, end, window
            )
        if apart and softcap is None and (at_once := kernel_of_runs_for(query, window)) is not None:
            seen = self.cached_for_slice(
                f"seen keys in window {window}", lambda: documents.seen(start, end, query.device, window)
            )
            return for_values(DocumentsAtOnce(at_once, seen, end), query, value_size)
        kernel = kernel_for(query, window, softcap, value_size=value_size)
        if apart:
            return document_attention(lambda *_: kernel, documents, end, window)
        if not dropout:
            return kernel
        first_key = 0 if window is None else max(0, start + 1 - window)
        return dropping(sequences, start, first_key)
