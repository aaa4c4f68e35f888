"""Draws timelines as one HTML page that needs nothing else: zoom, pan, hover, the critical path, memory curves.

The page draws on a canvas, and only the visible ops, so a hundred thousand ops open at once. Its data are JSON: columns
of numbers for each rank, and for each op the ops that it needs. Numbers of ops count over all ranks, in the order of
the rows.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import accumulate
from typing import Any

from deepspeed_ext.plan.draw.elements import common_unit, copies_of, op_colour, rank_name, with_unit
from deepspeed_ext.plan.memory import StepFunction, peak
from deepspeed_ext.plan.ops import OpKind, prerequisites, result
from deepspeed_ext.plan.timeline import Timeline, critical_path

_KINDS = {kind: number for number, kind in enumerate(OpKind)}
_SCRIPTS = ("ops.js", "panel.js", "page.js")
_DIGITS = 8
"""Digits of times and memory, which is more than a screen can show at any zoom."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline of a page."""

    title: str
    timeline: Timeline
    memory: Sequence[StepFunction] = ()
    """Per rank, its memory over the time of the timeline; optional."""
    memory_unit: str = "activations, in micro-batches on one rank"
    host_memory: Sequence[StepFunction] = ()
    """Per rank, the memory of its host; optional."""


def render_html(panels: Sequence[Panel], title: str) -> str:
    """Draw timelines below each other on one time axis."""
    common_unit([panel.timeline for panel in panels])
    page = files("deepspeed_ext.plan.draw") / "page"
    parts = {
        "title": escape(title),
        "style": (page / "style.css").read_text(encoding="utf-8"),
        "script": "\n".join((page / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "data": _embedded({"panels": [_columns(panel) for panel in panels]}),
    }
    template = (page / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda marker: parts[marker[1]], template)


def _embedded(content: dict[str, Any]) -> str:
    """JSON that no parser of HTML can take for the end of its element."""
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _columns(panel: Panel) -> dict[str, Any]:
    timeline, shape = panel.timeline, panel.timeline.shape
    firsts = accumulate((len(row) for row in timeline.spans), initial=0)
    number = {
        result(span.op): first + index
        for first, row in zip(firsts, timeline.spans, strict=False)
        for index, span in enumerate(row)
    }
    path = critical_path(timeline)
    arrivals = {transfer.op: _rounded(transfer.end - timeline.start) for transfer in timeline.transfers}
    return {
        "title": panel.title,
        "extents": " · ".join(shape.extents),
        "unit": timeline.unit,
        "makespan": _rounded(timeline.makespan),
        "num_token_slices": shape.num_token_slices,
        "num_model_chunks": shape.num_model_chunks,
        "figures": _figures(panel),
        "colours": [
            [op_colour(micro_batch, each, shape.num_token_slices) for each in range(shape.num_token_slices)]
            for micro_batch in range(shape.num_micro_batches)
        ],
        "critical": [number[result(op)] for op in path.ops],
        "ranks": [
            {
                "name": rank_name(shape, rank),
                "start": [_rounded(span.start - timeline.start) for span in row],
                "end": [_rounded(span.end - timeline.start) for span in row],
                "kind": [_KINDS[span.op.kind] for span in row],
                "stage": [span.op.stage for span in row],
                "micro_batch": [span.op.micro_batch for span in row],
                "token_slice": [span.op.token_slice for span in row],
                # When a result is on the rank of the stage that reads it, where it takes time to get there.
                "arrival": [arrivals.get(result(span.op)) for span in row] if arrivals else [],
                "copies": [
                    {
                        "name": [drawn.words(lane) for drawn in copies],
                        "start": [_rounded(drawn.start - timeline.start) for drawn in copies],
                        "end": [_rounded(drawn.end - timeline.start) for drawn in copies],
                    }
                    for lane, copies in enumerate(copies_of(timeline, rank))
                ],
                "slack": [_rounded(path.slack[span.op]) for span in row],
                "needs": [
                    [number[needed] for needed in prerequisites(span.op, shape) if needed in number] for span in row
                ],
            }
            for rank, row in enumerate(timeline.spans)
        ],
        "memory": [_curve(curve, timeline) for curve in panel.memory],
        "memory_unit": panel.memory_unit,
        "host_memory": [_curve(curve, timeline) for curve in panel.host_memory if any(panel.host_memory)],
    }


def _curve(curve: StepFunction, timeline: Timeline) -> dict[str, list[float]]:
    return {
        "time": [_rounded(time - timeline.start) for time, _ in curve],
        "value": [_rounded(value) for _, value in curve],
    }


def _figures(panel: Panel) -> list[tuple[str, str]]:
    """Names and values of the figures over a panel."""
    timeline = panel.timeline
    found = [
        ("bubble ratio", f"{timeline.bubble_ratio:.2%}"),
        ("makespan", with_unit(timeline.makespan, timeline.unit)),
        ("peak live token slices", str(max(timeline.peak_live_token_slices))),
        ("ops", str(sum(map(len, timeline.spans)))),
    ]
    for place, name, curves in ((3, "peak memory", panel.memory), (4, "peak on a host", panel.host_memory)):
        if any(curves):
            found.insert(place, (name, f"{max(map(peak, curves)):.4g}"))
    return found


def _rounded(value: float) -> float:
    """A number as short as it may be: integers lose their `.0`."""
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded
