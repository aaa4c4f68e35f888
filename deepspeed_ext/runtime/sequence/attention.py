"""Attention of a token slice to itself and to the token slices before it, with exact gradients.

The chain rule across token slices, with one backward per token slice, last to first:

    tokens of    0        1        2
    K, V   [ written | written | written ]        once each, at its forward
    dK, dV [  += 2   |  += 2   |         ]  <- backward of 2: adds to those before, returns its own
           [  += 1   |         |         ]  <- backward of 1: its own = what 2 added + what 1 finds
           [         |         |         ]  <- backward of 0: now everyone has added to its own

When the backward of a token slice runs, all later ones have run, so the gradients of its keys and values are complete
and flow on into the layer's projections like any other gradient: no surrogate loss, no retained graph.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.runtime.attention_kernels import Attended, AttentionKernel, Gradients


class KeyValueState:
    """Keys and values of one layer for one micro-batch, and the gradients that token slices have for earlier ones.

    Args:
        seq_length: tokens of the whole sequence.
    """

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._end = 0  # of the tokens written
        # Each [B, E, G, D] of the tokens before the last token slice that ran backward, in at least fp32.
        self._pending_grads: tuple[Tensor, Tensor] | None = None

    def write(self, key: Tensor, value: Tensor, start: int) -> None:
        """Store the keys and values of the tokens start .. start + N.

        Writing the same tokens again changes nothing, so recomputing a forward is safe.

        Args:
            key: [B, N, G, D].
            value: [B, N, G, D].
            start: number of the first token in the sequence.
        """
        if self._keys is None or self._values is None:
            shape = (key.shape[0], self.seq_length, *key.shape[2:])
            self._keys, self._values = key.new_empty(shape), value.new_empty(shape)
        self._keys[:, start : start + key.shape[1]] = key
        self._values[:, start : start + key.shape[1]] = value
        self._end = max(self._end, start + key.shape[1])

    def read(self, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens 0 .. end, each [B, end, G, D]: views, never copies."""
        assert self._keys is not None and self._values is not None, "read before any write"
        return self._keys[:, :end], self._values[:, :end]

    def accumulate(self, gradients: Gradients, start: int) -> tuple[Tensor, Tensor]:
        """Keep the gradients of a token slice for those before it, and return the complete gradients of its own.

        Args:
            gradients: gradients that the backward of its attention found.
            start: tokens before it.

        Returns:
            Gradients [B, N, G, D] of the token slice's own keys and values.
        """
        own_len, seen_len = gradients.own[0].shape[1], gradients.prefix[0].shape[1]
        due = self._end if self._pending_grads is None else self._pending_grads[0].shape[1]
        assert due == start + own_len, "token slices must run backward last to first"
        pending = []
        for index, (own, prefix) in enumerate(zip(gradients.own, gradients.prefix, strict=True)):
            at_least_fp32 = own.dtype if own.dtype.itemsize >= 4 else torch.float32
            if self._pending_grads is not None:
                # In place, since nobody else holds it; the sum is rounded once, from fp32.
                own.add_(self._pending_grads[index][:, start:])
                of_prefix = self._pending_grads[index][:, :start]
                if seen_len:
                    of_prefix[:, start - seen_len :].add_(prefix)
            elif seen_len == start:
                of_prefix = prefix.to(at_least_fp32)
            else:
                of_prefix = F.pad(prefix.to(at_least_fp32), (0, 0, 0, 0, start - seen_len, 0))
            pending.append(of_prefix)
        self._pending_grads = (pending[0], pending[1]) if start else None
        return gradients.own


class TokenSliceAttention(torch.autograd.Function):
    """Attention over prefix and diagonal. The graph keeps queries, output and log-sum-exp; never keys or values.

    Keys and values live in their `KeyValueState`, outside autograd: views of a buffer that later token slices write
    must not be saved for backward.
    """

    @staticmethod
    def forward(ctx, query, key, value, state: KeyValueState, start: int, scale: float, kernel: AttentionKernel):
        """Return the output [B, N, H, D].

        Args:
            ctx: torch's.
            query: [B, N, H, D].
            key: [B, N, G, D].
            value: [B, N, G, D].
            state: keys and values of the sequence.
            start: tokens before the token slice.
            scale: factor of the scores.
            kernel: computes attention on the device.
        """
        # A query cut from a fused projection would keep the keys and values beside it alive: copy it out.
        query = query.contiguous()
        state.write(key, value, start)
        attended = kernel.forward(query, *state.read(start + query.shape[1]), scale)
        # Kernels leave the heads before the tokens; the next layer wants them after, and would keep a copy of its own.
        output = attended.output.contiguous()
        ctx.save_for_backward(query, output, attended.log_sum_exp)
        ctx.state, ctx.start, ctx.scale, ctx.kernel = state, start, scale, kernel
        return output

    @staticmethod
    def backward(ctx, output_gradient):  # noqa: D102
        query, output, log_sum_exp = ctx.saved_tensors
        key, value = ctx.state.read(ctx.start + query.shape[1])
        gradients = ctx.kernel.backward(output_gradient, query, key, value, Attended(output, log_sum_exp), ctx.scale)
        own_key, own_value = ctx.state.accumulate(gradients, ctx.start)
        return gradients.query, own_key, own_value, None, None, None, None
