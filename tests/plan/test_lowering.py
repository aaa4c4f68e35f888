from dataclasses import replace

import pytest

from deepspeed_ext.plan.errors import ScheduleDeadlock
from deepspeed_ext.plan.lowering import InstructionKind, Program, check_programs, global_order, lower
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.schedules import backward_order, forward_order, one_f_one_b, stage_orders

SHAPE = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)


def texts(program) -> list[str]:
    return [str(instruction) for instruction in program.instructions]


def test_programs_by_hand():
    first, last = lower(one_f_one_b, SHAPE)
    assert texts(first) == [
        "load 0.0",
        "forward 0.0 @0",
        "send activation 0.0 @0",
        "receive gradient 0.1 @1",
        "forward 0.1 @1",
        "send activation 0.1 @1",
        "receive gradient 0.0 @0",
        "backward 0.1 @1",
        "free 0.1 @1",
        "complete activation 0.0",
        "complete activation 0.1",
        "backward 0.0 @0",
        "free 0.0 @0",
    ]
    assert texts(last) == [
        "load 0.0",
        "receive activation 0.0 @0",
        "receive activation 0.1 @1",
        "forward 0.0 @0",
        "forward 0.1 @1",
        "backward 0.1 @1",
        "send gradient 0.1 @1",
        "free 0.1 @1",
        "backward 0.0 @0",
        "send gradient 0.0 @0",
        "free 0.0 @0",
        "complete gradient 0.1",
        "complete gradient 0.0",
    ]
    assert (first.num_buffers, last.num_buffers) == (2, 2)


def test_one_stage_sends_and_receives_nothing():
    (program,) = lower(one_f_one_b, PipelineShape(1, 2, 2))
    kinds = {instruction.kind for instruction in program.instructions}
    assert kinds == {InstructionKind.LOAD_MICRO_BATCH, *map(InstructionKind, ("forward", "backward", "free"))}


def test_evaluation_lowers_too():
    first, last = lower(forward_order, SHAPE)
    assert texts(first)[4:7] == ["forward 0.1 @0", "send activation 0.1 @0", "free 0.1 @0"]
    assert texts(last)[-2:] == ["forward 0.1 @1", "free 0.1 @1"]
    assert (first.num_buffers, last.num_buffers) == (1, 2)


def test_the_global_order_keeps_the_order_of_every_stage():
    shape = PipelineShape(3, 3, 2)
    orders = stage_orders(one_f_one_b, shape)
    ordered = global_order(orders, shape)
    assert [[op for op in ordered if op.stage == stage] for stage in range(3)] == orders


def test_a_schedule_that_deadlocks_is_refused():
    def backward_first(shape, stage):
        yield from backward_order(shape, stage)
        yield from forward_order(shape, stage)

    with pytest.raises(ScheduleDeadlock, match=r"stage 0 at 0B0\.1 waits for 0F0\.1"):
        lower(backward_first, SHAPE)


def test_messages_out_of_order_are_found():
    first, last = lower(one_f_one_b, SHAPE)
    steps = list(last.instructions)
    steps[1], steps[2] = steps[2], steps[1]
    with pytest.raises(ScheduleDeadlock, match=r"stage 1 is sent 1F0\.0, 1F0\.1 but receives 1F0\.1, 1F0\.0"):
        check_programs([first, replace(last, instructions=tuple(steps))], SHAPE)


def test_a_message_that_nobody_sends_is_found():
    first, last = lower(one_f_one_b, SHAPE)
    silent = tuple(step for step in first.instructions if step.kind is not InstructionKind.SEND_ACTIVATION)
    with pytest.raises(ScheduleDeadlock, match=r"stage 1 is sent nothing but receives 1F0\.0, 1F0\.1"):
        check_programs([replace(first, instructions=silent), last], SHAPE)


def test_completions_that_wait_for_each_other_are_found():
    shape = PipelineShape(num_stages=2, num_micro_batches=2)
    first, last = (list(program.instructions) for program in lower(one_f_one_b, shape))

    def move_behind(steps, moved, anchor):
        (step,) = (step for step in steps if str(step).startswith(moved))
        steps.remove(step)
        steps.insert([str(step).startswith(anchor) for step in steps].index(True) + 1, step)

    # Each stage now waits until the other has posted a receive, before it posts its own.
    move_behind(first, "complete activation 1.0", "send activation 1.0")
    move_behind(first, "receive gradient 0.0", "complete activation 1.0")
    move_behind(last, "complete gradient 0.0", "send gradient 0.0")
    move_behind(last, "receive activation 1.0", "complete gradient 0.0")
    with pytest.raises(
        ScheduleDeadlock, match=r"stage 0 at 'complete activation 1\.0' waits for the receive for 1F1\.0"
    ):
        check_programs([Program(0, tuple(first), 2), Program(1, tuple(last), 2)], shape)


def test_programs_that_wait_for_each_other_are_found():
    first, last = lower(one_f_one_b, SHAPE)
    without = tuple(step for step in first.instructions if step.kind is not InstructionKind.FORWARD)
    with pytest.raises(ScheduleDeadlock, match=r"stage 0 at 'backward 0\.1 @\d' waits for 0F0\.1"):
        check_programs([replace(first, instructions=without), last], SHAPE)


def test_ops_of_a_program_name_their_stage():
    _, last = lower(one_f_one_b, SHAPE)
    assert next(last.ops()) == Op(OpKind.FORWARD, stage=1, micro_batch=0, token_slice=0)
