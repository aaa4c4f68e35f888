"""Writes a timeline in the Chrome trace event format, which Perfetto and chrome://tracing open.

Each stage is a process with one thread. Arrows join an op to the op on another stage that reads its result.
"""

import json
from typing import Any

from deepspeed_ext.plan.dependencies import transferred
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.timeline import Span, Timeline

_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}
_CATEGORY = {OpKind.FORWARD: "forward", OpKind.BACKWARD: "backward"}


def render_chrome_trace(timeline: Timeline) -> str:
    """Write a timeline as Chrome trace JSON.

    Trace times are microseconds from the first op. A timeline without a unit counts each unit as one microsecond.
    """
    scale = _MICROSECONDS.get(timeline.unit, 1.0)

    def time(value: float) -> float:
        return (value - timeline.start) * scale

    events: list[dict[str, Any]] = []
    for stage, spans in enumerate(timeline.spans):
        place = {"pid": stage, "tid": 0}
        events.append({"ph": "M", "name": "process_name", **place, "args": {"name": f"stage {stage}"}})
        events.append({"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": stage}})
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": "ops"}})
        for op, start, end in spans:
            events.append(
                {
                    "ph": "X",
                    "name": str(op),
                    "cat": _CATEGORY[op.kind],
                    **place,
                    "ts": time(start),
                    "dur": time(end) - time(start),
                    "args": {"micro_batch": op.micro_batch, "token_slice": op.token_slice},
                }
            )
    ran = {span.op: span for spans in timeline.spans for span in spans}
    transfers = ((ran.get(needed), span) for op, span in ran.items() if (needed := transferred(op, timeline.shape)))
    for number, (producer, consumer) in enumerate(transfers):
        if producer is not None:
            events.append({**_arrow_end(producer.op, time(_middle(producer)), number), "ph": "s"})
            events.append({**_arrow_end(consumer.op, time(_middle(consumer)), number), "ph": "f", "bp": "e"})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _arrow_end(op: Op, time: float, number: int) -> dict[str, Any]:
    return {"name": "transfer", "cat": "transfer", "id": number, "pid": op.stage, "tid": 0, "ts": time}


def _middle(span: Span) -> float:
    """A time inside the op: viewers tie an arrow to the op it falls in, and ends are shared with neighbours."""
    return (span.start + span.end) / 2
