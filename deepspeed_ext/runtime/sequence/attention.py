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

A sequence in one piece has no other token slice to keep anything for. Its keys and values are autograd's, as in any
other operation: nothing is copied, and what computes the layer again keeps none of them.
"""

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention_kernels import Attended, AttentionKernel
from deepspeed_ext.runtime.sequence.key_values import KeyValueState


class TokenSliceAttention(torch.autograd.Function):
    """Attention over prefix and diagonal. The graph keeps queries, output and log-sum-exp.

    Keys and values live in their `KeyValueState`, outside autograd: views of a buffer that later token slices write
    must not be saved for backward. The graph keeps them, too, where there is no state.
    """

    @staticmethod
    def forward(ctx, query, key, value, state: KeyValueState | None, start: int, scale: float, kernel: AttentionKernel):
        """Return the output [B, N, H, D].

        Args:
            query: [B, N, H, D].
            key: [B, N, G, D].
            value: [B, N, G, D].
            state: keys and values of the sequence; None if the token slice is all of it.
            scale: factor of the scores.
        """
        if state is None:
            query, *keys = kept = _kept(query, key, value)
        else:
            # A query cut from a fused projection would keep the keys and values beside it alive: copy it out.
            kept = (query := query.contiguous(),)
            state.write(key, value, start)
            keys = state.read(start, start + query.shape[1])
        attended = kernel.forward(query, *keys, scale)
        # Kernels leave the heads before the tokens; the next layer wants them after, and would keep a copy of its own.
        output = attended.output.contiguous()
        ctx.save_for_backward(output, attended.log_sum_exp, *kept)
        ctx.state, ctx.start, ctx.scale, ctx.kernel = state, start, scale, kernel
        return output

    @staticmethod
    def backward(ctx, output_gradient):  # noqa: D102
        output, log_sum_exp, query, *keys = ctx.saved_tensors
        state, start = ctx.state, ctx.start
        if state is not None:
            keys = state.read(start, start + query.shape[1])
        gradients = ctx.kernel.backward(output_gradient, query, *keys, Attended(output, log_sum_exp), ctx.scale)
        own_key, own_value = gradients.own if state is None else state.accumulate(gradients, start)
        return gradients.query, own_key, own_value, None, None, None, None


def _kept(*heads: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values to keep: as they are if they hold nothing else alive, else copies.

    Cut from one product, all three together are that product. Where a norm has replaced the queries and keys, the
    values would keep the others alive, which nobody reads.

    Args:
        *heads: each [B, N, heads, D]; no two share an element.
    """
    storages = (each.untyped_storage() for each in heads)
    held = {storage._cdata: storage.nbytes() for storage in storages}
    # Kernels read the elements of a head in one run.
    if sum(held.values()) == sum(each.nbytes for each in heads) and all(each.stride(-1) == 1 for each in heads):
        return heads
    return tuple(each.contiguous() for each in heads)
