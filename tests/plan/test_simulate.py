import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.dependencies import prerequisites, transferred
from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.schedules import forward_order, gpipe, one_f_one_b, stage_orders
from deepspeed_ext.plan.simulate import check_orders, simulate

TWO_BY_TWO = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)


def ops(text: str) -> list[Op]:
    return [Op.parse(word) for word in text.split()]


def times(timeline) -> list[list[tuple[str, float, float]]]:
    return [[(str(op), start, end) for op, start, end in stage] for stage in timeline.spans]


def test_uneven_costs_and_transfers_by_hand():
    costs = OpCosts(forward=((1.0, 2.0), (3.0, 1.0)), backward=((2.0, 1.0), (4.0, 2.0)), transfer=0.5)
    timeline = simulate(stage_orders(gpipe, TWO_BY_TWO), TWO_BY_TWO, costs)
    # Stage 1 hears of F0.0 at 1.5 and of F0.1 at 3.5, but is busy until 4.5. Stage 0 hears of B0.1 at 8.0 and of
    # B0.0 at 12.0, long after it is free.
    assert times(timeline) == [
        [("0F0.0", 0.0, 1.0), ("0F0.1", 1.0, 3.0), ("0B0.1", 8.0, 9.0), ("0B0.0", 12.0, 14.0)],
        [("1F0.0", 1.5, 4.5), ("1F0.1", 4.5, 5.5), ("1B0.1", 5.5, 7.5), ("1B0.0", 7.5, 11.5)],
    ]
    assert timeline.makespan == 14.0
    assert timeline.busy == (6.0, 10.0)
    assert timeline.bubble_ratio == pytest.approx(12 / 28)


def test_a_transfer_hides_behind_compute():
    shape = PipelineShape(num_stages=2, num_micro_batches=4)
    without, short = (
        simulate([list(forward_order(shape, stage)) for stage in range(2)], shape, OpCosts.uniform(shape, transfer=t))
        for t in (0.0, 0.9)
    )
    # Only the first message is waited for; the others travel while the stage computes.
    assert short.makespan == pytest.approx(without.makespan + 0.9)


def test_a_forward_needs_the_stage_before_and_the_token_slice_before():
    shape = PipelineShape(3, 2, 3)
    assert prerequisites(Op.parse("1F1.1"), shape) == tuple(ops("0F1.1 1F1.0"))
    assert prerequisites(Op.parse("0F1.0"), shape) == ()
    assert transferred(Op.parse("1F1.1"), shape) == Op.parse("0F1.1")
    assert transferred(Op.parse("0F1.1"), shape) is None


def test_a_backward_needs_its_forward_the_stage_after_and_the_token_slice_after():
    shape = PipelineShape(3, 2, 3)
    assert prerequisites(Op.parse("1B1.1"), shape) == tuple(ops("1F1.1 2B1.1 1B1.2"))
    assert prerequisites(Op.parse("2B1.2"), shape) == tuple(ops("2F1.2"))
    assert transferred(Op.parse("2B1.2"), shape) is None


def test_a_deadlock_names_every_stuck_stage_and_what_it_waits_for():
    orders = [ops("0F0.0 0B0.1 0F0.1 0B0.0"), ops("1F0.0 1F0.1 1B0.1 1B0.0")]
    with pytest.raises(ScheduleDeadlock) as caught:
        simulate(orders, TWO_BY_TWO, OpCosts.uniform(TWO_BY_TWO))
    assert str(caught.value) == (
        "the schedule deadlocks: stage 0 at 0B0.1 waits for 0F0.1 and 1B0.1; stage 1 at 1F0.1 waits for 0F0.1; "
        "reorder these ops"
    )


def test_backward_in_forward_order_deadlocks():
    orders = [ops(f"{stage}F0.0 {stage}F0.1 {stage}B0.0 {stage}B0.1") for stage in range(2)]
    with pytest.raises(ScheduleDeadlock, match=r"stage 1 at 1B0\.0 waits for 1B0\.1"):
        simulate(orders, TWO_BY_TWO, OpCosts.uniform(TWO_BY_TWO))


def test_too_few_warmup_forwards_deadlock():
    shape = PipelineShape(num_stages=1, num_micro_batches=2, num_token_slices=2)
    with pytest.raises(ScheduleDeadlock, match=r"stage 0 at 0B0\.1 waits for 0F0\.1"):
        simulate([ops("0F0.0 0B0.1 0F0.1 0B0.0")], shape, OpCosts.uniform(shape))


def test_an_order_without_an_op_that_others_need_deadlocks():
    with pytest.raises(ScheduleDeadlock, match=r"stage 1 at 1F0\.1 waits for 0F0\.1"):
        simulate([ops("0F0.0"), ops("1F0.0 1F0.1")], TWO_BY_TWO, OpCosts.uniform(TWO_BY_TWO))


@pytest.mark.parametrize(
    "orders, message",
    [
        ([ops("0F0.0")], "1 op orders for 2 stages"),
        ([ops("1F0.0"), []], "op 1F0.0 does not belong to stage 0"),
        ([ops("0F1.0"), []], "op 0F1.0 does not belong to stage 0"),
        ([ops("0F0.2"), []], "op 0F0.2 does not belong to stage 0"),
        ([ops("0F0.0 0F0.0"), []], "op 0F0.0 stands twice in the order of stage 0"),
    ],
)
def test_orders_that_are_none_of_the_shape(orders, message):
    with pytest.raises(PlanError, match=message):
        check_orders(orders, TWO_BY_TWO)


def test_orders_are_not_bound_to_the_schedules_we_ship():
    # A hand-made order in which micro-batches overtake is fine, as long as it can be played.
    shape = PipelineShape(num_stages=2, num_micro_batches=2)
    orders = [ops("0F1.0 0F0.0 0B1.0 0B0.0"), ops("1F1.0 1B1.0 1F0.0 1B0.0")]
    mirrored = stage_orders(one_f_one_b, shape)
    costs = OpCosts.uniform(shape)
    assert simulate(orders, shape, costs).makespan == simulate(mirrored, shape, costs).makespan
