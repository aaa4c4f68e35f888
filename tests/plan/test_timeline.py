"""Timelines and their critical path."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.ops import Op, PipelineShape, Placement
from deepspeed_ext.plan.schedules import gpipe, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Span, Timeline, Transfer, critical_path, executed_order
from tests.strategies import costs_with_links, orders_of_pipelines


def one_micro_batch(*ranks: str, unit: str = "") -> Timeline:
    """Build a timeline of one micro-batch from words such as `0F0.0:1-2`."""

    def span(word: str) -> Span:
        op, _, period = word.partition(":")
        start, end = map(float, period.split("-"))
        return Span(Op.parse(op), start, end)

    return Timeline(PipelineShape(len(ranks), 1, 2), tuple(tuple(map(span, rank.split())) for rank in ranks), unit)


def test_figures_by_hand():
    # A measured timeline does not start at 0.
    timeline = one_micro_batch("0F0.0:10-12 0F0.1:12-13 0B0.1:16-18 0B0.0:18-20", "1F0.0:12-14 1B0.0:14-18")
    assert (timeline.start, timeline.end, timeline.makespan) == (10.0, 20.0, 10.0)
    assert timeline.busy == (7.0, 6.0)
    assert timeline.bubble_ratio == pytest.approx(7 / 20)
    assert timeline.peak_live_token_slices == (2, 1)
    assert one_micro_batch("0F0.0:1-1").bubble_ratio == 0.0


def test_a_token_slice_is_live_until_its_weight_gradients_are_done():
    late = one_micro_batch("0F0.1:0-1 0BI0.1:1-2 0F0.0:2-3 0BI0.0:3-4 0BW0.1:4-5 0BW0.0:5-6")
    assert late.peak_live_token_slices == (2,)
    early = one_micro_batch("0F0.1:0-1 0BI0.1:1-2 0BW0.1:2-3 0F0.0:3-4 0B0.0:4-6")
    assert early.peak_live_token_slices == (1,)


@given(orders_of_pipelines(3, 3, 3), st.data())
def test_json_reads_back(orders_and_shape, data):
    orders, shape = orders_and_shape
    timeline = simulate(orders, shape, data.draw(costs_with_links(shape)))
    if shape.num_model_chunks == 1:  # there is but one placement then, and JSON does not keep which
        timeline = replace(timeline, shape=replace(shape, placement=Placement.LOOPED))
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert executed_order(timeline) == orders
    # Files from before there were model chunks or transfers.
    old = {"num_stages": 1, "num_micro_batches": 1, "num_token_slices": 1, "unit": "s", "spans": [[["0F0.0", 0, 1]]]}
    assert Timeline.from_json(json.dumps(old)).shape == PipelineShape(1, 1, 1)


TWO_BY_TWO = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)


def path_of(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [(str(event.op), event.start, event.end) for event in critical_path(timeline).events]


def test_by_hand():
    costs = OpCosts(forward=((1.0, 2.0), (3.0, 1.0)), backward=((2.0, 1.0), (4.0, 2.0)), transfer=0.5)
    timeline = simulate(rank_orders(gpipe, TWO_BY_TWO), TWO_BY_TWO, costs)
    assert path_of(timeline) == [
        ("0F0.0", 0.0, 1.0),
        ("0F0.0", 1.0, 1.5),
        ("1F0.0", 1.5, 4.5),
        ("1F0.1", 4.5, 5.5),
        ("1B0.1", 5.5, 7.5),
        ("1B0.0", 7.5, 11.5),
        ("1BI0.0", 11.5, 12.0),
        ("0B0.0", 12.0, 14.0),
    ]
    path = critical_path(timeline)
    assert [str(op) for op in path.ops] == ["0F0.0", "1F0.0", "1F0.1", "1B0.1", "1B0.0", "0B0.0"]
    # 0F0.1 must be there at 4.5 and is at 3.5; 0B0.1 must end before 12.0 and does at 9.0.
    slack = {str(op): slack for op, slack in path.slack.items()}
    on_path = dict.fromkeys(map(str, path.ops), 0.0)
    assert slack == {**on_path, "0F0.1": 1.0, "0B0.1": 3.0}


def test_the_path_and_the_slack_with_messages_that_wait_for_their_channel():
    shape = PipelineShape(2, 1, 2)
    links = TransferCosts(latency=(0.5,), bandwidth=(2.0,), message_bytes=(6.0, 2.0))
    orders = [[Op.parse(text) for text in (f"{stage}F0.0", f"{stage}F0.1")] for stage in (0, 1)]
    assert path_of(simulate(orders, shape, OpCosts.uniform(shape, forward=0.125, transfer=links))) == [
        ("0F0.0", 0.0, 0.125),
        ("0F0.0", 0.125, 3.625),
        ("0F0.1", 3.125, 4.625),  # half a latency of the first and its own are under way together
        ("1F0.1", 4.625, 4.75),
    ]
    shape = PipelineShape(2, 1, 3)
    links = TransferCosts(latency=(0.5,), bandwidth=(1.0,), message_bytes=(3.0, 3.0, 1.0))
    orders = [[Op.parse(f"{stage}F0.{number}") for number in range(3)] for stage in (0, 1)]
    costs = OpCosts(((1.0, 1.0, 1.0), (10.0, 0.0, 1.0)), ((0.0,) * 3,) * 2, transfer=links)
    timeline = simulate(orders, shape, costs)
    slack = critical_path(timeline).slack
    # 1F0.1 and 1F0.2 may start at 14.5. The last message takes 1.5, so the one before must have left by 13, earlier
    # than for its own reader; it takes 3 to leave, and is ready at 2.
    assert slack[Op.parse("0F0.1")] == 8.0
    later = replace(costs, forward=((1.0, 9.0, 0.0), costs.forward[1]))
    assert simulate(orders, shape, later).makespan == timeline.makespan
    later = replace(costs, forward=((1.0, 9.25, 0.0), costs.forward[1]))
    assert simulate(orders, shape, later).makespan == timeline.makespan + 0.25


@given(orders_of_pipelines(3, 3, 3), st.data())
def test_the_path_takes_the_makespan_and_has_no_gap(orders_and_shape, data):
    orders, shape = orders_and_shape
    timeline = simulate(orders, shape, data.draw(costs_with_links(shape)))
    path = critical_path(timeline)
    assert (path.events[0].start, path.events[-1].end) == (timeline.start, timeline.end)
    for before, after in pairwise(path.events):
        # On a channel the next one leaves while the latency of the one before still runs.
        on_channel = isinstance(before, Transfer) and isinstance(after, Transfer)
        assert after.start == (before.sent if on_channel else before.end)
    assert all(path.slack[op] == pytest.approx(0.0, abs=1e-6 * timeline.makespan) for op in path.ops)


@given(orders_of_pipelines(3, 3, 3), st.data())
def test_an_op_may_be_longer_by_its_slack_and_no_more(orders_and_shape, data):
    # Costs are by token slice, so with one micro-batch of one token slice a single op can be made longer.
    orders, shape = orders_and_shape
    shape = replace(shape, num_micro_batches=1)
    orders = [[op for op in order if op.micro_batch == 0] for order in orders]
    costs = data.draw(costs_with_links(shape))
    timeline = simulate(orders, shape, costs)
    slack = critical_path(timeline).slack
    op = data.draw(st.sampled_from([op for order in orders for op in order]))
    table = {"F": "forward", "B": "backward", "BI": "backward", "BW": "weight_gradient"}[op.kind]

    def makespan_with(more: float) -> float:
        rows = [list(row) for row in getattr(costs, table)]
        rows[op.stage][op.token_slice] += more
        return simulate(orders, shape, replace(costs, **{table: tuple(map(tuple, rows))})).makespan

    tolerance = 1e-9 * (1 + timeline.makespan)
    assert makespan_with(slack[op]) <= timeline.makespan + tolerance
    assert makespan_with(slack[op] + 1.0) >= timeline.makespan + 1.0 - tolerance
