"""The programs that one stage runs, lowered when they are first needed."""

from deepspeed_ext.plan.lowering import lower
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import Schedule, forward_order
from deepspeed_ext.runtime.instructions import ProgramSchedule


class StagePrograms:
    """A stage's programs by the number of micro-batches.

    Args:
        schedule: order of the ops when training.
        stage: the stage.
        num_stages: stages of the pipeline.
        num_token_slices: token slices of a micro-batch.
        every_stage_loads: every stage reads the data, not the first and the last alone.
    """

    def __init__(
        self, schedule: Schedule, *, stage: int, num_stages: int, num_token_slices: int, every_stage_loads: bool
    ) -> None:
        self._schedule, self._stage = schedule, stage
        self._num_stages, self._num_token_slices = num_stages, num_token_slices
        self._loading_stages = range(num_stages) if every_stage_loads else None
        self._lowered: dict[tuple[bool, int], ProgramSchedule] = {}

    def shape(self, num_micro_batches: int) -> PipelineShape:
        """The pipeline, with so many micro-batches."""
        return PipelineShape(self._num_stages, num_micro_batches, self._num_token_slices)

    def training(self, num_micro_batches: int) -> ProgramSchedule:
        """Forwards and backwards in the order of the schedule, then the optimizer step."""
        return self._program(num_micro_batches, training=True)

    def evaluation(self, num_micro_batches: int) -> ProgramSchedule:
        """Forwards alone."""
        return self._program(num_micro_batches, training=False)

    def _program(self, num_micro_batches: int, *, training: bool) -> ProgramSchedule:
        key = training, num_micro_batches
        if key not in self._lowered:
            programs = lower(
                self._schedule if training else forward_order,
                self.shape(num_micro_batches),
                loading_stages=self._loading_stages,
            )
            self._lowered[key] = ProgramSchedule(
                programs[self._stage],
                num_micro_batches=num_micro_batches,
                num_stages=self._num_stages,
                training=training,
            )
        return self._lowered[key]
