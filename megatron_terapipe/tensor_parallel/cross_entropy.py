"""Cross-entropy over a vocabulary of which each rank has a part of the logits."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks


def cross_entropy(logits: Tensor, targets: Tensor, ranks: TensorParallelRanks) -> Tensor:
    """Cross-entropy of each token.

    Args:
        logits: this rank's part of the vocabulary, [..., V / size]; any precision.
        targets: token ids [...], of the whole vocabulary.
        ranks: the ranks that share the vocabulary.

    Returns:
        [...], in at least fp32, the same on every rank.
    """
    at_least_fp32 = logits if logits.element_size() >= 4 else logits.float()
    if ranks.size == 1:
        return F.cross_entropy(at_least_fp32.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)
    return _CrossEntropy.apply(at_least_fp32, targets, ranks)


class _CrossEntropy(torch.autograd.Function):
    """Three sums of a number per token instead of a gather of all logits (arXiv 1909.08053 section 3)."""

    @staticmethod
    def forward(ctx, logits, targets, ranks: TensorParallelRanks):
        maximum = logits.amax(-1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=ranks.group)
        shifted = logits - maximum.unsqueeze(-1)
        own = targets - ranks.rank * logits.shape[-1]
        elsewhere = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(elsewhere, 0).unsqueeze(-1)
        of_target = shifted.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), of_target))
        dist.all_reduce(sums, group=ranks.group)
        total, of_target = sums.unbind()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), own, elsewhere)
        return total.log() - of_target

    @staticmethod
    def backward(ctx, output_gradient):
        probabilities, own, elsewhere = ctx.saved_tensors
        gradient = probabilities * output_gradient.unsqueeze(-1)
        gradient.scatter_add_(-1, own, -output_gradient.masked_fill(elsewhere, 0).unsqueeze(-1))
        return gradient, None, None
