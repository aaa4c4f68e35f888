"""Attention of a token slice to itself and to the token slices before it, with exact gradients.

The chain rule across token slices, with one backward per token slice, last to first:

    tokens of    0        1        2
    K, V   [ written | written | written ]        once each, at its forward
    dK, dV [  += 2   |  += 2   |         ]  <- backward of 2: adds to those before, returns its own
           [  += 1   |         |         ]  <- backward of 1: its own = what 2 added + what 1 finds
           [         |         |         ]  <- backward of 0: now everyone has added to its own

When the backward of a token slice runs, all later ones have run, so the gradients of its keys and values are complete
and flow on into the layer's projections like any other gradient: no surrogate loss, no retained graph.

With a sliding window a token slice reads, and finds gradients for, the keys in its reach alone; `key_values` says which
keys and gradients are then kept.
"""

import torch

from deepspeed_ext.runtime.attention_kernels import Attended, AttentionKernel
from deepspeed_ext.runtime.sequence.key_values import KeyValueState


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
        attended = kernel.forward(query, *state.read(start, start + query.shape[1]), scale)
        # Kernels leave the heads before the tokens; the next layer wants them after, and would keep a copy of its own.
        output = attended.output.contiguous()
        ctx.save_for_backward(query, output, attended.log_sum_exp)
        ctx.state, ctx.start, ctx.scale, ctx.kernel = state, start, scale, kernel
        return output

    @staticmethod
    def backward(ctx, output_gradient):  # noqa: D102
        query, output, log_sum_exp = ctx.saved_tensors
        key, value = ctx.state.read(ctx.start, ctx.start + query.shape[1])
        gradients = ctx.kernel.backward(output_gradient, query, key, value, Attended(output, log_sum_exp), ctx.scale)
        own_key, own_value = ctx.state.accumulate(gradients, ctx.start)
        return gradients.query, own_key, own_value, None, None, None, None
