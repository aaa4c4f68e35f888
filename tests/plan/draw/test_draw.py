"""Drawings: text, SVG, Chrome traces; host copies in every kind of picture."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw import Panel, render_chrome_trace, render_comparison, render_html, render_svg, render_text
from deepspeed_ext.plan.draw.elements import op_colour
from deepspeed_ext.plan.ops import Op, PipelineShape, received, result
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedules import (
    breadth_first,
    interleaved,
    one_f_one_b,
    rank_orders,
    schedule_named,
    zero_bubble,
)
from deepspeed_ext.plan.simulate import simulate, simulate_with_host_copies
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


def test_a_long_timeline_continues_below_with_all_ops():
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


def test_a_very_long_timeline_has_only_letters():
    assert render_text(zero_bubble_timeline(), width=24, max_bands=1).splitlines() == [
        "stage 0 | FFF BWBWBWBW",
        "stage 1 |  FFBFBFBWBWW",
    ]


@given(uneven_timelines(), st.integers(20, 200))
def test_any_timeline_fits_its_width(timeline, width):
    assert max(map(len, render_text(timeline, width).splitlines())) <= width


# SVG


def width(svg: str) -> float:
    return float(ElementTree.fromstring(svg).get("width"))


def test_figures_times_and_labels():
    shown = texts(render_svg(timeline_of(4, 4, 4), "1f1b & more"))
    assert {"1f1b & more", "15.8%", "38", "7", "bubble ratio", "makespan", "peak live token slices"} <= set(shown)
    assert "4 stages · 4 micro-batches · 4 token slices" in shown and "B3.3" in shown
    # A picture of many ops is wider, and has no labels where there is no room.
    small, middle, large = (render_svg(timeline_of(*each), "t") for each in ((2, 2, 2), (4, 4, 4), (8, 32, 8)))
    assert width(small) == 1120 < width(middle) < width(large) == 1680
    assert tooltips(small)[0] == "0F0.0: 0 to 1" and len(tooltips(small)) == 16
    assert {"F0.0", "B1.1"} <= set(texts(small)) and not {"F0.0", "B1.1"} & set(texts(large))
    # A measured timeline starts at its first op.
    spans = tuple(Span(Op.parse(text), start, start + 0.5) for text, start in (("0F0.0", 100.0), ("0B0.0", 101.0)))
    measured = render_svg(Timeline(PipelineShape(1, 1, 1), (spans,), "s"), "measured")
    assert tooltips(measured) == ["0F0.0: 0 to 0.5 s", "0B0.0: 1 to 1.5 s"]
    assert {"time (s)", "1.5 s", "0", "0.2", "1.4"} <= set(texts(measured))


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


def test_model_chunks_have_labels_and_stripes():
    svg = render_svg(interleaved_timeline(), "t")
    shown = texts(svg)
    assert {"rank 0", "rank 1", "0F0.0", "2F0.0", "3B1.1", "model chunk 1"} <= set(shown)
    assert "4 stages on 2 ranks · 2 micro-batches · 2 token slices" in shown
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        striped = any(rect.get("fill-opacity") == "0.62" for rect in group.iter(f"{SVG}rect"))
        assert striped == (group.find(f"{SVG}title").text[0] in "23")


def test_a_legend_too_long_for_a_line_continues_below():
    shape = PipelineShape(4, 8, 5, 2)
    timeline = simulate(rank_orders(interleaved, shape), shape, OpCosts.uniform(shape))
    first, *others = timeline.spans
    parts = (Span(Op.parse(op), timeline.end, timeline.end) for op in ("0BW0.0", "0BI0.0"))
    longer = replace(timeline, spans=((*first, *parts), *others))
    for each, lines in ((zero_bubble_timeline(), 1), (longer, 2)):
        root = ElementTree.fromstring(render_svg(each, "t"))
        heights = {element.text: float(element.get("y")) for element in root.iter(f"{SVG}text")}
        assert (heights["micro-batch"] < heights["idle"]) == (lines == 2)
        assert heights["idle"] < float(root.get("height")) - 10


@given(uneven_timelines())
def test_any_timeline_draws_as_well_formed_xml_inside_its_frame(timeline):
    root = ElementTree.fromstring(render_svg(timeline, "<any>"))
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and w >= 0 and h > 0 and x + w <= width and y + h <= height


def test_a_comparison_shows_the_time_saved():
    whole, cut = timeline_of(4, 4, 1, forward=4.0, backward=4.0), timeline_of(4, 4, 4)
    shown = texts(render_comparison([("whole", whole), ("cut", cut)]))
    assert [text for text in shown if text.startswith("bubble")] == [
        "bubble 42.9%  ·  makespan 56  ·  peak live token slices 4 of 4",
        "bubble 15.8%  ·  makespan 38  ·  peak live token slices 7 of 16",
    ]
    assert "32% less time" in shown
    assert not any("less time" in text for text in texts(render_comparison([("cut", cut), ("whole", whole)])))


# Colours


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


def test_times_of_a_trace_are_microseconds_from_the_first_op():
    spans = ((Span(Op.parse("0F0.0"), 7.0, 9.5),),)
    for unit, scale in (("s", 1e6), ("ms", 1e3), ("", 1.0)):
        events = json.loads(render_chrome_trace(Timeline(PipelineShape(1, 1, 1), spans, unit)))["traceEvents"]
        assert [(event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [(0.0, 2.5 * scale)]


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


def test_a_trace_has_a_thread_for_each_stage():
    events = json.loads(render_chrome_trace(interleaved_timeline()))["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(0, 0): "stage 0", (0, 1): "stage 2", (1, 0): "stage 1", (1, 1): "stage 3"}
    ops = [event for event in events if event["ph"] == "X"]
    assert all(threads[each["pid"], each["tid"]] == f"stage {Op.parse(each['name']).stage}" for each in ops)


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


# Two ranks of two stages, one micro-batch of three token slices. A stage input is copied in half the time of a forward.
DRAWING = """\
time 0
rank 0    | 0F0.0 0F0.1 0F0.2 2F0.0 2F0.1 2F0.2  .     .     .    2B0.2------ 2B0.1------ 2B0.0------ 0B0.2------ 0B0.1-
to host   |  .    0K0.0 0K0.1 0K0.2 I--    .     .     .     .     .     .     .     .     .     .     .     .     .
from host |  .     .     .     .     .     .     .     .     .     .     .    I--0K0.0    0K0.1 0K0.2  .     .     .
rank 1    |  .    1F0.0 1F0.1 1F0.2 3F0.0 3F0.1 3F0.2 3B0.2------ 3B0.1------ 3B0.0------ 1B0.2------ 1B0.1------ 1B0.0-
to host   |  .     .    I--1K0.0 I--1K0.1 I--1K0.2 I-- .     .     .     .     .     .     .     .     .     .     .
from host |  .     .     .     .     .     .     .     .     .    I--1K0.0 1K0.1 1K0.2 I--I--    .    I--    .     .

