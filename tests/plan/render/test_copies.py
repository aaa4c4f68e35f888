"""Copies to the host and back in every kind of picture."""

import json
import re
from xml.etree import ElementTree

import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw import Panel, render_chrome_trace, render_html, render_svg, render_text
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedules import breadth_first, rank_orders
from deepspeed_ext.plan.simulate import simulate_with_host_copies
from deepspeed_ext.plan.timeline import Timeline

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


@pytest.fixture
def timeline() -> Timeline:
    shape = PipelineShape(4, 1, 3, num_model_chunks=2)
    settings = HostCopySettings((2,) * 3, (0.0, 0.25, 0.25, 0.25), (0.5,) * 4, to_host=1.0, from_host=1.0)
    costs = OpCosts.uniform(shape, backward=2.0)
    return simulate_with_host_copies(rank_orders(breadth_first, shape), shape, costs, settings)


def test_text(timeline):
    assert render_text(timeline) == DRAWING


def test_bars_below_the_tracks_name_what_is_copied(timeline):
    svg = render_svg(timeline, "breadth-first")
    ElementTree.fromstring(svg)
    bars = re.findall(r"<title>(.* (?:to|from) host: .*)</title>", svg)
    assert len(bars) == 2 * len(timeline.host_copies)
    assert "keys and values of token slice 0 of micro-batch 0 on stage 0 to host: 1 to 2" in bars
    assert svg.count(">copy to host<") == svg.count(">copy from host<") == 1


def test_a_trace_has_a_thread_for_each_direction_and_a_counter_of_the_host(timeline):
    events = json.loads(render_chrome_trace(timeline, host_memory=[[(1.0, 5.0), (3.0, 0.0)], []]))["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    copies = [event for event in events if event.get("cat") == "host copy"]
    assert len(copies) == 2 * len(timeline.host_copies)
    assert {names[event["pid"], event["tid"]] for event in copies} == {"copies to host", "copies from host"}
    first = min((event for event in copies if event["pid"] == 0), key=lambda event: event["ts"])
    assert (first["name"], first["ts"], first["dur"]) == ("0K0.0", 1, 1)
    assert [event["args"]["held"] for event in events if event["name"] == "host memory"] == [5, 0]


def test_a_page_has_the_lanes_and_the_curves_of_the_host(timeline):
    panel = Panel("p", timeline, host_memory=[[(1.0, 5.0), (3.0, 0.0)], []])
    page = re.search(r'id="data"[^>]*>(.*?)</script>', render_html([panel], "t"), re.DOTALL)
    (shown,) = json.loads(page[1])["panels"]
    to_host, from_host = shown["ranks"][0]["copies"]
    assert to_host["start"][:3] == [1, 2, 3] and len(from_host["name"]) == len(to_host["name"])
    assert from_host["name"][0].endswith("from host")
    assert shown["host_memory"][0] == {"time": [1, 3], "value": [5, 0]}
    assert ["peak on a host", "5"] in shown["figures"]
