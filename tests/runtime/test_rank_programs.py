"""Programs of a rank are whole training steps, for any schedule."""

import random
from dataclasses import replace
from inspect import unwrap
from itertools import pairwise

import pytest
from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeSchedule, ReduceGrads, ReduceTiedGrads
from hypothesis import given

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import Instruction, InstructionKind
from deepspeed_ext.plan.schedules import Schedule, backward_order, forward_order, gpipe, schedule_named, zero_bubble
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.live_batch import Batch
from deepspeed_ext.runtime.rank_programs import INSTRUCTION_CLASSES, ProgramSchedule, RankPrograms, RunLengths
from deepspeed_ext.runtime.topology import SequenceParallelRanks
from tests.strategies import schedule_names, shapes

SHAPE = PipelineShape(2, 1, 2)


def programs(schedule: Schedule) -> RankPrograms:
    return RankPrograms(schedule, rank=0, shape=SHAPE, loading_ranks=(0,))


def training(of_rank: RankPrograms, num_micro_batches: int, **settings: bool) -> ProgramSchedule:
    return of_rank.program(of_rank.shape(num_micro_batches), training=True, **settings)


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


def test_without_messages_under_ops_a_program_is_another() -> None:
    of_rank = programs(gpipe)
    shape = replace(SHAPE, num_micro_batches=3)
    assert training(of_rank, 3).program == lower(gpipe, shape)[0]
    assert training(of_rank, 3, under_ops=False).program == lower(gpipe, shape, under_ops=False)[0]
    assert training(of_rank, 3, under_ops=False) is training(of_rank, 3, under_ops=False) is not training(of_rank, 3)


def batch_of(*lengths: int, training: bool = True, micro_batches: int = 1, rows: int = 2, **settings: bool) -> Batch:
    return Batch(
        shape=replace(SHAPE, num_micro_batches=micro_batches, num_token_slices=len(lengths)),
        token_slices=TokenSlices(lengths),
        ranks=SequenceParallelRanks(),
        by_documents=None,
        rows=rows,
        sequences=lambda micro_batch: range(0),
        training=training,
        **settings,
    )


def test_a_batch_with_lengths_that_have_not_run_may_load_kernels() -> None:
    equal = 256, 256
    batches = [
        (batch_of(*equal), True),
        (batch_of(*equal), False),
        (batch_of(*equal, training=False), True),
        (batch_of(*equal, rows=1), True),
        (batch_of(*equal, micro_batches=2), True),
        (batch_of(*equal, keeps_outputs=True), True),
        (batch_of(*equal, computes_loss=False), True),
        (batch_of(256, 511, 1), True),
        (batch_of(320, 192), True),  # the second length, which compilers take for all
        (batch_of(192, 320), True),  # the same lengths, other numbers of keys
        (batch_of(192, 320), False),
        (batch_of(511, 1), True),  # one token
        (batch_of(511, 1), False),
    ]
    known = RunLengths()
    assert not known.are_new(batches[0][0]), "a CPU loads nothing"
    known.settles = True
    for number, (batch, expected) in enumerate(batches):
        assert known.are_new(batch) is expected, number
        known.add(batch)


def test_lengths_of_their_own_for_each_step_do_not_keep_messages_from_travelling() -> None:
    """As cuts by documents have, of whole tiles or not."""
    generator = random.Random(0)
    for multiple in (128, 1):
        known, new = RunLengths(), list[int]()
        known.settles = True
        for step in range(600):
            inner = (2048 * number + generator.randint(-768, 768) // multiple * multiple for number in range(1, 8))
            batch = batch_of(*(end - start for start, end in pairwise([0, *inner, 16384])))
            new += [step] * known.are_new(batch)
            known.add(batch)
        assert new[:2] == [0, 1] and len(new) < 60 and sum(step >= 400 for step in new) < 10, new


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
