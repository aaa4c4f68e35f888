import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.schedules import schedule_named, stage_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Span, Timeline, executed_order
from tests.strategies import costs_of, schedule_names, shapes


def timeline_of(*stages: str, unit: str = "") -> Timeline:
    """Build a timeline of one micro-batch from words such as `0F0.0:1-2`."""

    def span(word: str) -> Span:
        op, _, period = word.partition(":")
        start, end = map(float, period.split("-"))
        return Span(Op.parse(op), start, end)

    return Timeline(PipelineShape(len(stages), 1, 2), tuple(tuple(map(span, stage.split())) for stage in stages), unit)


def test_figures_by_hand():
    # A measured timeline does not start at 0.
    timeline = timeline_of("0F0.0:10-12 0F0.1:12-13 0B0.1:16-18 0B0.0:18-20", "1F0.0:12-14 1B0.0:14-18")
    assert (timeline.start, timeline.end, timeline.makespan) == (10.0, 20.0, 10.0)
    assert timeline.busy == (7.0, 6.0)
    assert timeline.bubble_ratio == pytest.approx(7 / 20)
    assert timeline.peak_live_token_slices == (2, 1)


def test_ops_that_take_no_time_leave_no_bubble():
    assert timeline_of("0F0.0:1-1").bubble_ratio == 0.0


@given(schedule_names, shapes(3, 3, 3), st.data())
def test_json_reads_back(name, shape, data):
    orders = stage_orders(schedule_named(name), shape)
    timeline = simulate(orders, shape, data.draw(costs_of(shape)))
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
        {**GOOD, "spans": [[["0F1.0", 0, 1]]]},
    ],
)
def test_anything_else_is_no_timeline(fields):
    with pytest.raises(PlanError, match="timeline"):
        Timeline.from_json(json.dumps(fields))


def test_text_that_is_not_json():
    with pytest.raises(PlanError, match="not a timeline"):
        Timeline.from_json("spans")
