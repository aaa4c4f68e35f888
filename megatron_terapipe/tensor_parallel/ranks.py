"""The ranks that share each matrix, and the collectives among them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

Pending = Callable[[], Tensor]
"""A collective under way: call it to wait for the result."""


class WeightPart(NamedTuple):
    """The part of a weight that a rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole weight."""
    cut: int = 0
    """Dimension that ranks share."""
    start: int = 0
    """First index of the part in that dimension."""


Initializer = Callable[[Tensor, WeightPart], object]
"""Fills a part of a weight in place, with the same values as if it filled the whole."""

# Torch 2.13 renamed both, and warns of the names that older releases have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class TensorParallelRanks:
    """Ranks that share each layer's matrices; by default one rank alone.

    Tokens are in dimension 1 of every tensor here.
    """

    rank: int = 0
    """This one's place among them."""
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Their process group; None for one alone."""
    sequence_parallel: bool = False
    """Between the matrices, each has its part of the tokens."""

    def parameter(
        self, *shape: int, cut: int, initialize: Initializer | None, device: torch.device | None = None
    ) -> nn.Parameter:
        """This rank's part of a weight, whose values are the same for any number of ranks.

        Args:
            shape: shape of the whole weight.
            cut: dimension that ranks share.
            initialize: fills the part in place; None leaves it at 0.
            device: its device; None for torch's default.
        """
        assert shape[cut] % self.size == 0, "the configuration lets ranks share only what they can share evenly"
        length = shape[cut] // self.size
        part = torch.zeros(*shape[:cut], length, *shape[cut + 1 :], device=device)
        if initialize is not None:
            initialize(part, WeightPart(shape, cut, self.rank * length))
        parameter = nn.Parameter(part)
        # Read by DeepSpeed to count norms, by the checkpoint to put parts together.
        parameter.tensor_model_parallel = True
        parameter.partition_dim = cut
        return parameter

    def replicated(self, weight: Tensor, *, of_heads: bool = False) -> nn.Parameter:
        """Return a parameter [...] that every rank holds whole and applies to its own tokens, or to its own heads.

        Args:
            of_heads: whether it is applied to heads.
        """
        parameter = nn.Parameter(weight)
        # Read by whoever completes gradients: each rank then has a part of this one's.
        parameter.sequence_parallel = self.sequence_parallel or (of_heads and self.size > 1)
        return parameter

    def own_tokens(self, whole: Tensor) -> Tensor:
        """Return the tokens that this rank has between the matrices: [B, n, ...] of `whole` [B, N, ...]."""
        return whole.chunk(self.size, dim=1)[self.rank] if self.sequence_parallel else whole

    def first_token(self, num_tokens: int) -> int:
        """Tokens of other ranks before the `num_tokens` that this rank has between the matrices."""
        return self.rank * num_tokens if self.sequence_parallel else 0

    def start_sum(self, part: Tensor) -> Pending:
        """Start to sum a tensor [...] over all ranks, in place."""
        if self.size == 1:
            return lambda: part
        work = dist.all_reduce(part, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return part

        return finish

    def start_gather(self, part: Tensor) -> Pending:
        """Start to gather the tokens of all ranks: [B, N / size, C] to [B, N, C]."""
        part = part.contiguous()
        gathered = part.new_empty((self.size, *part.shape))
        work = _all_gather(gathered.flatten(0, 1), part, group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            # With one row the ranks' parts already lie one after the other, and nothing is copied.
            return gathered.transpose(0, 1).flatten(1, 2)

        return finish

    def start_reduce_scatter(self, whole: Tensor) -> Pending:
        """Start to sum a tensor over all ranks, of which each gets its tokens: [B, N, C] to [B, N / size, C]."""
        by_rank = whole.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        own = torch.empty_like(by_rank[0])
        work = _reduce_scatter(own, by_rank.flatten(0, 1), group=self.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return own

        return finish

    def start_complete(self, partial: Tensor) -> Pending:
        """Start to sum partial results [B, N, ...]; each rank gets its tokens between the matrices: [B, n, ...]."""
        return self.start_reduce_scatter(partial) if self.sequence_parallel else self.start_sum(partial)

    def sum_parts(self, partial: Tensor) -> Tensor:
        """Sum what every rank computed a part of: [B, N, C] to the tokens this rank has between the matrices.

        Backward, every rank gets the gradients of all tokens.
        """
        return partial if self.size == 1 else _SumParts.apply(partial, self)


class _SumParts(torch.autograd.Function):
    """Megatron's g, or g bar with sequence parallelism."""

    @staticmethod
    def forward(ctx, partial, ranks: TensorParallelRanks):
        ctx.ranks = ranks
        # Summed in place: nobody keeps the part, which a product or an embedding has just made.
        return ranks.start_complete(partial.detach())()

    @staticmethod
    def backward(ctx, output_gradient):
        ranks = ctx.ranks
        return ranks.start_gather(output_gradient)() if ranks.sequence_parallel else output_gradient, None
