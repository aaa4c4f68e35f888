import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, PipelineShape, Placement, parts, prerequisites, reading_stage, received, result
from deepspeed_ext.plan.schedules import gpipe, interleaved, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import check_complete, simulate

TWO_BY_TWO = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)
ROUND = PipelineShape(num_stages=4, num_micro_batches=1, num_model_chunks=2)
THERE_AND_BACK = PipelineShape(4, 1, 1, num_model_chunks=2, placement=Placement.V)


def ops(text: str) -> list[Op]:
    return [Op.parse(word) for word in text.split()]


def times(timeline) -> list[list[tuple[str, float, float]]]:
    return [[(str(op), start, end) for op, start, end in rank] for rank in timeline.spans]


def test_uneven_costs_and_transfers_by_hand():
    costs = OpCosts(forward=((1.0, 2.0), (3.0, 1.0)), backward=((2.0, 1.0), (4.0, 2.0)), transfer=0.5)
    timeline = simulate(rank_orders(gpipe, TWO_BY_TWO), TWO_BY_TWO, costs)
    # Stage 1 receives F0.0 at 1.5 and F0.1 at 3.5, but is busy until 4.5. Stage 0 receives B0.1 at 8.0 and
    # B0.0 at 12.0, long after it is free.
    assert times(timeline) == [
        [("0F0.0", 0.0, 1.0), ("0F0.1", 1.0, 3.0), ("0B0.1", 8.0, 9.0), ("0B0.0", 12.0, 14.0)],
        [("1F0.0", 1.5, 4.5), ("1F0.1", 4.5, 5.5), ("1B0.1", 5.5, 7.5), ("1B0.0", 7.5, 11.5)],
    ]
    assert timeline.makespan == 14.0
    assert timeline.busy == (6.0, 10.0)
    assert timeline.bubble_ratio == pytest.approx(12 / 28)


def test_weight_gradients_apart_by_hand():
    shape = PipelineShape(num_stages=2, num_micro_batches=1)
    costs = OpCosts.uniform(shape, backward=2.0, weight_gradient=4.0, transfer=0.5)
    # Stage 0 continues at 4.5, while stage 1 still computes weight gradients until 8.0.
    split = [ops("0F0.0 0BI0.0 0BW0.0"), ops("1F0.0 1BI0.0 1BW0.0")]
    assert times(simulate(split, shape, costs)) == [
        [("0F0.0", 0.0, 1.0), ("0BI0.0", 5.0, 7.0), ("0BW0.0", 7.0, 11.0)],
        [("1F0.0", 1.5, 2.5), ("1BI0.0", 2.5, 4.5), ("1BW0.0", 4.5, 8.5)],
    ]
    mixed = [ops("0F0.0 0BI0.0 0BW0.0"), ops("1F0.0 1B0.0")]
    assert times(simulate(mixed, shape, costs))[0][1:] == [("0BI0.0", 9.0, 11.0), ("0BW0.0", 11.0, 15.0)]
    whole = [ops("0F0.0 0B0.0"), ops("1F0.0 1BI0.0 1BW0.0")]
    assert times(simulate(whole, shape, costs))[0][1:] == [("0B0.0", 5.0, 11.0)]


def test_model_chunks_by_hand():
    costs = OpCosts.uniform(ROUND, transfer=0.5)
    orders = [ops("0F0 2F0 2B0 0B0"), ops("1F0 3F0 3B0 1B0")]
    # Every step goes to the other rank, so each waits for a transfer, but for the turn at the last stage.
    starts = [[start for _, start, _ in rank] for rank in times(simulate(orders, ROUND, costs))]
    assert starts == [[0.0, 3.0, 7.0, 10.0], [1.5, 4.5, 5.5, 8.5]]


def test_there_and_back_needs_no_transfer_at_the_turn():
    costs = OpCosts.uniform(THERE_AND_BACK, transfer=0.5)
    orders = [ops("0F0 3F0 3B0 0B0"), ops("1F0 2F0 2B0 1B0")]
    timeline = simulate(orders, THERE_AND_BACK, costs)
    assert [[start for _, start, _ in rank] for rank in times(timeline)] == [[0.0, 4.0, 5.0, 9.0], [1.5, 2.5, 6.5, 7.5]]
    assert [str(transfer.op) for transfer in timeline.transfers] == ["3BI0.0", "0F0.0", "1BI0.0", "2F0.0"]


