"""A schedule on a device gives programs of whole training steps, each made once."""

import pytest

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs import proven
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import Program
from deepspeed_ext.plan.programs.proven import ProvenSchedule
from deepspeed_ext.plan.schedules import Schedule, backward_order, forward_order, gpipe, zero_bubble

SHAPE = PipelineShape(2, 3, 2)


def program(schedule: ProvenSchedule, *, training: bool = True, **settings: bool) -> Program:
    return schedule.program(0, SHAPE, training=training, loading_ranks={0}, **settings)


def one_weight_gradient_forgotten(shape: PipelineShape, rank: int):
    return (op for op in zero_bubble(shape, rank) if op != Op(OpKind.WEIGHT_GRADIENT, 1, 2, 0))


@pytest.mark.parametrize(
    ("schedule", "missing"),
    [(forward_order, "0B0.0"), (backward_order, "0F0.0"), (one_weight_gradient_forgotten, "1BW2.0")],
)
def test_a_schedule_that_leaves_out_an_op_is_refused(schedule: Schedule, missing: str) -> None:
    with pytest.raises(PlanError, match=rf"^op {missing} is missing in the order of rank \d: add it$"):
        program(ProvenSchedule(schedule))


def test_programs_are_those_of_the_lowering_and_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ProvenSchedule(gpipe)
    schedule.proof(SHAPE)
    monkeypatch.setattr("deepspeed_ext.plan.programs.lowering._proof", None)  # What is proven is not proven again.
    assert program(schedule) == lower(gpipe, SHAPE)[0]
    apart = program(schedule, under_ops=False)
    assert apart == lower(gpipe, SHAPE, under_ops=False)[0] != program(schedule)
    monkeypatch.setattr(proven, "lower_rank", None)
    assert program(schedule, under_ops=False) is apart
    assert schedule.messages_under_ops


def test_an_evaluation_has_no_backward() -> None:
    assert {op.kind for op in program(ProvenSchedule(zero_bubble), training=False).ops()} == {OpKind.FORWARD}
