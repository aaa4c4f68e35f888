"""Programs that are lowered, by hand; each is made once, of whole steps; and reductions of gradients in them."""

import json
from dataclasses import replace

import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw import render_chrome_trace, render_svg
from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, Placement
from deepspeed_ext.plan.programs import lowering
from deepspeed_ext.plan.programs.device import check_programs
from deepspeed_ext.plan.programs.lowering import ProvenSchedule, lower
from deepspeed_ext.plan.programs.program import InstructionKind, Program, Reduction
from deepspeed_ext.plan.schedules import (
    SCHEDULES,
    Schedule,
    backward_order,
    fixed,
    forward_order,
    gpipe,
    one_f_one_b,
    rank_orders,
    zero_bubble,
)
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Timeline
from tests.strategies import WITH_MODEL_CHUNKS

SHAPE = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)
THERE_AND_BACK = PipelineShape(4, 1, 1, num_model_chunks=2, placement=Placement.V)


def ops(text: str) -> list[Op]:
    return [Op.parse(word) for word in text.split()]


def texts(program) -> list[str]:
    return [str(instruction) for instruction in program.instructions]


def test_programs_by_hand():
    first, last = lower(one_f_one_b, SHAPE)
    assert texts(first) == [
        "load 0F0.0",
        "forward 0F0.0 @0",
        "send activation 0F0.0 @0",
        # Its sender may need this very forward: the receive is held back.
        "forward 0F0.1 @1",
        "send activation 0F0.1 @1",
        "receive gradient 0BI0.1 @1",
        "receive gradient 0BI0.0 @0",
        "complete activation 0F0.0",
        "complete activation 0F0.1",
        "backward 0B0.1 @1",
        "free 0F0.1 @1",
        "backward 0B0.0 @0",
        "reduce gradients 0B0.0",
        "free 0F0.0 @0",
    ]
    assert texts(last) == [
        "load 1F0.0",
        "receive activation 1F0.0 @0",
        "receive activation 1F0.1 @1",
        "forward 1F0.0 @0",
        "forward 1F0.1 @1",
        "backward 1B0.1 @1",
        "send gradient 1BI0.1 @1",
        "free 1F0.1 @1",
        "backward 1B0.0 @0",
        "send gradient 1BI0.0 @0",
        "reduce gradients 1B0.0",
        "free 1F0.0 @0",
        "complete gradient 1BI0.1",
        "complete gradient 1BI0.0",
    ]
    assert (first.num_buffers, last.num_buffers) == (2, 2)


def test_results_for_the_same_rank_are_passed_on_and_weight_gradients_keep_the_buffer():
    # Rank 1 owns the two stages in the middle: no message is sent between them.
    orders = [ops("0F0 3F0 3B0 0B0"), ops("1F0 2F0 2BI0 2BW0 1B0")]
    _, middle = lower(fixed(orders), THERE_AND_BACK)
    assert texts(middle) == [
        "load 1F0.0",
        "receive activation 1F0.0 @0",
        "forward 1F0.0 @0",
        "pass activation 1F0.0 @0",
        "forward 2F0.0 @1",
        "send activation 2F0.0 @1",
        "receive gradient 2BI0.0 @1",
        "complete activation 2F0.0",
        "input gradient 2BI0.0 @1",
        "pass gradient 2BI0.0 @1",
        "weight gradient 2BW0.0 @1",
        "reduce gradients 2B0.0",
        "free 2F0.0 @1",
        "backward 1B0.0 @0",
        "send gradient 1BI0.0 @0",
        "reduce gradients 1B0.0",
        "free 1F0.0 @0",
        "complete gradient 1BI0.0",
    ]


def test_evaluation_lowers_too():
    first, last = lower(forward_order, SHAPE)
    assert texts(first)[4:7] == ["forward 0F0.1 @0", "send activation 0F0.1 @0", "free 0F0.1 @0"]
    assert texts(last)[-2:] == ["forward 1F0.1 @1", "free 1F0.1 @1"]
    assert (first.num_buffers, last.num_buffers) == (1, 2)


def test_channels_with_different_messages_at_their_ends_are_found():
    first, last = lower(one_f_one_b, SHAPE)
    steps = list(last.instructions)
    steps[1], steps[2] = steps[2], steps[1]
    message = r"rank 0 sends 0F0\.0, 0F0\.1 to rank 1, which receives 0F0\.1, 0F0\.0"
    with pytest.raises(ScheduleDeadlock, match=message):
        check_programs([first, replace(last, instructions=tuple(steps))], SHAPE)
    silent = tuple(step for step in first.instructions if step.kind is not InstructionKind.SEND_ACTIVATION)
    with pytest.raises(ScheduleDeadlock, match=r"rank 0 sends nothing to rank 1, which receives 0F0\.0, 0F0\.1"):
        check_programs([replace(first, instructions=silent), last], SHAPE)


