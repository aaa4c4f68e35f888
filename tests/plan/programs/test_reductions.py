import json

import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw import render_chrome_trace, render_svg
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import InstructionKind, Reduction, completing_ops
from deepspeed_ext.plan.schedules import SCHEDULES, forward_order, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Timeline
from tests.strategies import WITH_MODEL_CHUNKS

SHAPE = PipelineShape(num_stages=2, num_micro_batches=2)
WAYS = [
    (name, model_chunks)
    for name in SCHEDULES
    for model_chunks in (1, 2)
    if model_chunks == 1 or name in WITH_MODEL_CHUNKS
]


def timeline_of(pieces: tuple[tuple[float, ...], ...]) -> Timeline:
    costs = OpCosts.uniform(SHAPE, backward=2.0)
    costs = OpCosts(costs.forward, costs.backward, reductions=pieces)
    return simulate(rank_orders(one_f_one_b, SHAPE), SHAPE, costs)


@pytest.mark.parametrize(("name", "model_chunks"), WAYS)
def test_each_stage_is_reduced_once_behind_its_last_gradient_of_weights(name: str, model_chunks: int) -> None:
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


def test_evaluation_reduces_nothing() -> None:
    kinds = {each.kind for program in lower(forward_order, SHAPE) for each in program.instructions}
    assert InstructionKind.REDUCE_GRADIENTS not in kinds


def test_the_last_weight_gradient_completes_a_stage_though_input_gradients_are_done() -> None:
    order = rank_orders(zero_bubble, SHAPE)[0]
    assert completing_ops(order) == {0: Op(OpKind.WEIGHT_GRADIENT, 0, 1, 0)}


def test_reductions_run_beside_the_ops_one_after_the_other() -> None:
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


def test_a_timeline_keeps_and_shows_its_reductions() -> None:
    timeline = timeline_of(((0.5,), (0.5,)))
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert "reduction 0 of stage 1" in render_svg(timeline, "1f1b")
    events = json.loads(render_chrome_trace(timeline))["traceEvents"]
    assert [event["ts"] for event in events if event.get("cat") == "reduction"] == [9.0, 7.0]


@pytest.mark.parametrize("rows", [[[1.0]], [[], [1.0]], [[1.0], [-1.0]], 3])
def test_costs_of_another_shape_are_refused(rows: object) -> None:
    fields = {"forward": [[1], [1]], "backward": [[1], [1]], "reductions": rows}
    with pytest.raises(PlanError, match="reductions"):
        OpCosts.from_json(json.dumps(fields), SHAPE)
