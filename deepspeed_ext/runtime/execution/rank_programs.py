"""The programs that one pipeline rank runs, lowered when they are first needed."""

from collections.abc import Container
from dataclasses import replace

from deepspeed.accelerator import get_accelerator

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.device import Device
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import check_lowering, lower_rank, partners
from deepspeed_ext.plan.programs.posting import RankMessages
from deepspeed_ext.plan.programs.simulated_schedule import SimulatedSchedule
from deepspeed_ext.plan.schedules import Schedule, forward_order
from deepspeed_ext.runtime.cuda_environment import hardware_queues
from deepspeed_ext.runtime.execution.instructions import ProgramSchedule


class RankPrograms:
    """A rank's programs by their extent.

    Args:
        schedule: order of the ops when training. One that was simulated before is not simulated again.
        shape: shape of the pipeline, for any number of micro-batches and token slices.
        settles: the first program of an extent lets no message travel under an op, since on an accelerator every rank
            then loads kernels, and may have to wait for its device (ADR 22). None where the accelerator runs behind
            its host.
        host_copies: what waits on the host while nothing reads it; None for nothing.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        shape: PipelineShape,
        loading_ranks: Container[int],
        settles: bool | None = None,
        host_copies: HostCopySettings | None = None,
    ) -> None:
        self._settles = not get_accelerator().is_synchronized_device() if settles is None else settles
        self._hardware_queues = hardware_queues() if get_accelerator().device_name() == "cuda" else None
        self._host_copies = host_copies
        self._settled: set[tuple[bool, PipelineShape]] = set()
        self._training = SimulatedSchedule.of(schedule)
        self._evaluation = SimulatedSchedule(forward_order, complete=False)
        self._rank, self._shape = rank, shape
        self._loads = rank in loading_ranks
        self._lowered: dict[tuple[bool, PipelineShape, bool], ProgramSchedule] = {}

    def shape(self, num_micro_batches: int, num_token_slices: int | None = None) -> PipelineShape:
        """Return the shape of the pipeline for a number of micro-batches.

        Args:
            num_token_slices: token slices of a micro-batch; None for those of training.
        """
        num_token_slices = num_token_slices or self._shape.num_token_slices
        return replace(self._shape, num_micro_batches=num_micro_batches, num_token_slices=num_token_slices)

    def training(self, num_micro_batches: int, num_token_slices: int | None = None) -> ProgramSchedule:
        """Return the program of a training step: the ops in the order of the schedule, then the optimizer step.

        Args:
            num_token_slices: token slices of a micro-batch; None for those of the module.
        """
        return self._program(self.shape(num_micro_batches, num_token_slices), training=True)

    def evaluation(self, num_micro_batches: int, num_token_slices: int | None = None) -> ProgramSchedule:
        """Return the program of an evaluation, which has forwards only.

        Args:
            num_token_slices: token slices of a micro-batch; None for those of training.
        """
        return self._program(self.shape(num_micro_batches, num_token_slices), training=False)

    def ran(self, schedule: ProgramSchedule) -> None:
        """Take note that a program has run to its end."""
        self._settled.add((schedule.training, schedule.shape))

    def _program(self, shape: PipelineShape, *, training: bool) -> ProgramSchedule:
        under_ops = not self._settles or (training, shape) in self._settled
        key = training, shape, under_ops
        if key not in self._lowered:
            if training:
                # The trainer has done so before the process group was made.
                check_lowering(self._training, shape, Device(hardware_queues=self._hardware_queues), self._host_copies)
            spans = (self._training if training else self._evaluation).spans(shape)
            messages = {rank: RankMessages(rank, spans(rank), shape) for rank in partners(self._rank, shape)}
            program = lower_rank(
                self._rank,
                messages,
                shape,
                loads=self._loads,
                under_ops=under_ops,
                host_copies=self._host_copies if training else None,
            )
            self._lowered[key] = ProgramSchedule(program, shape, training=training)
        return self._lowered[key]