@pytest.mark.parametrize(
    ("op", "needed", "message"),
    [
        # A forward needs the stage before and the token slice before.
        ("1F1.1", "0F1.1 1F1.0", "0F1.1"),
        ("0F1.1", "0F1.0", None),
        ("0F1.0", "", None),
        # A backward needs its forward, the stage after and the token slice after.
        *((f"1{kind}1.1", "1F1.1 2BI1.1 1BI1.2", "2BI1.1") for kind in ("B", "BI")),
        *((f"2{kind}1.2", "2F1.2", None) for kind in ("B", "BI")),
        # Weight gradients need only their input gradient.
        ("1BW1.1", "1BI1.1", None),
    ],
)
def test_results_that_an_op_needs(op: str, needed: str, message: str | None) -> None:
    shape = PipelineShape(3, 2, 3)
    assert prerequisites(Op.parse(op), shape) == tuple(ops(needed))
    assert received(Op.parse(op), shape) == (message and Op.parse(message))


def test_results_and_their_readers():
    assert result(Op.parse("1B0.0")) == Op.parse("1BI0.0")
    assert parts(Op.parse("1B0.0")) == tuple(ops("1BI0.0 1BW0.0"))
    for text in ("1F0.0", "1BI0.0", "1BW0.0"):
        assert result(Op.parse(text)) == Op.parse(text)
        assert parts(Op.parse(text)) == (Op.parse(text),)
    shape = PipelineShape(3, 1)
    readers = {text: reading_stage(Op.parse(text), shape) for text in ("1F0", "2F0", "1BI0", "0BI0", "1BW0")}
    assert readers == {"1F0": 2, "2F0": None, "1BI0": 0, "0BI0": None, "1BW0": None}


@pytest.mark.parametrize(
    "schedule, left_out, missing, message",
    [
        (one_f_one_b, "0F0.1", "0F0.1", "rank 0"),
        (one_f_one_b, "1B0.0", "1B0.0", "rank 1"),
        (zero_bubble, "1BI0.0", "1BI0.0", "rank 1"),
        (zero_bubble, "1BW0.0", "1BW0.0", "rank 1"),
        (gpipe, "0F0.0", "0F0.0", "rank 0"),
    ],
)
def test_a_step_with_an_op_left_out_is_not_complete(schedule, left_out, missing, message):
    orders = rank_orders(schedule, TWO_BY_TWO)
    check_complete(orders, TWO_BY_TWO)
    short = [[op for op in order if str(op) != left_out] for order in orders]
    with pytest.raises(PlanError, match=rf"op {missing} is missing in the order of {message}: add it"):
        check_complete(short, TWO_BY_TWO)


def test_a_step_without_the_ops_of_a_model_chunk_is_not_complete():
    orders = [[op for op in order if op.stage != 3] for order in rank_orders(interleaved, ROUND)]
    with pytest.raises(PlanError, match=r"op 3F0\.0 is missing in the order of rank 1"):
        check_complete(orders, ROUND)


@pytest.mark.parametrize(
    ("shape", "orders", "message"),
    [
        (
            TWO_BY_TWO,
            ["0F0.0 0B0.1 0F0.1 0B0.0", "1F0.0 1F0.1 1B0.1 1B0.0"],
            "rank 0 at 0B0.1 waits for 0F0.1 and 1B0.1; rank 1 at 1F0.1 waits for 0F0.1",
        ),
        # The backward of rank 0 comes before its second forward; stage 3's backward is in two parts.
        (
            ROUND,
            ["0F0 2B0 2F0 0B0", "1F0 3F0 3BI0 3BW0 1B0"],
            "rank 0 at 2B0.0 waits for 2F0.0 and 3BI0.0; rank 1 at 3F0.0 waits for 2F0.0",
        ),
        # Backward in the order of the forward, and too few forwards before it.
        (PipelineShape(1, 1, 2), ["0F0.0 0F0.1 0B0.0 0B0.1"], "rank 0 at 0B0.0 waits for 0B0.1"),
        (PipelineShape(1, 1, 2), ["0F0.0 0B0.1 0F0.1 0B0.0"], "rank 0 at 0B0.1 waits for 0F0.1"),
        # Without an op that others need.
        (TWO_BY_TWO, ["0F0.0", "1F0.0 1F0.1"], "rank 1 at 1F0.1 waits for 0F0.1"),
    ],
)
def test_a_deadlock_names_every_stuck_rank_and_the_ops_it_waits_for(shape, orders, message):
    with pytest.raises(ScheduleDeadlock) as caught:
        simulate(list(map(ops, orders)), shape, OpCosts.uniform(shape, weight_gradient=1.0))
    assert str(caught.value) == f"the schedule deadlocks: {message}; reorder these ops"
