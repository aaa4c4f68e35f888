"""Attention of a token slice to itself and to the token slices before it, with exact gradients.

The chain rule across token slices, with one backward per token slice, last to first:

    tokens of    0        1        2
    K, V   [ written | written | written ]        once each, at its forward
    dK, dV [  += 2   |  += 2   |         ]  <- backward of 2: adds to those before, returns its own
           [  += 1   |         |         ]  <- backward of 1: its own = those added by 2 + those found by 1
           [         |         |         ]  <- backward of 0: its own, to which all others have added

When the backward of a token slice runs, all later ones have run, so the gradients of its keys and values are complete
and flow into the layer's projections like any other gradient: no surrogate loss, no retained graph.

With a sliding window a token slice reads, and finds gradients for, only the keys in its reach; the table below shows
which keys and gradients are then kept.

In a sequence of one piece, autograd keeps keys and values, as in any other operation: they are not copied, and a
recomputation keeps none of them.

    layer                       keys and values                                      gradients
    whole sequence              one buffer; reading gives views                      of all tokens before the last
                                                                                     token slice that ran backward
    window, in training;        a copy of each token slice's, freed by its own       of the tokens before it, or of the
    copied to the host          backward, which is the last to read them; reading    W - 1 before it
                                puts the keys in reach together
    window, forward only        those in reach of the token slice; the others are    none
                                freed as the next one writes

In a window of W tokens a token attends to itself and W - 1 before it, so a token slice reaches W - 1 tokens back.
Pending gradients of keys, and of values, are one tensor, of the tokens before the last token slice that ran backward:

    token slice          0        1        2        3
    backward of 3     [        = 3               ]
    backward of 2     [     += 2        ]                 its own = those pending for it + those it finds
    backward of 1     [ += 1   ]
    backward of 0

Each backward takes one operation for the sum, however many token slices are before it. The sum is a new tensor, since
a part of a tensor cannot be freed: a buffer that stays until the backward of token slice 0 raises the peak of 1F1B,
where the keys of the next micro-batch come meanwhile. The old and the new sum exist together only for the keys, then
the values, of one layer; there is no new one where a kernel's gradients have the type of sums and their own storage.

Sums are computed in fp32, or in the wider type of the model; `gradients_in` may round them between two
backwards. Each of S - 1 roundings to bf16 adds at most 2^-9, of random signs, so the relative error of dK and dV grows
as the root of S: 0.1 % at 4 token slices, 0.5 % at 64. In a bf16 model it is below the kernels' own error up to some 32
token slices.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention.kernels import (
    Attended,
    AttentionKernel,
    Gradients,
    gradient_of_sinks,
    with_sinks,
)

Heads = tuple[Tensor, ...]
"""Keys and values, each [B, tokens, G, D] of its own G and D; or latents [B, tokens, c + r] in their place."""


class KeyValueState(ABC):
    """Keys and values of one layer for one micro-batch, and the gradients of later token slices for them.

    Args:
        gradients_in: type in which gradients are kept; None for fp32, or the wider type of the model.
    """

    def __init__(self, gradients_in: torch.dtype | None = None) -> None:
        self._gradients_in = gradients_in
        self._ends: dict[int, int] = {}  # of token slices that were written and have not run backward, by their starts
        self._began = False
        # Gradients [B, E, G, D] of keys and values, of the last E tokens before the token slice that ran backward;
        # earlier tokens have none.
        self._pending: list[Tensor | None] = []
        self.num_tensors = 0
        """Tensors of a token slice that are kept, once one was written."""

    @abstractmethod
    def write(self, heads: Heads, start: int) -> None:
        """Store the keys and values [B, N, G, D] of the tokens start .. start + N."""
        self.num_tensors = len(heads)
        if not self._began:
            self._ends[start] = start + heads[0].shape[1]

    @abstractmethod
    def read(self, start: int, end: int) -> Heads:
        """Keys and values [B, E, G, D] that the tokens start .. end attend to: the last E tokens up to `end`."""

    def accumulate(self, gradients: Gradients, start: int) -> Heads:
        """Keep the gradients of a token slice for those before it, and return the complete gradients of its own.

        Returns:
            Gradients [B, N, G, D] of the token slice's own keys and values.
        """
        self._began = True
        assert start == max(self._ends), "token slices must run backward last to first"
        del self._ends[start]
        self._pending = self._pending or [None] * self.num_tensors
        for index, (own, found) in enumerate(zip(gradients.own, gradients.prefix, strict=True)):
            pending = self._pending[index]
            if pending is not None:
                due = pending[:, -own.shape[1] :]
                # In place, since it has no other owner; the sum is rounded once, from fp32.
                own[:, own.shape[1] - due.shape[1] :].add_(due)
                pending = pending[:, : -own.shape[1]]
            self._pending[index] = self._sum(found, pending)
        return gradients.own

    def _sum(self, found: Tensor, pending: Tensor | None) -> Tensor | None:
        """The gradients found, and those pending for the last of these tokens; None for no tokens."""
        pending = found[:, :0] if pending is None else pending
        # Tokens that a later token slice attends to are in the window and the document of this one, too.
        first = found.shape[1] - pending.shape[1]
        assert first >= 0, "a token slice reaches all tokens that a later one reaches"
        if not found.shape[1]:
            return None
        dtype = self._gradients_in or torch.promote_types(found.dtype, torch.float32)
        if found.dtype is dtype and found.untyped_storage().nbytes() == found.nbytes:
            found[:, first:].add_(pending)
            return found
        total = torch.empty(found.shape, dtype=dtype, device=found.device)
        if first:
            total[:, :first] = found[:, :first]
        if pending.shape[1]:
            torch.add(found[:, first:], pending, out=total[:, first:])
        return total


class KeysOfSequence(KeyValueState):
    """Keys and values of a whole sequence, in one buffer that later token slices write on. Reading gives views."""

    def __init__(self, seq_length: int, gradients_in: torch.dtype | None = None) -> None:
        super().__init__(gradients_in)
        self.seq_length = seq_length
        self._kept: Heads = ()

    def room(self, like: Heads, start: int) -> Heads:
        """The buffers' parts for keys and values [B, N, heads, D], for results that are computed there."""
        if not self._kept:
            self._kept = tuple(each.new_empty((each.shape[0], self.seq_length, *each.shape[2:])) for each in like)
        end = start + like[0].shape[1]
        return tuple(each[:, start:end].detach() for each in self._kept)

    def write(self, heads: Heads, start: int) -> None:
        """Store keys and values [B, N, heads, D]. The same tokens may be written again, as recomputation does."""
        super().write(heads, start)
        for own, each in zip(self.room(heads, start), heads, strict=True):
            if own.untyped_storage()._cdata != each.untyped_storage()._cdata:
                own.copy_(each)

    def read(self, start: int, end: int) -> Heads:
        """Keys and values [B, end, heads, D] of the tokens 0 .. end."""
        assert self._kept, "read before any write"
        return tuple(each[:, :end] for each in self._kept)


