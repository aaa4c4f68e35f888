"""The loss of a batch: what each micro-batch adds to it, and its mean, which every rank is told.

The loss of a batch is the mean over its micro-batches and replicas. Where the module counts tokens (`loss_tokens`), it
is the mean over all tokens of the batch that bear loss, on all replicas: micro-batch m with n_m of the N tokens has the
weight n_m / N, where the plain mean has 1 / (micro-batches x replicas) for each. N must be known before the first
loss, because a backward may follow at once. So the ranks that compute it read the micro-batches of a batch ahead.

Losses and gradients are averaged over all ranks with the same weights, R sequence-parallel ranks of each replica among
them. These compute parts of one loss, so each part counts R times.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.runtime.sequence.sequence_ranks import SequenceParallelRanks

CountLossTokens = Callable[[Any], float]
"""Number of tokens that bear loss in a micro-batch, as the data iterator yields it."""


class BatchLoss:
    """The loss of one batch after the other, on one rank.

    Args:
        computes: whether this rank has the last stage.
        copies: ranks with the same weights: the sequence-parallel ranks of all replicas.
        sequence_ranks: of these, those that share each sequence with this rank.
        pipeline: ranks of the other stages; None if there are none.
        source: rank of the last stage.
        weight: a weight of this rank, whose type and device the loss has.
    """

    def __init__(
        self,
        *,
        computes: bool,
        copies: dist.ProcessGroup,
        sequence_ranks: SequenceParallelRanks,
        pipeline: dist.ProcessGroup | None,
        source: int,
        weight: Tensor,
    ) -> None:
        self._computes, self._copies, self._sequence_ranks = computes, copies, sequence_ranks
        self._pipeline, self._source, self._weight = pipeline, source, weight
        self._ahead: deque[Any] = deque()
        self._weights: Tensor | None = None
        self._num_tokens: Tensor | None = None

    def read_ahead(self, num_micro_batches: int, next_batch: Callable[[], Any], count: CountLossTokens | None) -> None:
        """Read and weigh the micro-batches of a batch, where tokens are counted.

        Args:
            next_batch: gives the next micro-batch; raises StopIteration if there is none.
            count: counts the tokens of a micro-batch; None if micro-batches weigh the same.
        """
        self._ahead, self._weights, self._num_tokens = deque(), None, None
        if count is None or not self._computes:
            return
        try:
            for _ in range(num_micro_batches):
                self._ahead.append(next_batch())
        except StopIteration:
            pass  # whoever takes the micro-batch that is missing says so
        counts = [0.0 if batch is None else count(batch) for batch in self._ahead]
        num_tokens = torch.tensor(sum(counts), dtype=torch.float64, device=self._weight.device)
        dist.all_reduce(num_tokens, group=self._copies)
        num_tokens /= self._sequence_ranks.size  # each of them counts whole micro-batches
        # Before the mean over micro-batches and ranks.
        shares = torch.tensor(counts, dtype=torch.float64, device=self._weight.device) / num_tokens.clamp(min=1)
        self._weights = shares * (num_micro_batches * dist.get_world_size(self._copies))
        self._num_tokens = num_tokens

    def first(self, next_batch: Callable[[], Any]) -> Any:
        """Return the first micro-batch of a batch without taking it; None if there is none."""
        if not self._ahead and self._weights is None:
            with suppress(StopIteration):  # as above
                self._ahead.append(next_batch())
        return self._ahead[0] if self._ahead else None

    def take(self, next_batch: Callable[[], Any]) -> Any:
        """Return the next micro-batch: the first of those read ahead, else what `next_batch` gives."""
        if self._ahead:
            return self._ahead.popleft()
        if self._weights is not None:
            raise StopIteration
        return next_batch()

    def weigh(self, loss: Tensor, micro_batch: int) -> Tensor:
        """Return the loss [] of a token slice, times the weight of its micro-batch.

        Args:
            loss: share of the micro-batch's loss: [].
        """
        if self._weights is not None:
            return loss * self._weights[micro_batch].to(loss.dtype)
        return loss if self._sequence_ranks.size == 1 else loss * self._sequence_ranks.size

    def of_micro_batch(self, loss: Tensor) -> Tensor:
        """Return the loss [] of a whole micro-batch on this replica; all ranks that share it must ask.

        Args:
            loss: what this rank has of it, weighed: [].
        """
        if self._sequence_ranks.size > 1:
            loss = loss / self._sequence_ranks.size
            dist.all_reduce(loss, group=self._sequence_ranks.group)
        return loss

    def num_tokens(self) -> float:
        """Number of tokens that bore loss in the last batch, on every rank; every rank must ask."""
        counted = torch.zeros((), dtype=torch.float64, device=self._weight.device)
        return self._told(counted if self._num_tokens is None else self._num_tokens).item()

    def mean(self, loss: Tensor | None, *, broadcast: bool = True) -> Tensor | None:
        """Return the mean [] over replicas of the mean over micro-batches.

        Args:
            loss: mean over the micro-batches of this rank: []; None where the last stage is not.
            broadcast: give it to every stage; otherwise only the last one has it.
        """
        if loss is None:
            loss = torch.zeros((), dtype=self._weight.dtype, device=self._weight.device)
        loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        if self._computes:
            dist.all_reduce(loss, group=self._copies)
            loss /= dist.get_world_size(self._copies)
        if not broadcast:
            return loss if self._computes else None
        return self._told(loss)

    def _told(self, value: Tensor) -> Tensor:
        """Return a scalar of the last stage, on every rank."""
        if self._pipeline is not None:
            dist.broadcast(value, src=self._source, group=self._pipeline)
        return value


def batch_loss(engine: Any) -> BatchLoss:
    """Return the loss of an engine's batches, on this rank."""
    pipeline = engine.module.pipeline
    return BatchLoss(
        computes=engine.computes_loss,
        copies=engine.grid.get_data_parallel_group(),
        sequence_ranks=engine.module.sequence_ranks,
        pipeline=engine.grid.get_pipe_parallel_group() if engine.is_pipe_parallel else None,
        source=engine.grid.stage_to_global(pipeline.rank_of(pipeline.last_stage)),
        weight=next(engine.module.parameters()),
    )
