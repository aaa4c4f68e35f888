"""A schedule on a device: simulated, proven to end and lowered once for each shape.

The trainer proves all shapes of a run before any process group exists, and gives the same object to the engine, which
lowers the program of its rank from the timelines that it has.
"""

from collections.abc import Container
from dataclasses import dataclass, field, replace

from deepspeed_ext.plan.ops import OpKind, PipelineShape
from deepspeed_ext.plan.programs.device import DeviceModel, ExpertExchange
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import (
    Proof,
    RankMessages,
    SimulatedSchedule,
    check_lowering,
    lower_rank,
    partners,
)
from deepspeed_ext.plan.programs.program import Program
from deepspeed_ext.plan.schedules import Schedule, forward_order


@dataclass(eq=False)
class ProvenSchedule:
    """The programs of a schedule, of training steps and of evaluations, each made at its first use."""

    schedule: Schedule
    """Order of the ops when training."""
    device: DeviceModel = field(default_factory=DeviceModel)
    """Device, as a model, on which programs must end."""
    host_copies: HostCopySettings | None = None
    """Settings of the copies to the host; None for no copies."""

    def __post_init__(self) -> None:
        self._training = SimulatedSchedule.of(self.schedule)
        self._evaluation = SimulatedSchedule(forward_order, complete=False)
        self._programs: dict[tuple[int, PipelineShape, bool, bool], Program] = {}

    def proof(self, shape: PipelineShape) -> Proof:
        """Prove that the training steps of a shape end.

        Raises:
            PlanError: if they do not, or if that cannot be proven.
        """
        return check_lowering(self._training, shape, self.device, self.host_copies)

    @property
    def messages_under_ops(self) -> bool:
        """Whether messages may travel under ops in training steps of all shapes that were proven."""
        return all(proof.under_ops for proof in self._training.proven.values())

    def forwards_come_first(self, shape: PipelineShape) -> bool:
        """Whether all forwards of a training step precede its backwards on every stage.

        They do if they do on the last stage: its forwards follow, and its backwards precede, those ops elsewhere.
        """
        spans = self._training.spans(shape)(shape.rank_of(shape.last_stage))
        kinds = [span.op.kind for span in spans if span.op.stage == shape.last_stage]
        return all(kind is OpKind.FORWARD for kind in kinds[: kinds.count(OpKind.FORWARD)])

    def program(
        self, rank: int, shape: PipelineShape, *, training: bool, loading_ranks: Container[int], under_ops: bool = True
    ) -> Program:
        """Return the program of a rank in a training step, or in an evaluation, which has forwards only.

        Args:
            loading_ranks: ranks that take micro-batches from the data iterator.
            under_ops: whether messages may travel under ops; False where ranks may load kernels.
        """
        key = rank, shape, training, under_ops
        if key not in self._programs:
            schedule, copies = (self._training, self.host_copies) if training else (self._evaluation, None)
            if training:
                under_ops &= self.proof(shape).under_ops
            elif self.device.exchange is ExpertExchange.ALLTOALL:
                # Forwards without backwards end with every assignment of streams to queues.
                under_ops &= check_lowering(schedule, shape, replace(self.device, hardware_queues=None)).under_ops
            spans = schedule.spans(shape)
            messages = {each: RankMessages(each, spans(each), shape) for each in partners(rank, shape)}
            self._programs[key] = lower_rank(
                rank, messages, shape, loads=rank in loading_ranks, under_ops=under_ops, host_copies=copies
            )
        return self._programs[key]
