"""The loss of a batch, summed over token slices, micro-batches and ranks.

The loss of a batch is the mean over its micro-batches and replicas. Where the module counts tokens (`loss_tokens`), it
is the mean over all tokens of the batch with loss, on all replicas: micro-batch m with n_m of the N tokens has the
weight n_m / N, where the plain mean has 1 / (micro-batches x replicas) for each. N is needed before the first loss,
because a backward may follow at once. So the ranks that compute it read the micro-batches of a batch ahead. To divide
the gradients by N after the last op, as Megatron-LM does, is too late for reductions that already run.

Losses and gradients are averaged over all ranks with the same weights, including the R sequence-parallel ranks of each
replica. These compute parts of one loss, so each part counts R times.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.runtime.micro_batch import to_device
from deepspeed_ext.runtime.topology import SequenceParallelRanks

CountLossTokens = Callable[[Any], float]
"""Number of tokens with loss in a micro-batch of the data iterator."""


class BatchLoss:
    """The loss of an engine's batches, on one rank.

    Args:
        like: a tensor of the type and device of the loss.
        copies: ranks with the same weights: the sequence-parallel ranks of all replicas.
        pipeline: ranks of the pipeline; None with one stage.
        source: global rank of this pipeline's last stage.
    """

    def __init__(
        self,
        like: Tensor,
        *,
        copies: dist.ProcessGroup,
        sequence_ranks: SequenceParallelRanks,
        pipeline: dist.ProcessGroup | None,
        source: int,
    ) -> None:
        self._like, self._copies, self._sequence_ranks = like, copies, sequence_ranks
        self._pipeline, self._source = pipeline, source
        self._computes = source == dist.get_rank()
        """Whether this rank has the last stage."""
        self.begin()

    def begin(self) -> None:
        """Start a batch, in which all micro-batches weigh the same."""
        self._weights: Tensor | None = None
        self._num_tokens: Tensor | None = None

    def weigh_by_tokens(self, counts: Sequence[float]) -> None:
        """Weigh this rank's micro-batches by their tokens with loss; called on all ranks with the last stage."""
        numbers = to_device(torch.tensor([sum(counts), *counts], dtype=torch.float64), self._like.device)
        num_tokens = numbers[0]
        dist.all_reduce(num_tokens, group=self._copies)
        num_tokens /= self._sequence_ranks.size  # each of them counts whole micro-batches
        # Before the mean over micro-batches and ranks.
        shares = numbers[1:] / num_tokens.clamp(min=1)
        self._weights = shares * (len(counts) * dist.get_world_size(self._copies))
        self._num_tokens = num_tokens

    def weigh(self, loss: Tensor, micro_batch: int) -> Tensor:
        """A token slice's share [] of its micro-batch's loss, times the weight of the micro-batch."""
        if self._weights is not None:
            return loss * self._weights[micro_batch].to(loss.dtype)
        return loss if self._sequence_ranks.size == 1 else loss * self._sequence_ranks.size

    def of_micro_batch(self, loss: Tensor) -> Tensor:
        """The loss [] of a whole micro-batch on this replica, given this rank's weighed share [].

        All ranks that share the sequences must call it.
        """
        if self._sequence_ranks.size > 1:
            loss = loss / self._sequence_ranks.size
            dist.all_reduce(loss, group=self._sequence_ranks.group)
        return loss

    def num_tokens(self) -> float:
        """Number of tokens with loss in the last batch, on every rank; every rank must call this."""
        counted = torch.zeros((), dtype=torch.float64, device=self._like.device)
        return self._broadcast(counted if self._num_tokens is None else self._num_tokens).item()

    def mean(self, loss: Tensor | None, *, broadcast: bool = True) -> Tensor | None:
        """The mean [] over replicas of the mean over micro-batches; without `broadcast`, on the last stage only.

        Args:
            loss: mean over the micro-batches of this rank: []; None without the last stage.
        """
        if loss is None:
            loss = torch.zeros((), dtype=self._like.dtype, device=self._like.device)
        loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        if self._computes:
            dist.all_reduce(loss, group=self._copies)
            loss /= dist.get_world_size(self._copies)
        if not broadcast:
            return loss if self._computes else None
        return self._broadcast(loss)

    def _broadcast(self, value: Tensor) -> Tensor:
        """Send a scalar of the last stage to every rank."""
        if self._pipeline is not None:
            dist.broadcast(value, src=self._source, group=self._pipeline)
        return value