class KeysOfTokenSlices(KeyValueState):
    """Keys and values of each token slice apart: for a sliding window, or to be copied to the host.

    Args:
        forward_only: whether no backward follows, so that a write frees the keys out of reach.
    """

    def __init__(
        self, window: int | None, gradients_in: torch.dtype | None = None, *, forward_only: bool = False
    ) -> None:
        super().__init__(gradients_in)
        self.window, self._forward_only = window, forward_only
        self.kept: dict[int, Heads] = {}
        """Keys and values [B, N, G, D] by first token; forward only, those in reach of the last token slice."""

    def write(self, heads: Heads, start: int) -> None:
        """Store copies of keys and values [B, N, heads, D], in place of earlier ones of the same tokens."""
        super().write(heads, start)
        if self._forward_only and start:
            first = self._first_in_reach(start)
            parts = zip(*self._between(first, start), heads, strict=True)
            self.kept = {first: tuple(torch.cat(each, dim=1) for each in parts)}
        else:
            # Copied, since they are parts of a product that would stay with them.
            self.kept[start] = tuple(each.clone(memory_format=torch.contiguous_format) for each in heads)

    def read(self, start: int, end: int) -> Heads:
        """Keys and values [B, reach, heads, D], put together from the token slices where there are several."""
        parts = self._between(self._first_in_reach(start), end)
        return parts[0] if len(parts) == 1 else tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))

    def accumulate(self, gradients: Gradients, start: int) -> Heads:
        """Add up gradients, as in `KeyValueState`, and free the keys of the token slice, which no later op reads."""
        assert not self._forward_only, f"a backward at token {start} of a sequence that runs forward only"
        complete = super().accumulate(gradients, start)
        del self.kept[start]
        return complete

    def _first_in_reach(self, start: int) -> int:
        return 0 if self.window is None else max(0, start + 1 - self.window)

    def _between(self, first: int, end: int) -> list[Heads]:
        """Keys and values of the tokens first .. end, token slice by token slice."""
        parts = [
            tuple(each[:, max(0, first - begin) :] for each in heads)
            for begin, heads in sorted(self.kept.items())
            if begin < end and first < begin + heads[0].shape[1]
        ]
        assert sum(heads[0].shape[1] for heads in parts) == end - first, "keys in reach are not there"
        return parts


