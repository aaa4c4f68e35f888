"""Programs as DeepSpeed's engine sees them."""

from inspect import unwrap

import pytest
from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeSchedule, ReduceGrads, ReduceTiedGrads
from hypothesis import given

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import Instruction, InstructionKind
from deepspeed_ext.plan.schedules import schedule_named
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.executor import INSTRUCTION_CLASSES, ProgramSchedule
from tests.strategies import schedule_names, shapes


@given(name=schedule_names, shape=shapes(max_stages=4, max_micro_batches=4, max_token_slices=3))
def test_a_schedule_yields_its_program_and_then_the_end_of_the_batch(name: str, shape: PipelineShape) -> None:
    for program in lower(schedule_named(name), shape):
        schedule = ProgramSchedule(program, shape, training=True)
        assert isinstance(schedule, PipeSchedule)
        assert schedule.num_pipe_buffers() == program.num_buffers
        steps = list(schedule)
        assert [type(command) for command in steps[-1]] == [ReduceTiedGrads, ReduceGrads, OptimizerStep]
        for (command,), instruction in zip(steps[:-1], program.instructions, strict=True):
            assert type(command) is INSTRUCTION_CLASSES[instruction.kind]
            assert command.kwargs == {"step": instruction}


def test_evaluation_ends_with_the_program() -> None:
    shape = PipelineShape(2, 2, 3)
    program = lower(schedule_named("gpipe"), shape)[0]
    schedule = ProgramSchedule(program, shape, training=False)
    assert len(list(schedule)) == len(program.instructions)


def test_every_kind_has_a_class_of_its_own_and_a_method_of_the_engine() -> None:
    assert INSTRUCTION_CLASSES.keys() == set(InstructionKind)
    assert len(set(INSTRUCTION_CLASSES.values())) == len(InstructionKind)
    for kind in InstructionKind:
        assert INSTRUCTION_CLASSES[kind] in TokenSlicePipelineEngine._INSTRUCTION_MAP


@pytest.mark.parametrize("instruction", [ReduceTiedGrads, ReduceGrads, OptimizerStep])
def test_the_map_names_the_overrides_of_this_engine(instruction: type) -> None:
    # DeepSpeed calls what the map holds: an override that is missing from it never runs.
    method = unwrap(TokenSlicePipelineEngine._INSTRUCTION_MAP[instruction])
    assert method is getattr(TokenSlicePipelineEngine, method.__name__)


def test_names_read_well_in_deepspeeds_logs() -> None:
    instruction = Instruction(InstructionKind.SEND_ACTIVATION, stage=3, micro_batch=1, token_slice=2, buffer=0)
    command = INSTRUCTION_CLASSES[instruction.kind](step=instruction)
    assert repr(command) == "SendActivation(3F1.2 @0)"
