import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.render import render_chrome_trace, render_comparison, render_svg, render_text
from deepspeed_ext.plan.render.palette import oklch_to_hex, op_colour
from deepspeed_ext.plan.schedules import one_f_one_b, schedule_named, stage_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Span, Timeline
from tests.strategies import costs_of, schedule_names, shapes

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(num_stages: int, num_micro_batches: int, num_token_slices: int, **costs: float) -> Timeline:
    shape = PipelineShape(num_stages, num_micro_batches, num_token_slices)
    return simulate(stage_orders(one_f_one_b, shape), shape, OpCosts.uniform(shape, **costs))


def texts(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def tooltips(svg: str) -> list[str]:
    return [
        element.text for group in ElementTree.fromstring(svg).iter(f"{SVG}g") for element in group.iter(f"{SVG}title")
    ]


@st.composite
def uneven_timelines(draw):
    shape = draw(shapes(3, 3, 3))
    orders = stage_orders(schedule_named(draw(schedule_names)), shape)
    return simulate(orders, shape, draw(costs_of(shape)))


# Text


def test_longer_ops_are_drawn_out_with_dashes():
    assert render_text(timeline_of(2, 1, 2, backward=2.0)).splitlines() == [
        "stage 0 | F0.0 F0.1  .    .    .   B0.1----- B0.0-----",
        "stage 1 |  .   F0.0 F0.1 B0.1----- B0.0-----  .    .",
    ]


def test_transfers_show_as_idle_time():
    assert render_text(timeline_of(2, 1, 1, transfer=1.0)).splitlines() == [
        "stage 0 | F0.0  .    .    .    .   B0.0",
        "stage 1 |  .    .   F0.0 B0.0  .    .",
    ]


def test_columns_are_as_wide_as_the_widest_op():
    lines = render_text(timeline_of(1, 11, 1), width=1000).splitlines()
    assert lines[0].endswith("F9.0  B9.0  F10.0 B10.0")


def test_a_long_timeline_goes_on_below_and_loses_nothing():
    drawing = render_text(timeline_of(8, 8, 8))
    assert max(map(len, drawing.splitlines())) <= 120
    assert [line for line in drawing.splitlines() if line.startswith("time")] == [
        f"time {22 * band}" for band in range(7)
    ]
    first_stage = " ".join(
        line.removeprefix("stage 0 |") for line in drawing.splitlines() if line.startswith("stage 0")
    )
    shape = PipelineShape(8, 8, 8)
    assert [f"0{word}" for word in first_stage.split() if word != "."] == [str(op) for op in one_f_one_b(shape, 0)]


def test_a_very_long_timeline_shows_letters_alone():
    drawing = render_text(timeline_of(2, 500, 4), width=80)
    assert len(drawing.splitlines()) <= 12 * 4
    assert set(re.sub(r"stage \d|time .*", "", drawing)) <= set("FB-. |\n")


def test_stage_numbers_are_aligned():
    lines = render_text(timeline_of(11, 1, 1), width=200).splitlines()
    assert lines[9].startswith("stage  9 | ") and lines[10].startswith("stage 10 | ")


def test_ops_that_take_no_time_can_be_drawn():
    timeline = timeline_of(2, 1, 2, forward=0.0, backward=0.0)
    assert render_text(timeline).splitlines() == ["stage 0 | B", "stage 1 | B"]
    ElementTree.fromstring(render_svg(timeline, "nothing"))


@given(uneven_timelines(), st.integers(20, 200))
def test_any_timeline_fits_its_width(timeline, width):
    assert max(map(len, render_text(timeline, width).splitlines())) <= width


# SVG


def test_the_drawing_states_its_figures():
    shown = texts(render_svg(timeline_of(4, 4, 4), "1f1b & more"))
    assert {"1f1b & more", "15.8%", "38", "7", "bubble ratio", "makespan", "peak live token slices"} <= set(shown)
    assert "4 stages · 4 micro-batches · 4 token slices" in shown
    assert [text for text in shown if text.startswith("stage ")] == [f"stage {stage}" for stage in range(4)]


def test_every_op_is_drawn_with_its_times_and_labelled_where_there_is_room():
    svg = render_svg(timeline_of(2, 2, 2), "t")
    assert tooltips(svg)[0] == "0F0.0: 0 to 1"
    assert len(tooltips(svg)) == 16
    assert {"F0.0", "B1.1"} <= set(texts(svg))
    assert not {"F0.0", "B1.1"} & set(texts(render_svg(timeline_of(8, 8, 8), "t")))


def test_one_token_slice_is_not_numbered():
    shown = texts(render_svg(timeline_of(2, 2, 1), "t"))
    assert {"F0", "B1"} <= set(shown) and "token slice" not in shown


def test_backward_is_told_from_forward_without_colour():
    groups = ElementTree.fromstring(render_svg(timeline_of(2, 2, 2), "t")).iter(f"{SVG}g")
    for group in groups:
        hatched = any(rect.get("fill") == "url(#hatch)" for rect in group.iter(f"{SVG}rect"))
        assert hatched == ("B" in group.find(f"{SVG}title").text)


def test_a_measured_timeline_starts_at_its_first_op_and_names_its_unit():
    spans = tuple(Span(Op.parse(text), start, start + 0.5) for text, start in (("0F0.0", 100.0), ("0B0.0", 101.0)))
    svg = render_svg(Timeline(PipelineShape(1, 1, 1), (spans,), "s"), "measured")
    assert tooltips(svg) == ["0F0.0: 0 to 0.5 s", "0B0.0: 1 to 1.5 s"]
    assert {"time (s)", "1.5 s", "0", "0.2", "1.4"} <= set(texts(svg))


@given(uneven_timelines())
def test_any_timeline_draws_as_well_formed_xml_inside_its_frame(timeline):
    root = ElementTree.fromstring(render_svg(timeline, "<any>"))
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and w >= 0 and h > 0 and x + w <= width and y + h <= height


def test_a_comparison_shows_what_is_saved():
    whole, cut = timeline_of(4, 4, 1, forward=4.0, backward=4.0), timeline_of(4, 4, 4)
    shown = texts(render_comparison([("whole", whole), ("cut", cut)]))
    assert [text for text in shown if text.startswith("bubble")] == [
        "bubble 42.9%  ·  makespan 56  ·  peak live token slices 4 of 4",
        "bubble 15.8%  ·  makespan 38  ·  peak live token slices 7 of 16",
    ]
    assert "32% less time" in shown
    assert not any("less time" in text for text in texts(render_comparison([("cut", cut), ("whole", whole)])))


def test_a_comparison_needs_one_time_axis():
    timeline = timeline_of(1, 1, 1)
    seconds = Timeline(timeline.shape, timeline.spans, "s")
    with pytest.raises(PlanError, match="2 timelines in 2 units on one axis"):
        render_comparison([("a", timeline), ("b", seconds)])
    with pytest.raises(PlanError, match="give at least one"):
        render_comparison([])


# Colours


def test_oklch_of_known_colours():
    assert oklch_to_hex(1.0, 0.0, 0.0) == "#ffffff"
    assert oklch_to_hex(0.0, 0.0, 0.0) == "#000000"
    assert oklch_to_hex(0.627955, 0.257683, 29.2339) == "#ff0000"


def test_token_slices_darken_and_micro_batches_differ():
    def luminance(colour):
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for micro_batch in range(8):
        shades = [luminance(op_colour(micro_batch, token_slice, 8)) for token_slice in range(8)]
        assert shades == sorted(shades, reverse=True) and len(set(shades)) == 8
    assert len({op_colour(micro_batch, 0, 1) for micro_batch in range(64)}) == 64


# Chrome trace


def test_a_trace_has_a_process_for_each_stage_and_an_event_for_each_op():
    timeline = timeline_of(2, 1, 2, backward=2.0)
    events = json.loads(render_chrome_trace(timeline))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "stage 0", 1: "stage 1"}
    ops = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in ops] == [str(span.op) for stage in timeline.spans for span in stage]
    assert ops[2] == {
        "ph": "X",
        "name": "0B0.1",
        "cat": "backward",
        "pid": 0,
        "tid": 0,
        "ts": 5.0,
        "dur": 2.0,
        "args": {"micro_batch": 0, "token_slice": 1},
    }


