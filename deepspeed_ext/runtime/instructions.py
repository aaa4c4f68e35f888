"""A lowered program as DeepSpeed's pipeline engine wants it: one class per instruction, and a schedule of them."""

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import (
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    ReduceGrads,
    ReduceTiedGrads,
)

from deepspeed_ext.plan.lowering import InstructionKind, Program


class TokenSliceInstruction(PipeInstruction):
    """One step of a program; its keywords are the coordinates the plan gave it."""

    def __init__(self, *, micro_batch: int, token_slice: int, buffer: int) -> None:
        super().__init__(micro_batch=micro_batch, token_slice=token_slice, buffer=buffer)


def _instruction_class(kind: InstructionKind) -> type[TokenSliceInstruction]:
    # DeepSpeed looks the handler up by exact class, so every kind has its own.
    name = "".join(word.capitalize() for word in kind.name.split("_"))
    return type(name, (TokenSliceInstruction,), {"__doc__": f"The plan's `{kind.value}`.", "__module__": __name__})


INSTRUCTION_CLASSES: dict[InstructionKind, type[TokenSliceInstruction]] = {
    kind: _instruction_class(kind) for kind in InstructionKind
}


class ProgramSchedule(PipeSchedule):
    """One stage's program, one instruction a step; when training, followed by the reductions and the optimizer step."""

    def __init__(self, program: Program, *, num_micro_batches: int, num_stages: int, training: bool) -> None:
        super().__init__(micro_batches=num_micro_batches, stages=num_stages, stage_id=program.stage)
        self.program = program
        self.training = training

    def num_pipe_buffers(self) -> int:
        """Buffers that the program names."""
        return self.program.num_buffers

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The program, then the end of the batch."""
        for instruction in self.program.instructions:
            yield [
                INSTRUCTION_CLASSES[instruction.kind](
                    micro_batch=instruction.micro_batch,
                    token_slice=instruction.token_slice,
                    buffer=instruction.buffer,
                )
            ]
        if self.training:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
