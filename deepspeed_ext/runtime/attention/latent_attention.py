"""Latent attention of a token slice: keys and values of all heads follow from one latent vector of each token.

A token has a latent [c] and a rotated key [r], one vector of c + r numbers. A weight [H, n + v, c] has the rows of the
keys [n] and values [v] of each head (DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434 section 2.1):

    key of head h      [ W_h[:n] latent | rotated key ]      n + r channels
    value of head h      W_h[n:] latent                      v channels

Either of two things is kept for the token slices after, for the same output and gradients:

    kept        numbers a token    computed
    expanded    H (n + r + v)      keys and values once
    latent      c + r              keys and values of the whole reach in each token slice, and again in its backward

Where latents are kept, gradients of later token slices are added up at the latents, c + r numbers a token, and the
gradient of the weight is a sum over token slices, each over its whole reach. It cannot be deferred: the gradients of
keys and values would have to stay until then. Heads are computed in groups, so that few keys and values exist at once.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepspeed_ext.plan.costs import EXPANDED_AT_ONCE
from deepspeed_ext.runtime.attention.kernels import Attended, AttentionKernel, Gradients
from deepspeed_ext.runtime.attention.token_slice_attention import KeyValueState
from deepspeed_ext.runtime.gradients.weight_gradients import linear

KernelOfHeads = Callable[[Tensor, int], AttentionKernel]
"""The kernel for queries [B, N, h, n + r] of some heads, given the number of the first."""


def expanded(latent: Tensor, weight: Tensor, key_size: int) -> tuple[Tensor, Tensor]:
    """Return keys [B, E, H, n + r] and values [B, E, H, v] of latents.

    Args:
        latent: [B, E, c + r], the rotated keys last.
        weight: [H, n + v, c].
        key_size: n.
    """
    heads, rows, rank = weight.shape
    own, value = linear(latent[..., :rank], weight).unflatten(-1, (heads, rows)).tensor_split((key_size,), dim=-1)
    rotated = latent[..., None, rank:].expand(-1, -1, heads, -1)
    return torch.cat((own, rotated), dim=-1), value


class LatentTokenSliceAttention(torch.autograd.Function):
    """Attention over prefix and diagonal from latents. The graph keeps queries, output and log-sum-exp.

    Latents live in their `KeyValueState`, as keys and values do; the graph keeps them where there is none.
    """

    @staticmethod
    def forward(
        ctx, query, latent, weight, state: KeyValueState | None, start: int, scale: float, kernel_of: KernelOfHeads
    ):
        """Return the output [B, N, H, v].

        Args:
            query: [B, N, H, n + r].
            latent: [B, N, c + r].
            weight: [H, n + v, c].
            state: latents of the sequence; None if the token slice is all of it.
        """
        query, reach = query.contiguous(), latent
        if state is not None:
            state.write((latent,), start)
            (reach,) = state.read(start, start + query.shape[1])
        key_size = query.shape[-1] - (latent.shape[-1] - weight.shape[-1])
        parts = []
        for heads in _groups(reach, weight):
            of_heads = query[:, :, heads]
            keys_and_values = expanded(reach, weight[heads], key_size)
            parts.append(kernel_of(of_heads, heads.start).forward(of_heads, *keys_and_values, scale))
            del keys_and_values  # The next heads take their memory.
        output, log_sum_exp = (torch.cat(each, dim) for each, dim in zip(zip(*parts, strict=True), (2, 1), strict=True))
        ctx.save_for_backward(output.contiguous(), log_sum_exp, query, weight, *([latent] if state is None else []))
        ctx.state, ctx.start, ctx.scale, ctx.kernel_of, ctx.key_size = state, start, scale, kernel_of, key_size
        return output

    @staticmethod
    def backward(ctx, output_gradient):  # noqa: D102
        output, log_sum_exp, query, weight, *reach = ctx.saved_tensors
        state, start, rank = ctx.state, ctx.start, weight.shape[-1]
        if state is not None:
            reach = state.read(start, start + query.shape[1])
        (reach,) = reach
        # Sums over heads are in at least fp32, and rounded once.
        at_least_fp32 = torch.promote_types(reach.dtype, torch.float32)
        of_query, of_weight = torch.empty_like(query), torch.empty_like(weight)
        of_latent = torch.zeros_like(reach, dtype=at_least_fp32)
        for heads in _groups(reach, weight):
            one, matrix = query[:, :, heads], weight[heads]
            attended = Attended(output[:, :, heads], log_sum_exp[:, heads].contiguous())
            found = ctx.kernel_of(one, heads.start).backward(
                output_gradient[:, :, heads], one, *expanded(reach, matrix, ctx.key_size), attended, ctx.scale
            )
            of_query[:, :, heads] = found.query
            of_key, of_value = (torch.cat(each, dim=1) for each in zip(found.prefix, found.own, strict=True))
            # Earlier tokens have no gradient.
            seen = slice(reach.shape[1] - of_key.shape[1], None)
            rows = torch.cat((of_key[..., : ctx.key_size], of_value), dim=-1).flatten(2)
            of_latent[:, seen, :rank] += rows @ matrix.flatten(0, 1)
            of_latent[:, seen, rank:] += of_key[..., ctx.key_size :].sum(2, dtype=at_least_fp32)
            of_weight[heads] = (rows.flatten(0, 1).t() @ reach[:, seen, :rank].flatten(0, 1)).view_as(matrix)
            del found, of_key, of_value, rows
        of_latent = of_latent.to(reach.dtype)
        if state is not None:
            prefix_len = reach.shape[1] - query.shape[1]
            prefix, own = of_latent.tensor_split((prefix_len,), dim=1)
            (of_latent,) = state.accumulate(Gradients(of_query, (own,), (prefix,)), start)
        return of_query, of_latent, of_weight, None, None, None, None


def _groups(reach: Tensor, weight: Tensor) -> Iterator[slice]:
    """Heads whose keys and values exist at once."""
    num_heads, rows, rank = weight.shape
    of_head = reach.shape[0] * reach.shape[1] * (rows + reach.shape[-1] - rank)
    at_once = max(EXPANDED_AT_ONCE // of_head, 1)
    for first in range(0, num_heads, at_once):
        yield slice(first, min(first + at_once, num_heads))
