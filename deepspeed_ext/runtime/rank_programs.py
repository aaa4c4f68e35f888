"""The programs of one pipeline rank, as schedules of DeepSpeed's engine.

`RankPrograms` lowers a schedule to this rank's program when it is first needed; `ProgramSchedule` gives it to
DeepSpeed's engine, with a class for each kind of instruction. `RunLengths` finds the batches that may load kernels.
"""

from collections import defaultdict
from collections.abc import Container, Hashable, Iterator
from dataclasses import replace

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeInstruction, PipeSchedule, ReduceGrads, ReduceTiedGrads

from deepspeed_ext.plan.ops import OpKind, PipelineShape
from deepspeed_ext.plan.programs.device import Device, ExpertExchange
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import RankMessages, SimulatedSchedule, check_lowering, lower_rank, partners
from deepspeed_ext.plan.programs.program import Instruction, InstructionKind, Program
from deepspeed_ext.plan.schedules import Schedule, forward_order
from deepspeed_ext.runtime.cuda_environment import hardware_queues
from deepspeed_ext.runtime.live_batch import Batch


class TokenSliceInstruction(PipeInstruction):
    """A step of a program, with the instruction as its only keyword."""

    def __init__(self, *, step: Instruction) -> None:
        super().__init__(step=step)

    def __repr__(self) -> str:
        """Text of the instruction in DeepSpeed's log: `SendActivation(3F1.2 @0)`."""
        return f"{self.name}({self.kwargs['step'].place})"


def _instruction_class(kind: InstructionKind) -> type[TokenSliceInstruction]:
    # DeepSpeed looks the handler up by exact class, so every kind has its own.
    name = "".join(word.capitalize() for word in kind.name.split("_"))
    return type(name, (TokenSliceInstruction,), {"__doc__": f"The plan's `{kind.value}`.", "__module__": __name__})


INSTRUCTION_CLASSES: dict[InstructionKind, type[TokenSliceInstruction]] = {
    kind: _instruction_class(kind) for kind in InstructionKind
}


class ProgramSchedule(PipeSchedule):
    """The program of a rank, one instruction per step; reductions and optimizer step follow if it `updates`."""

    def __init__(self, program: Program, shape: PipelineShape, *, training: bool, updates: bool | None = None) -> None:
        super().__init__(micro_batches=shape.num_micro_batches, stages=shape.num_ranks, stage_id=program.rank)
        self.program, self.shape, self.training = program, shape, training
        self.updates = training if updates is None else updates
        self.defers_weight_gradients = any(
            instruction.kind is InstructionKind.WEIGHT_GRADIENT for instruction in program.instructions
        )

    def num_pipe_buffers(self) -> int:
        """Buffers that the program names."""
        return self.program.num_buffers

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The program, then the end of the batch."""
        for instruction in self.program.instructions:
            yield [INSTRUCTION_CLASSES[instruction.kind](step=instruction)]
        if self.updates:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def without_update(self) -> "ProgramSchedule":
        """Return the same program without reductions and optimizer step."""
        return ProgramSchedule(self.program, self.shape, training=self.training, updates=False)


LENGTHS_OF_A_RANGE = 8
"""Lengths of a range after which its others count as run: compilers generalise after two."""


class RunLengths:
    """The lengths for which an accelerator has run all ops of a batch, so that it has loaded their kernels (ADR 22).

    Which lengths load one depends on compilers and libraries, so each new length counts, the same on all ranks.
    """

    def __init__(self) -> None:
        self.settles = not get_accelerator().is_synchronized_device()
        """Whether no message travels under the ops of a batch with new lengths."""
        self._run: defaultdict[Hashable, set[int]] = defaultdict(set)

    def are_new(self, batch: Batch) -> bool:
        """Whether a batch may load kernels."""
        found = ((tokens, self._run[key]) for key, tokens in self._lengths(batch))
        return any(tokens not in run and len(run) < LENGTHS_OF_A_RANGE for tokens, run in found)

    def add(self, batch: Batch) -> None:
        """Add the lengths of a batch that has run."""
        for key, tokens in self._lengths(batch):
            if len(self._run[key]) < LENGTHS_OF_A_RANGE:
                self._run[key].add(tokens)

    def _lengths(self, batch: Batch) -> Iterator[tuple[Hashable, int]]:
        """Lengths of token slices and of their keys, each with its range: up to a power of 2, whole tiles or not."""
        for content, tokens in batch.lengths() if self.settles else ():
            yield (batch.extent, content, tokens.bit_length(), tokens % 128 == 0), tokens


class RankPrograms:
    """A rank's programs by their shape.

    Args:
        schedule: order of the ops when training. One that was simulated before is not simulated again.
        shape: shape of the pipeline, for any number of micro-batches and token slices.
        host_copies: settings of the copies to the host; None for no copies.
        exchange: how tokens reach the experts of other ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        rank: int,
        shape: PipelineShape,
        loading_ranks: Container[int],
        host_copies: HostCopySettings | None = None,
        exchange: ExpertExchange = ExpertExchange.NONE,
    ) -> None:
        queues = hardware_queues() if get_accelerator().device_name() == "cuda" else None
        self._device = Device(hardware_queues=queues, exchange=exchange)
        self._host_copies = host_copies
        self._training = SimulatedSchedule.of(schedule)
        self._evaluation = SimulatedSchedule(forward_order, complete=False)
        self._rank, self._shape = rank, shape
        self._loads = rank in loading_ranks
        self._lowered: dict[tuple[bool, PipelineShape, bool], ProgramSchedule] = {}

    def shape(self, num_micro_batches: int, num_token_slices: int | None = None) -> PipelineShape:
        """Return the shape for a number of micro-batches, and of token slices; None for those of the module."""
        num_token_slices = num_token_slices or self._shape.num_token_slices
        return replace(self._shape, num_micro_batches=num_micro_batches, num_token_slices=num_token_slices)

    def forwards_come_first(self, shape: PipelineShape) -> bool:
        """Whether all forwards of a training step precede its backwards on every stage.

        They do if they do on the last stage: its forwards follow, and its backwards precede, those of the others.
        """
        kinds = [
            span.op.kind
            for span in self._training.spans(shape)(shape.rank_of(shape.last_stage))
            if span.op.stage == shape.last_stage
        ]
        return all(kind is OpKind.FORWARD for kind in kinds[: kinds.count(OpKind.FORWARD)])

    def program(self, shape: PipelineShape, *, training: bool, under_ops: bool = True) -> ProgramSchedule:
        """Return the program of a training step, or of an evaluation, which has forwards only.

        Args:
            under_ops: whether messages may travel under ops; False where ranks may load kernels.
        """
        key = training, shape, under_ops
        if key not in self._lowered:
            schedule, copies = (self._training, self._host_copies) if training else (self._evaluation, None)
            if training:
                # The trainer has done so before it made the process group.
                under_ops &= check_lowering(schedule, shape, self._device, copies).under_ops
            elif self._device.exchange is ExpertExchange.ALLTOALL:
                # Forwards without backwards end with every assignment of streams to queues.
                under_ops &= check_lowering(schedule, shape, replace(self._device, hardware_queues=None)).under_ops
            spans = schedule.spans(shape)
            messages = {rank: RankMessages(rank, spans(rank), shape) for rank in partners(self._rank, shape)}
            program = lower_rank(
                self._rank,
                messages,
                shape,
                loads=self._loads,
                under_ops=under_ops,
                host_copies=copies,
            )
            self._lowered[key] = ProgramSchedule(program, shape, training=training)
        return self._lowered[key]
