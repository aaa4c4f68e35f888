"""Writes a timeline in the Chrome trace event format, which Perfetto and chrome://tracing open.

Each pipeline rank is a process with a thread for each of its stages, then for reductions and for host copies. Arrows
join an op to the op on another rank that reads its result. Curves of memory become counters.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed_ext.plan.draw.elements import KIND_NAMES, LANES, copies_of, rank_name
from deepspeed_ext.plan.memory import StepFunction
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, received, result
from deepspeed_ext.plan.timeline import Timeline

_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}
_Event = dict[str, Any]


def render_chrome_trace(
    timeline: Timeline, memory: Sequence[StepFunction] = (), host_memory: Sequence[StepFunction] = ()
) -> str:
    """Write a timeline as Chrome trace JSON.

    Trace times are microseconds from the first op. A timeline without a unit counts each unit as one microsecond.

    Args:
        memory: per rank, its memory from each time of the timeline on; optional.
    """
    counters = {"memory": memory, "host memory": host_memory}
    return json.dumps({"traceEvents": list(_events(timeline, counters)), "displayTimeUnit": "ms"})


def _events(timeline: Timeline, counters: Mapping[str, Sequence[StepFunction]]) -> Iterator[_Event]:
    scale = _MICROSECONDS.get(timeline.unit, 1.0)

    def time(value: float) -> float:
        return (value - timeline.start) * scale

    shape = timeline.shape
    for rank, spans in enumerate(timeline.spans):
        yield from _names(shape, rank)
        for op, start, end in spans:
            yield {
                "ph": "X",
                "name": str(op),
                "cat": KIND_NAMES[op.kind],
                **_place(op, shape),
                "ts": time(start),
                "dur": time(end) - time(start),
                "args": {"micro_batch": op.micro_batch, "token_slice": op.token_slice},
            }
    yield from _transfers(timeline, time)
    yield from _reductions(timeline, time)
    yield from _copies(timeline, time)
    for name, curves in counters.items():
        for rank, curve in enumerate(curves):
            for start, held in curve:
                yield {"ph": "C", "name": name, "pid": rank, "ts": time(start), "args": {"held": held}}
    ran = {result(span.op): span for spans in timeline.spans for span in spans}
    for number, reader in enumerate(ran.values()):
        needed = received(reader.op, shape)
        if needed is not None and needed in ran and shape.rank_of(needed.stage) != shape.rank_of(reader.op.stage):
            for span, ending in ((ran[needed], {"ph": "s"}), (reader, {"ph": "f", "bp": "e"})):
                yield {"name": "transfer", "cat": "transfer", "id": number, **_place(span.op, shape)} | {
                    # Viewers tie an arrow to the op that it falls in, and ends are shared with neighbours.
                    "ts": time((span.start + span.end) / 2),
                    **ending,
                }


def _transfers(timeline: Timeline, time: Callable[[float], float]) -> Iterator[_Event]:
    """Transfers that took time, on a track of their source rank for each channel: several can be on their way."""
    giver = {result(span.op): str(span.op) for spans in timeline.spans for span in spans}
    for number, (op, channel, start, end, _) in enumerate(timeline.transfers):
        name = f"{'activations' if channel.result is OpKind.FORWARD else 'gradients'} to rank {channel.target}"
        shared = {"name": name, "cat": "transfer", "id": f"message {number}", "pid": channel.source, "tid": 0}
        yield {"ph": "b", **shared, "ts": time(start), "args": {"result_of": giver[op]}}
        yield {"ph": "e", **shared, "ts": time(end)}


def _reductions(timeline: Timeline, time: Callable[[float], float]) -> Iterator[_Event]:
    """Reductions, on a thread of their rank after the threads of its stages."""
    shape = timeline.shape
    thread = shape.num_model_chunks
    for rank in sorted({shape.rank_of(one.stage) for one in timeline.reductions}):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": "gradient reductions"}}
    for stage, piece, start, end in timeline.reductions:
        name = {"ph": "X", "name": f"stage {stage}, piece {piece}", "cat": "reduction"}
        yield {**name, "pid": shape.rank_of(stage), "tid": thread, "ts": time(start), "dur": time(end) - time(start)}


def _copies(timeline: Timeline, time: Callable[[float], float]) -> Iterator[_Event]:
    """Copies to the host and back, on two threads of their rank after the thread of its reductions."""
    for rank in range(timeline.shape.num_ranks):
        for lane, copies in enumerate(copies_of(timeline, rank)):
            place = {"pid": rank, "tid": timeline.shape.num_model_chunks + 1 + lane}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"copies {LANES[lane]}"}}
            for drawn in copies:
                times = {"ts": time(drawn.start), "dur": time(drawn.end) - time(drawn.start)}
                name = {"name": drawn.label(timeline.shape), "cat": "host copy", "args": {"what": drawn.words(lane)}}
                yield {"ph": "X", **name, **place, **times}


def _names(shape: PipelineShape, rank: int) -> Iterator[_Event]:
    """Names of a process and its threads in viewers, and their order."""
    name = {"name": rank_name(shape, rank)}
    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": name}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for thread, stage in enumerate(shape.stages_of(rank)):
        called = "ops" if shape.num_model_chunks == 1 else f"stage {stage}"
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": called}}


def _place(op: Op, shape: PipelineShape) -> dict[str, int]:
    return {"pid": shape.rank_of(op.stage), "tid": op.stage // shape.num_ranks}
