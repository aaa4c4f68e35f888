"""Computes the last batch again, so that whoever watches can see in which op something began."""

from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.batches.cuts import Cuts
from deepspeed_ext.runtime.execution.executor import Executor
from deepspeed_ext.runtime.ledger.observers import Observer
from deepspeed_ext.runtime.saving import SavingEngine


class ReplayingEngine(SavingEngine):
    """DeepSpeed's pipeline engine, with the last batch computed a second time, for its forwards and backwards alone."""

    _executor: Executor
    _cuts: Cuts

    @property
    def can_replay(self) -> bool:
        """Whether backwards leave gradients alone: not where hooks of DeepSpeed's reduce them while they run."""
        optimizer = self.optimizer
        if not isinstance(optimizer, DeepSpeedZeroOptimizer):
            return True
        hooked = optimizer.contiguous_gradients or optimizer.overlap_comm
        return not (hooked or optimizer.cpu_offload or optimizer.partition_gradients)

    @property
    def losses_so_far(self) -> Mapping[int, Tensor]:
        """Sum of the losses [] of the token slices done, of each micro-batch that this rank computes the loss of."""
        return self._executor.live.losses

    def parts_of(self, micro_batch: int) -> TokenSlices:
        """The part of each token slice of a micro-batch of the last batch that this rank has, where ranks share it."""
        return self._cuts.parts_of(micro_batch)

    def replay(self, micro_batches: Iterable[Any], observer: Observer) -> None:
        """Compute the ops of the last batch again. Weights, states and counters are as before; gradients are none.

        Dropout draws the same masks, since they depend on the number of the step. Every rank must call it.

        Args:
            micro_batches: those that this rank read for the batch.
        """
        self.complete_weights()
        iterator = self.data_iterator
        self.set_dataiterator(iter(micro_batches))
        self.module.train()
        self.global_steps -= 1
        schedule = self._train_schedule().without_update()
        try:
            with self._batch(), self.observers.joined_by(observer):
                self._begin(schedule, self._cuts, self.micro_batch_size)
                self._exec_schedule(schedule)
        finally:
            self.global_steps += 1
            self.set_dataiterator(iterator)
            self._executor.finish()
            self.optimizer.zero_grad()

    def uncount_step(self) -> None:
        """Let the last step, which changed no weight, not count: the next one takes its number."""
        self.global_steps -= 1
        self.global_samples -= self.train_batch_size()
        self.skipped_steps -= bool(getattr(self.optimizer, "overflow", False))