@pytest.mark.parametrize("unit, scale", [("s", 1e6), ("ms", 1e3), ("us", 1.0), ("", 1.0)])
def test_trace_times_are_microseconds_from_the_first_op(unit, scale):
    timeline = Timeline(PipelineShape(1, 1, 1), ((Span(Op.parse("0F0.0"), 7.0, 9.5),),), unit)
    (event,) = (event for event in json.loads(render_chrome_trace(timeline))["traceEvents"] if event["ph"] == "X")
    assert (event["ts"], event["dur"]) == (0.0, 2.5 * scale)


@given(shapes(3, 3, 3))
def test_arrows_join_the_middles_of_an_op_and_its_reader_on_another_stage(shape):
    timeline = simulate(stage_orders(one_f_one_b, shape), shape, OpCosts.uniform(shape))
    events = json.loads(render_chrome_trace(timeline))["traceEvents"]
    middles = {(event["pid"], event["ts"] + event["dur"] / 2): event["name"] for event in events if event["ph"] == "X"}
    starts = {event["id"]: middles[event["pid"], event["ts"]] for event in events if event["ph"] == "s"}
    ends = {event["id"]: middles[event["pid"], event["ts"]] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * (shape.num_stages - 1) * shape.num_micro_batches * shape.num_token_slices
    for number, start in starts.items():
        producer = Op.parse(start)
        step = 1 if producer.kind is OpKind.FORWARD else -1
        assert Op.parse(ends[number]) == producer._replace(stage=producer.stage + step)
