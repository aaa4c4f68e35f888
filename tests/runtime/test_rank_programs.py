"""What a rank runs is a whole training step, whoever wrote the schedule."""

import pytest

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.schedules import Schedule, backward_order, forward_order, zero_bubble
from deepspeed_ext.runtime.rank_programs import RankPrograms

SHAPE = PipelineShape(2, 1, 2)


def programs(schedule: Schedule) -> RankPrograms:
    return RankPrograms(schedule, rank=0, shape=SHAPE, loading_ranks=None)


def one_weight_gradient_forgotten(shape: PipelineShape, rank: int):
    return (op for op in zero_bubble(shape, rank) if op != Op(OpKind.WEIGHT_GRADIENT, 1, 2, 0))


@pytest.mark.parametrize(
    ("schedule", "missing"),
    [(forward_order, "0B0.0"), (backward_order, "0F0.0"), (one_weight_gradient_forgotten, "1BW2.0")],
)
def test_a_schedule_that_leaves_out_an_op_is_refused(schedule: Schedule, missing: str) -> None:
    with pytest.raises(PlanError, match=rf"^op {missing} is missing in the order of rank \d: add it$"):
        programs(schedule).training(3)


def test_evaluation_has_no_backward() -> None:
    kinds = {op.kind for op in programs(zero_bubble).evaluation(3).program.ops()}
    assert kinds == {OpKind.FORWARD}