class TokenSliceAttention(torch.autograd.Function):
    """Attention over prefix and diagonal. The graph keeps queries, output and log-sum-exp.

    Keys and values live in their `KeyValueState`, outside autograd: views of a buffer that later token slices write
    must not be saved for backward. The graph keeps them, too, where there is no state.
    """

    @staticmethod
    def forward(
        ctx,
        query,
        key,
        value,
        state: KeyValueState | None,
        start: int,
        scale: float,
        kernel: AttentionKernel,
        sinks=None,
    ):
        """Return the output [B, N, H, D].

        Args:
            query: [B, N, H, D].
            key: [B, N, G, D].
            value: [B, N, G, D].
            state: keys and values of the sequence; None if the token slice is all of it.
            sinks: [H], scores as in `with_sinks`; None for none.
        """
        if state is None:
            query, *keys = kept = _kept(query, key, value)
        else:
            # A query cut from a fused projection would keep its keys and values alive: copy it.
            kept = (query := query.contiguous(),)
            state.write((key, value), start)
            keys = state.read(start, start + query.shape[1])
        attended = kernel.forward(query, *keys, scale)
        if sinks is not None:
            attended = Attended(*with_sinks(*attended, sinks))
        # Kernels leave the heads before the tokens; the next layer needs them after, and would keep a copy of its own.
        output = attended.output.contiguous()
        ctx.save_for_backward(output, attended.log_sum_exp, sinks, *kept)
        ctx.state, ctx.start, ctx.scale, ctx.kernel = state, start, scale, kernel
        return output

    @staticmethod
    def backward(ctx, output_gradient):  # noqa: D102
        output, log_sum_exp, sinks, query, *keys = ctx.saved_tensors
        state, start, attended = ctx.state, ctx.start, Attended(output, log_sum_exp)
        if state is not None:
            keys = state.read(start, start + query.shape[1])
        gradients = ctx.kernel.backward(output_gradient, query, *keys, attended, ctx.scale)
        own_key, own_value = gradients.own if state is None else state.accumulate(gradients, start)
        of_sinks = None if sinks is None else gradient_of_sinks(output_gradient, *attended, sinks)
        return gradients.query, own_key, own_value, None, None, None, None, of_sinks


def _kept(*heads: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values to keep: as they are if they keep no other tensor alive, else copies.

    Cut from one product, all three together are that product. Where a norm has replaced the queries and keys, the
    values would keep the others alive without use.

    Args:
        *heads: each [B, N, heads, D]; no two share an element.
    """
    storages = (each.untyped_storage() for each in heads)
    held = {storage._cdata: storage.nbytes() for storage in storages}
    # Kernels read the elements of a head in one run.
    if sum(held.values()) == sum(each.nbytes for each in heads) and all(each.stride(-1) == 1 for each in heads):
        return heads
    return tuple(each.contiguous() for each in heads)
