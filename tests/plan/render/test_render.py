import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw import render_chrome_trace, render_comparison, render_svg, render_text
from deepspeed_ext.plan.draw.elements import oklch_to_hex, op_colour
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, PipelineShape, received, result
from deepspeed_ext.plan.schedules import interleaved, one_f_one_b, rank_orders, schedule_named, zero_bubble
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Span, Timeline
from tests.strategies import costs_of, schedule_names, tables

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(num_stages: int, num_micro_batches: int, num_token_slices: int, **costs: float) -> Timeline:
    shape = PipelineShape(num_stages, num_micro_batches, num_token_slices)
    return simulate(rank_orders(one_f_one_b, shape), shape, OpCosts.uniform(shape, **costs))


def interleaved_timeline() -> Timeline:
    """Four stages on two ranks."""
    shape = PipelineShape(4, 2, 2, 2)
    return simulate(rank_orders(interleaved, shape), shape, OpCosts.uniform(shape))


def zero_bubble_timeline() -> Timeline:
    shape = PipelineShape(2, 2, 2)
    return simulate(rank_orders(zero_bubble, shape), shape, OpCosts.uniform(shape, weight_gradient=1.0))


def texts(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def tooltips(svg: str) -> list[str]:
    return [
        element.text for group in ElementTree.fromstring(svg).iter(f"{SVG}g") for element in group.iter(f"{SVG}title")
    ]


@st.composite
def uneven_timelines(draw):
    """Of any schedule, with costs that leave nothing even and transfers that take time."""
    name = draw(schedule_names)
    model_chunks = draw(st.integers(1, 3)) if name == "interleaved" else 1
    num_ranks = draw(st.integers(1, 3))
    shape = PipelineShape(num_ranks * model_chunks, draw(st.integers(1, 3)), draw(st.integers(1, 3)), model_chunks)
    costs = replace(draw(costs_of(shape)), weight_gradient=draw(tables(shape)))
    return simulate(rank_orders(schedule_named(name), shape), shape, costs)


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


def test_ops_name_their_stage_where_ranks_own_several():
    lines = render_text(interleaved_timeline()).splitlines()
    assert lines[0].startswith("rank 0 | 0F0.0 0F0.1 2F0.0 2F0.1 0F1.0 0F1.1 2B0.1 ")
    assert lines[1].startswith("rank 1 |  .    1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 ")


def test_the_parts_of_a_backward_are_told_apart():
    assert render_text(zero_bubble_timeline()).splitlines()[1] == (
        "stage 1 |  .    F0.0  F0.1  BI0.1 F1.0  BI0.0 BW0.1 F1.1  BI1.1 BW0.0 BI1.0 BW1.1 BW1.0"
    )
    small = render_text(zero_bubble_timeline(), width=24, max_bands=1)
    assert small.splitlines() == ["stage 0 | FFF BWBWBWBW", "stage 1 |  FFBFBFBWBWW"]


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
    assert not {"F0.0", "B1.1"} & set(texts(render_svg(timeline_of(8, 32, 8), "t")))


def test_one_token_slice_is_not_numbered():
    shown = texts(render_svg(timeline_of(2, 2, 1), "t"))
    assert {"F0", "B1"} <= set(shown) and "token slice" not in shown


def test_backward_is_told_from_forward_without_colour():
    groups = ElementTree.fromstring(render_svg(timeline_of(2, 2, 2), "t")).iter(f"{SVG}g")
    for group in groups:
        hatched = any(rect.get("fill") == "url(#hatch)" for rect in group.iter(f"{SVG}rect"))
        assert hatched == ("B" in group.find(f"{SVG}title").text)


def heights(svg: str) -> dict[str, float]:
    """Height of each op by its text form."""
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return {
        group.find(f"{SVG}title").text.split(":")[0]: float(group.find(f"{SVG}rect").get("height")) for group in groups
    }


def test_weight_gradients_are_low_and_dotted():
    svg = render_svg(zero_bubble_timeline(), "t")
    high, low = heights(svg)["0BI0.0"], heights(svg)["0BW0.0"]
    assert low == pytest.approx(0.62 * high) and heights(svg)["1F1.1"] == high
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        fills = {rect.get("fill") for rect in group.iter(f"{SVG}rect")}
        name = group.find(f"{SVG}title").text
        assert ("url(#dots)" in fills) == ("BW" in name) and ("url(#hatch-back)" in fills) == ("BI" in name)
    shown = texts(svg)
    assert {"BI0.1", "BW0.1", "input gradient", "weight gradient"} <= set(shown) and "backward" not in shown


def test_model_chunks_are_told_apart_by_label_and_stripe():
    svg = render_svg(interleaved_timeline(), "t")
    shown = texts(svg)
    assert {"rank 0", "rank 1", "0F0.0", "2F0.0", "3B1.1", "model chunk 1"} <= set(shown)
    assert "4 stages on 2 ranks · 2 micro-batches · 2 token slices" in shown
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        striped = any(rect.get("fill-opacity") == "0.62" for rect in group.iter(f"{SVG}rect"))
        assert striped == (group.find(f"{SVG}title").text[0] in "23")


def test_a_legend_too_long_for_a_line_goes_on_below():
    svg = render_svg(zero_bubble_timeline(), "t")
    names = {element.text: element for element in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert names["idle"].get("y") == names["micro-batch"].get("y")
    shape = PipelineShape(4, 8, 5, 2)
    orders = rank_orders(interleaved, shape)
    timeline = simulate(orders, shape, OpCosts.uniform(shape))
    first, *others = timeline.spans
    apart = Span(Op.parse("0BW0.0"), timeline.end, timeline.end), Span(Op.parse("0BI0.0"), timeline.end, timeline.end)
    svg = render_svg(replace(timeline, spans=((*first, *apart), *others)), "t")
    names = {element.text: element for element in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert float(names["idle"].get("y")) > float(names["micro-batch"].get("y"))
    assert float(names["idle"].get("y")) < float(ElementTree.fromstring(svg).get("height")) - 10


def test_a_picture_of_many_ops_is_wider():
    def width(timeline):
        return float(ElementTree.fromstring(render_svg(timeline, "t")).get("width"))

    assert width(timeline_of(2, 2, 2)) == 1120
    assert 1120 < width(timeline_of(4, 4, 4)) < width(timeline_of(8, 32, 8)) == 1680
    # Every op of the wider one is still labelled.
    assert "B3.3" in texts(render_svg(timeline_of(4, 4, 4), "t"))


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


@given(uneven_timelines())
def test_arrows_join_the_middles_of_an_op_and_its_reader_on_another_rank(timeline):
    shape = timeline.shape
    orders = [[span.op for span in rank] for rank in timeline.spans]
    timeline = simulate(orders, shape, OpCosts.uniform(shape, weight_gradient=1.0))  # whole times compare as equal
    events = json.loads(render_chrome_trace(timeline))["traceEvents"]
    middles = {
        (event["pid"], event["tid"], event["ts"] + event["dur"] / 2): Op.parse(event["name"])
        for event in events
        if event["ph"] == "X"
    }
    starts, ends = (
        {event["id"]: middles[event["pid"], event["tid"], event["ts"]] for event in events if event["ph"] == phase}
        for phase in "sf"
    )
    assert starts.keys() == ends.keys()
    hops = sum(shape.rank_of(stage) != shape.rank_of(stage + 1) for stage in range(shape.last_stage))
    assert len(starts) == 2 * hops * shape.num_micro_batches * shape.num_token_slices
    for number, producer in starts.items():
        assert received(ends[number], shape) == result(producer)


def test_a_trace_tells_stages_of_a_rank_and_kinds_apart():
    events = json.loads(render_chrome_trace(interleaved_timeline()))["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(0, 0): "stage 0", (0, 1): "stage 2", (1, 0): "stage 1", (1, 1): "stage 3"}
    for event in events:
        if event["ph"] == "X":
            assert threads[event["pid"], event["tid"]] == f"stage {Op.parse(event['name']).stage}"
    events = json.loads(render_chrome_trace(zero_bubble_timeline()))["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"forward", "input gradient", "weight gradient"}


def test_transfers_that_take_time_and_memory_are_in_the_trace():
    timeline = timeline_of(2, 1, 2, transfer=0.5)
    events = json.loads(render_chrome_trace(timeline, [[(0.0, 1.0), (3.0, 0.0)], []]))["traceEvents"]
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    assert [
        (begun[e["id"]]["args"]["result_of"], e["ts"] - begun[e["id"]]["ts"]) for e in events if e["ph"] == "e"
    ] == [
        *(("0F0.0", 0.5), ("0F0.1", 0.5)),
        *(("1B0.1", 0.5), ("1B0.0", 0.5)),
    ]
    assert {event["name"] for event in begun.values()} == {"activations to rank 1", "gradients to rank 0"}
    counters = [(event["pid"], event["ts"], event["args"]["held"]) for event in events if event["ph"] == "C"]
    assert counters == [(0, 0.0, 1.0), (0, 3.0, 0.0)]