def test_completions_that_wait_for_each_other_are_found():
    shape = PipelineShape(num_stages=2, num_micro_batches=2)
    first, last = (list(program.instructions) for program in lower(one_f_one_b, shape))

    def move_after(steps, moved, anchor):
        (step,) = (step for step in steps if str(step).startswith(moved))
        steps.remove(step)
        steps.insert([str(step).startswith(anchor) for step in steps].index(True) + 1, step)

    # Each rank now waits until the other has posted a receive, before it posts its own.
    move_after(first, "complete activation 0F1.0", "send activation 0F1.0")
    move_after(first, "receive gradient 0BI0.0", "complete activation 0F1.0")
    move_after(last, "complete gradient 1BI0.0", "send gradient 1BI0.0")
    move_after(last, "receive activation 1F1.0", "complete gradient 1BI0.0")
    message = r"rank 0 at 'complete activation 0F1\.0' waits for the receive of 0F1\.0"
    with pytest.raises(ScheduleDeadlock, match=message):
        check_programs([Program(0, tuple(first), 2), Program(1, tuple(last), 2)], shape)


def one_weight_gradient_forgotten(shape: PipelineShape, rank: int):
    return (op for op in zero_bubble(shape, rank) if op != Op(OpKind.WEIGHT_GRADIENT, 1, 0, 0))


@pytest.mark.parametrize(
    ("schedule", "missing"),
    [(forward_order, "0B0.0"), (backward_order, "0F0.0"), (one_weight_gradient_forgotten, "1BW0.0")],
)
def test_a_schedule_that_leaves_out_an_op_is_refused(schedule: Schedule, missing: str) -> None:
    with pytest.raises(PlanError, match=rf"^op {missing} is missing in the order of rank \d: add it$"):
        ProvenSchedule(schedule).program(0, SHAPE)


def test_programs_are_proven_and_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ProvenSchedule(gpipe)
    assert schedule.proof(SHAPE).under_ops and schedule.messages_under_ops
    lower_rank = lowering.lower_rank
    monkeypatch.setattr(lowering, "check_programs", None)
    monkeypatch.setattr(lowering, "lower_rank", None)
    program = schedule.program(0, SHAPE)
    monkeypatch.setattr(lowering, "lower_rank", lower_rank)
    apart = schedule.program(0, SHAPE, under_ops=False)
    monkeypatch.undo()
    assert [program, apart] == [lower(gpipe, SHAPE, under_ops=each)[0] for each in (True, False)]
    assert program != apart
    assert {op.kind for op in schedule.evaluation.program(0, SHAPE).ops()} == {OpKind.FORWARD}


TWO_BY_TWO = PipelineShape(num_stages=2, num_micro_batches=2)
WAYS = [
    (name, model_chunks)
    for name in SCHEDULES
    for model_chunks in (1, 2)
    if model_chunks == 1 or name in WITH_MODEL_CHUNKS
]


def timeline_of(pieces: tuple[tuple[float, ...], ...]) -> Timeline:
    costs = OpCosts.uniform(TWO_BY_TWO, backward=2.0)
    costs = OpCosts(costs.forward, costs.backward, reductions=pieces)
    return simulate(rank_orders(one_f_one_b, TWO_BY_TWO), TWO_BY_TWO, costs)


@pytest.mark.parametrize(("name", "model_chunks"), WAYS)
def test_each_stage_is_reduced_once_after_its_last_gradient_of_weights(name: str, model_chunks: int) -> None:
    shape = PipelineShape(4 * model_chunks, 4, 3, model_chunks)
    for program in lower(SCHEDULES[name], shape):
        reduced = []
        for position, instruction in enumerate(program.instructions):
            if instruction.kind is InstructionKind.REDUCE_GRADIENTS:
                reduced.append(instruction.stage)
                later = {each.kind for each in program.instructions[position:] if each.stage == instruction.stage}
                assert not later & {InstructionKind.BACKWARD, InstructionKind.WEIGHT_GRADIENT}
                # Ranks before this one wait for its gradient: it goes first. Under breadth-first they may still be at
                # another stage, and the gradient goes when they are nearly there.
                goes = {InstructionKind.SEND_GRADIENT, InstructionKind.PASS_GRADIENT}
                assert program.instructions[position + 1].kind not in goes
                assert not later & goes or name == "breadth-first"
        assert sorted(reduced) == list(shape.stages_of(program.rank))


def test_reductions_run_during_the_ops_one_after_the_other() -> None:
    # Rank 1: F at 1 and 4, B at 2 to 4 and 5 to 7. Rank 0 ends with B at 7 to 9, one half of it for each of two layers.
    timeline = timeline_of(((0.5, 3.0), (1.5, 0.25, 0.25, 0.25)))
    assert [span.end for span in timeline.spans[0]][-1] == 9
    assert timeline.reductions == (
        Reduction(0, 0, 8.0, 8.5),
        Reduction(0, 1, 9.0, 12.0),
        Reduction(1, 0, 5.5, 7.0),
        Reduction(1, 1, 7.0, 7.25),
        Reduction(1, 2, 7.25, 7.5),
        Reduction(1, 3, 7.5, 7.75),
    )
    assert (timeline.makespan, timeline.duration) == (9, 12)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert "reduction 0 of stage 1" in render_svg(timeline, "1f1b")
    events = json.loads(render_chrome_trace(timeline))["traceEvents"]
    assert [event["ts"] for event in events if event.get("cat") == "reduction"] == [8.0, 9.0, 5.5, 7.0, 7.25, 7.5]
