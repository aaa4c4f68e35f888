"""A lowered program as DeepSpeed's pipeline engine wants it: one class per instruction, and a schedule of them."""

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import (
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    ReduceGrads,
    ReduceTiedGrads,
)

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.program import Instruction, InstructionKind, Program


class TokenSliceInstruction(PipeInstruction):
    """A step of a program; the instruction is its only keyword."""

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
    """The program of a rank, one instruction per step; in training, the reductions and the optimizer step follow.

    Args:
        training: whether backwards follow the forwards.
        updates: whether reductions and the optimizer step follow them; None if they do in training.
    """

    def __init__(self, program: Program, shape: PipelineShape, *, training: bool, updates: bool | None = None) -> None:
        super().__init__(micro_batches=shape.num_micro_batches, stages=shape.num_ranks, stage_id=program.rank)
        self.program, self.shape, self.training = program, shape, training
        self.updates = training if updates is None else updates
        self.puts_weight_gradients_off = any(
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
        """Return the same program, with nothing after its last instruction."""
        return ProgramSchedule(self.program, self.shape, training=self.training, updates=False)
