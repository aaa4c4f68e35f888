import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, PipelineShape, Placement
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Span, Timeline, executed_order
from tests.strategies import costs_with_links, orders_of_pipelines


def timeline_of(*ranks: str, unit: str = "") -> Timeline:
    """Build a timeline of one micro-batch from words such as `0F0.0:1-2`."""

    def span(word: str) -> Span:
        op, _, period = word.partition(":")
        start, end = map(float, period.split("-"))
        return Span(Op.parse(op), start, end)

    return Timeline(PipelineShape(len(ranks), 1, 2), tuple(tuple(map(span, rank.split())) for rank in ranks), unit)


def test_figures_by_hand():
    # A measured timeline does not start at 0.
    timeline = timeline_of("0F0.0:10-12 0F0.1:12-13 0B0.1:16-18 0B0.0:18-20", "1F0.0:12-14 1B0.0:14-18")
    assert (timeline.start, timeline.end, timeline.makespan) == (10.0, 20.0, 10.0)
    assert timeline.busy == (7.0, 6.0)
    assert timeline.bubble_ratio == pytest.approx(7 / 20)
    assert timeline.peak_live_token_slices == (2, 1)


def test_ops_that_take_no_time_leave_no_bubble():
    assert timeline_of("0F0.0:1-1").bubble_ratio == 0.0


def test_a_token_slice_is_live_until_its_weight_gradients_are_done():
    late = timeline_of("0F0.1:0-1 0BI0.1:1-2 0F0.0:2-3 0BI0.0:3-4 0BW0.1:4-5 0BW0.0:5-6")
    assert late.peak_live_token_slices == (2,)
    early = timeline_of("0F0.1:0-1 0BI0.1:1-2 0BW0.1:2-3 0F0.0:3-4 0B0.0:4-6")
    assert early.peak_live_token_slices == (1,)


@given(orders_of_pipelines(3, 3, 3), st.data())
def test_json_reads_back(orders_and_shape, data):
    orders, shape = orders_and_shape
    timeline = simulate(orders, shape, data.draw(costs_with_links(shape)))
    if shape.num_model_chunks == 1:  # there is but one placement then, and JSON does not keep which
        timeline = replace(timeline, shape=replace(shape, placement=Placement.LOOPED))
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert executed_order(timeline) == orders


GOOD = json.loads(timeline_of("0F0.0:0-1", unit="s").to_json())


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {},
        {**GOOD, "num_stages": 0},
        {**GOOD, "num_stages": 2},
        {**GOOD, "spans": []},
        {**GOOD, "spans": [[]]},
        {**GOOD, "spans": [[["F0.0", 0, 1]]]},
        {**GOOD, "spans": [[["0F0.0", 0]]]},
        {**GOOD, "spans": [[["0F0.0", 0, "later"]]]},
        {**GOOD, "spans": [[["0F0.0", 1, 0]]]},
        {**GOOD, "spans": [[["0F0.0", 0, float("nan")]]]},
        {**GOOD, "spans": [[["1F0.0", 0, 1]]]},
        {**GOOD, "spans": [[["0F0.2", 0, 1]]]},
        {**GOOD, "spans": [[[5, 0, 1]]]},
        {**GOOD, "spans": [[["0F0.0", 0, 10**400]]]},
        {**GOOD, "transfers": [5]},
        {**GOOD, "reductions": [["a", 0, 0, 1]]},
        {**GOOD, "unit": "\ud800"},
        {**GOOD, "spans": [[["0F1.0", 0, 1]]]},
    ],
)
def test_anything_else_is_no_timeline(fields):
    with pytest.raises(PlanError, match="timeline"):
        Timeline.from_json(json.dumps(fields))


def test_files_written_before_there_were_model_chunks_or_transfers_still_read():
    old = {"num_stages": 1, "num_micro_batches": 1, "num_token_slices": 1, "unit": "s", "spans": [[["0F0.0", 0, 1]]]}
    timeline = Timeline.from_json(json.dumps(old))
    assert (timeline.shape, timeline.transfers) == (PipelineShape(1, 1, 1), ())


def test_text_that_is_not_json():
    with pytest.raises(PlanError, match="a timeline is not JSON"):
        Timeline.from_json("spans")
