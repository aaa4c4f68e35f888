"""Programs of a rank are whole training steps, for any schedule."""

from dataclasses import replace
from inspect import unwrap

import pytest
from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeSchedule, ReduceGrads, ReduceTiedGrads
from hypothesis import given

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import Instruction, InstructionKind
from deepspeed_ext.plan.schedules import Schedule, backward_order, forward_order, gpipe, schedule_named, zero_bubble
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.rank_programs import INSTRUCTION_CLASSES, ProgramSchedule, RankPrograms
from tests.strategies import schedule_names, shapes

SHAPE = PipelineShape(2, 1, 2)


def programs(schedule: Schedule, **settings: bool) -> RankPrograms:
    return RankPrograms(schedule, rank=0, shape=SHAPE, loading_ranks=(0,), **settings)


def training(of_rank: RankPrograms, num_micro_batches: int) -> ProgramSchedule:
    return of_rank.program(of_rank.shape(num_micro_batches), training=True)


def evaluation(of_rank: RankPrograms, num_micro_batches: int) -> ProgramSchedule:
    return of_rank.program(of_rank.shape(num_micro_batches), training=False)


def one_weight_gradient_forgotten(shape: PipelineShape, rank: int):
    return (op for op in zero_bubble(shape, rank) if op != Op(OpKind.WEIGHT_GRADIENT, 1, 2, 0))


@pytest.mark.parametrize(
    ("schedule", "missing"),
    [(forward_order, "0B0.0"), (backward_order, "0F0.0"), (one_weight_gradient_forgotten, "1BW2.0")],
)
def test_a_schedule_that_leaves_out_an_op_is_refused(schedule: Schedule, missing: str) -> None:
    with pytest.raises(PlanError, match=rf"^op {missing} is missing in the order of rank \d: add it$"):
        training(programs(schedule), 3)


def test_evaluation_has_no_backward() -> None:
    kinds = {op.kind for op in evaluation(programs(zero_bubble), 3).program.ops()}
    assert kinds == {OpKind.FORWARD}


def test_no_message_travels_under_an_op_before_a_program_has_run_once() -> None:
    of_rank = programs(gpipe, settles=True)
    first = training(of_rank, 3)
    assert first.program == lower(gpipe, first.shape, under_ops=False)[0] != lower(gpipe, first.shape)[0]
    assert training(of_rank, 3) is first
    of_rank.mark_completed(first)
    assert training(of_rank, 3).program == lower(gpipe, first.shape)[0]
    # Another number of micro-batches, and an evaluation, load other kernels.
    assert training(of_rank, 2).program == lower(gpipe, replace(first.shape, num_micro_batches=2), under_ops=False)[0]
    assert evaluation(of_rank, 3).program == lower(forward_order, first.shape, under_ops=False)[0]


def test_without_an_accelerator_messages_travel_from_the_first_step_on() -> None:
    assert training(programs(gpipe), 3).program == lower(gpipe, replace(SHAPE, num_micro_batches=3))[0]


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
    # DeepSpeed calls the functions of the map: an override that is missing from it never runs.
    method = unwrap(TokenSlicePipelineEngine._INSTRUCTION_MAP[instruction])
    assert method is getattr(TokenSlicePipelineEngine, method.__name__)


def test_names_read_well_in_deepspeeds_logs() -> None:
    instruction = Instruction(InstructionKind.SEND_ACTIVATION, stage=3, micro_batch=1, token_slice=2, buffer=0)
    command = INSTRUCTION_CLASSES[instruction.kind](step=instruction)
    assert repr(command) == "SendActivation(3F1.2 @0)"
