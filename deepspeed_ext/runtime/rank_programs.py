"""The programs that one pipeline rank runs, lowered when they are first needed."""

from collections.abc import Container
from dataclasses import replace

from deepspeed_ext.plan.lowering import lower
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import Schedule, fixed, forward_order, rank_orders
from deepspeed_ext.plan.simulate import check_complete
from deepspeed_ext.runtime.instructions import ProgramSchedule


class RankPrograms:
    """A rank's programs by their extent.

    Args:
        schedule: order of the ops when training.
        rank: the pipeline rank.
        shape: of the pipeline, for any number of micro-batches and token slices.
        loading_ranks: ranks that read the data.
    """

    def __init__(self, schedule: Schedule, *, rank: int, shape: PipelineShape, loading_ranks: Container[int]) -> None:
        self._schedule, self._rank, self._shape = schedule, rank, shape
        self._loading_ranks = loading_ranks
        self._lowered: dict[tuple[bool, PipelineShape], ProgramSchedule] = {}

    def shape(self, num_micro_batches: int, num_token_slices: int | None = None) -> PipelineShape:
        """The pipeline, with so many micro-batches."""
        num_token_slices = num_token_slices or self._shape.num_token_slices
        return replace(self._shape, num_micro_batches=num_micro_batches, num_token_slices=num_token_slices)

    def training(self, num_micro_batches: int) -> ProgramSchedule:
        """The ops in the order of the schedule, then the optimizer step."""
        return self._program(self.shape(num_micro_batches), training=True)

    def evaluation(self, num_micro_batches: int, num_token_slices: int | None = None) -> ProgramSchedule:
        """Forwards alone."""
        return self._program(self.shape(num_micro_batches, num_token_slices), training=False)

    def _program(self, shape: PipelineShape, *, training: bool) -> ProgramSchedule:
        key = training, shape
        if key not in self._lowered:
            schedule = forward_order
            if training:
                # A forward without its backward would train on a part of the gradients, and nobody would notice.
                orders = rank_orders(self._schedule, shape)
                check_complete(orders, shape)
                schedule = fixed(orders)
            programs = lower(schedule, shape, loading_ranks=self._loading_ranks)
            self._lowered[key] = ProgramSchedule(programs[self._rank], shape, training=training)
        return self._lowered[key]