time 18
rank 0    | ----- 0B0.0------
to host   |  .     .     .
from host |  .     .     .
rank 1    | -----  .     .
to host   |  .     .     .
from host |  .     .     ."""


def test_host_copies_are_in_every_kind_of_picture():
    shape = PipelineShape(4, 1, 3, num_model_chunks=2)
    settings = HostCopySettings((2,) * 3, (0.0, 0.25, 0.25, 0.25), (0.5,) * 4, to_host=1.0, from_host=1.0)
    costs = OpCosts.uniform(shape, backward=2.0)
    timeline = simulate_with_host_copies(rank_orders(breadth_first, shape), shape, costs, settings)
    count = 2 * len(timeline.host_copies)
    assert render_text(timeline) == DRAWING
    svg = render_svg(timeline, "breadth-first")
    bars = [text for text in tooltips(svg) if " host: " in text]
    assert len(bars) == count
    assert "keys and values of token slice 0 of micro-batch 0 on stage 0 to host: 1 to 2" in bars
    assert svg.count(">copy to host<") == svg.count(">copy from host<") == 1
    on_host = [[(1.0, 5.0), (3.0, 0.0)], []]
    events = json.loads(render_chrome_trace(timeline, host_memory=on_host))["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    copies = [event for event in events if event.get("cat") == "host copy"]
    assert len(copies) == count
    assert {names[event["pid"], event["tid"]] for event in copies} == {"copies to host", "copies from host"}
    first = min((event for event in copies if event["pid"] == 0), key=lambda event: event["ts"])
    assert (first["name"], first["ts"], first["dur"]) == ("0K0.0", 1, 1)
    assert [event["args"]["held"] for event in events if event["name"] == "host memory"] == [5, 0]
    page = re.search(
        r'id="data"[^>]*>(.*?)</script>', render_html([Panel("p", timeline, host_memory=on_host)], "t"), re.S
    )
    (shown,) = json.loads(page[1])["panels"]
    to_host, from_host = shown["ranks"][0]["copies"]
    assert to_host["start"][:3] == [1, 2, 3] and len(from_host["name"]) == len(to_host["name"])
    assert shown["host_memory"][0] == {"time": [1, 3], "value": [5, 0]}
    assert ["peak on a host", "5"] in shown["figures"]
