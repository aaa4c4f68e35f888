"""Exchanges among sequence-parallel ranks around attention: all tokens with some heads, and back.

Between the matrices each of R sequence-parallel ranks has its part of a token slice. Around attention it has all of the
token slice's tokens and every R-th part of the heads instead (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509,
section 3), so that keys and values of all tokens are kept by heads, and attention runs as on one rank:

    rank      matrices: tokens x heads       attention: tokens x heads
    0         [ N / 2 first,  H      ]       [ N,  first  H / 2 ]
    1         [ N / 2 last,   H      ]       [ N,  second H / 2 ]

Queries, keys and values go in one message, the output comes back in another; the gradients go the same ways back. Where
ranks outnumber the key heads, each key head is sent to the ranks whose queries read it, and the gradients of these
copies are summed.

Deadlocks. The messages of an exchange are enqueued by the op that attends, in the order of the op's layers. All ranks
of a group are at the same place of the pipeline and run the same program, and recomputation and autograd go through
equal graphs in the same order, so they come to the same exchanges in the same order. An exchange has a communicator
of its own, and waits only for the same op on the other ranks. The R pipelines of a replica are equal copies, so a cycle
of waits through exchanges would be a cycle of one pipeline, and lowering proves that there is none.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.topology import SequenceParallelRanks


def to_all_tokens(ranks: SequenceParallelRanks, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors [B, N, H / R, D] of all tokens of a token slice, for tensors [B, N / R, H, D] of this rank's part."""
    return _Exchange.apply(ranks, True, *tensors)


def to_all_heads(ranks: SequenceParallelRanks, output: Tensor) -> Tensor:
    """The output [B, N / R, H, D] for this rank's part of the tokens, of one [B, N, H / R, D] for its heads."""
    return _Exchange.apply(ranks, False, output)[0]


def with_copies_of_keys(query: Tensor, key: Tensor, value: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, N, heads, D]; where ranks outnumber the key heads, each for the ranks that read it.

    Raises:
        UserError: ranks cannot share the heads evenly.
    """
    check_heads(query.shape[2], key.shape[2], num_ranks)
    copies = max(num_ranks // key.shape[2], 1)
    if copies == 1:
        return query, key, value
    return query, key.repeat_interleave(copies, dim=2), value.repeat_interleave(copies, dim=2)


def check_heads(num_heads: int, num_key_heads: int, num_ranks: int) -> None:
    """Raise a `UserError` if ranks cannot share the query and key heads of a layer evenly."""
    if num_heads % num_ranks:
        raise UserError(
            f"{num_ranks} sequence-parallel ranks cannot share {num_heads} attention heads evenly: "
            "take a number of ranks that divides them"
        )
    if num_key_heads % num_ranks and num_ranks % num_key_heads:
        raise UserError(
            f"{num_ranks} sequence-parallel ranks and {num_key_heads} key heads: "
            "take a number of ranks that divides the key heads, or is a multiple of them"
        )


class _Exchange(torch.autograd.Function):
    """Exchanges several tensors in one message; their gradients go back in one."""

    @staticmethod
    def forward(ctx, ranks: SequenceParallelRanks, to_tokens: bool, *tensors):
        ctx.ranks, ctx.to_tokens = ranks, to_tokens
        return _all_tokens(tensors, ranks) if to_tokens else _all_heads(tensors, ranks)

    @staticmethod
    def backward(ctx, *gradients):
        back = _all_heads if ctx.to_tokens else _all_tokens
        return None, None, *back(gradients, ctx.ranks)


def _all_tokens(tensors: Sequence[Tensor], ranks: SequenceParallelRanks) -> tuple[Tensor, ...]:
    """Make tensors [B, N, H / R, D] of tensors [B, N / R, H, D]."""
    by_heads = [tensor.unflatten(2, (ranks.size, -1)).permute(2, 0, 1, 3, 4) for tensor in tensors]
    by_tokens = _exchanged(by_heads, ranks)
    return tuple(tensor.transpose(0, 1).flatten(1, 2) for tensor in by_tokens)


def _all_heads(tensors: Sequence[Tensor], ranks: SequenceParallelRanks) -> tuple[Tensor, ...]:
    """Make tensors [B, N / R, H, D] of tensors [B, N, H / R, D]."""
    by_tokens = [tensor.unflatten(1, (ranks.size, -1)).transpose(0, 1) for tensor in tensors]
    by_heads = _exchanged(by_tokens, ranks)
    return tuple(tensor.permute(1, 2, 0, 3, 4).flatten(2, 3) for tensor in by_heads)


def _exchanged(tensors: Sequence[Tensor], ranks: SequenceParallelRanks) -> list[Tensor]:
    """Send entry r of each tensor [R, B, n, h, D] to rank r, and return the received ones: views of one message."""
    sent = torch.cat([tensor.flatten(3) for tensor in tensors], dim=3)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    widths = [tensor.shape[3] * tensor.shape[4] for tensor in tensors]
    entries = zip(received.split(widths, dim=3), tensors, strict=True)
    return [entry.unflatten(3, tensor.shape[3:]) for entry, tensor in entries]
