"""A timeline: when each op ran. The simulator predicts one, the engine measures one, drawings show either.

Its critical path is the chain of ops and transfers that ends last; all other events have slack. Copies to the host are
left out: they are planned to delay no op.

    rank 0 | [F0.0]*[F0.1]                    [B0.1] [B0.0]*
                  '--->* transfer           .--------'
    rank 1 |            [F0.0]*[F0.1]*[B0.1]*[B0.0]*          * = on the critical path

The path is followed back from the op that ends last, each time to the last end among the events that had to end before.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import LIVE_CHANGE, Op, PipelineShape, prerequisites, reader_of, result
from deepspeed_ext.plan.programs.host_copies import TimedCopy
from deepspeed_ext.plan.programs.program import Channel, Content, Reduction, channel_of
from deepspeed_ext.plan.text_files import parse_json

__all__ = ["CriticalPath", "Span", "Timeline", "Transfer", "critical_path", "executed_order"]


class Span(NamedTuple):
    """One op and the time it took, in the unit of its timeline."""

    op: Op
    start: float
    end: float


class Transfer(NamedTuple):
    """A result on its way to another rank."""

    op: Op
    """The result, named as `ops.result` names it: `0F0.1` is an activation, `1BI0.1` a gradient."""
    channel: Channel
    start: float
    """Departure: as its op ends, or once the channel is free."""
    end: float
    """Arrival."""
    sent: float
    """Time from which the channel is free for the next: a latency before the end."""


@dataclass(frozen=True)
class Timeline:
    """Spans of every pipeline rank, in the order each rank ran them."""

    shape: PipelineShape
    spans: tuple[tuple[Span, ...], ...]
    """Per rank, its spans by start."""
    unit: str = ""
    """Unit of the times, for axis labels: `s` when measured."""
    transfers: tuple[Transfer, ...] = ()
    """By channel and start; none where they take no time, or were not measured."""
    reductions: tuple[Reduction, ...] = ()
    """By rank and start; none where there is one replica, or they were not measured."""
    host_copies: tuple[TimedCopy, ...] = ()
    """By rank and start; none where nothing is copied to the host, or copies were not measured."""

    @cached_property
    def start(self) -> float:
        """Start of the first op."""
        return min(span.start for rank in self.spans for span in rank)

    @cached_property
    def end(self) -> float:
        """End of the last op."""
        return max(span.end for rank in self.spans for span in rank)

    @property
    def makespan(self) -> float:
        """Time from the first op's start to the last op's end."""
        return self.end - self.start

    @property
    def duration(self) -> float:
        """Time from the first op's start until the optimizer may step: all ops are done, and all reductions."""
        return max([self.end, *(reduction.end for reduction in self.reductions)]) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """Time each rank spends in ops."""
        return tuple(sum(span.end - span.start for span in rank) for rank in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """Idle time over ranks x makespan, in [0, 1)."""
        if self.makespan == 0:
            return 0.0
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan)

    @property
    def peak_live_token_slices(self) -> tuple[int, ...]:
        """Per rank, the most token slices, of any of its stages, that were forward and not yet all backward."""
        return tuple(max(accumulate(LIVE_CHANGE[span.op.kind] for span in rank), default=0) for rank in self.spans)

    def to_json(self) -> str:
        """Write the timeline as JSON: `from_json` reads it back."""
        fields = {
            **self.shape.to_fields(),
            "unit": self.unit,
            "spans": [[[str(span.op), span.start, span.end] for span in rank] for rank in self.spans],
        }
        if self.transfers:
            fields["transfers"] = [[str(one.op), one.start, one.end, one.sent] for one in self.transfers]
        if self.reductions:
            fields["reductions"] = self.reductions
        if self.host_copies:
            fields["host_copies"] = self.host_copies
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Read the JSON of `to_json`."""
        fields: Any = parse_json(text, "a timeline")
        try:
            shape = PipelineShape.from_fields(fields)
            spans = tuple(
                tuple(Span(Op.parse(op), float(start), float(end)) for op, start, end in rank)
                for rank in fields["spans"]
            )
            transfers = tuple(_read_transfer(entry, shape) for entry in fields.get("transfers", ()))
            reductions = tuple(_read_reduction(entry, shape) for entry in fields.get("reductions", ()))
            host_copies = tuple(_read_host_copy(entry, shape) for entry in fields.get("host_copies", ()))
            timeline = cls(shape, spans, str(fields["unit"]), transfers, reductions, host_copies)
            for rank, row in enumerate(spans):
                for op, start, end in row:
                    inside = op.micro_batch < shape.num_micro_batches and op.token_slice < shape.num_token_slices
                    if not inside or op.stage not in shape.stages_of(rank) or not -inf < start <= end < inf:
                        raise ValueError(f"op {op} from {start} to {end} on rank {rank} of {shape}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a timeline ({error}): give a file written by --json or by the trainer") from None
        if not any(spans) or len(spans) != shape.num_ranks:
            raise PlanError(f"a timeline of {len(spans)} ranks for a pipeline of {shape.num_ranks}: write it again")
        return timeline


def _read_reduction(entry: Sequence[Any], shape: PipelineShape) -> Reduction:
    stage, piece, start, end = entry
    if stage not in range(shape.num_stages) or not -inf < float(start) <= float(end) < inf:
        raise ValueError(f"a reduction of stage {stage} from {start} to {end}")
    return Reduction(int(stage), int(piece), float(start), float(end))


def _read_host_copy(entry: Sequence[Any], shape: PipelineShape) -> TimedCopy:
    content, stage, micro_batch, token_slice, *times = entry
    extents = (stage, shape.num_stages), (micro_batch, shape.num_micro_batches), (token_slice, shape.num_token_slices)
    inside = all(number in range(extent) for number, extent in extents)
    start, arrived, dropped, back, end = map(float, times)
    if not inside or not -inf < start <= arrived <= dropped <= back <= end < inf:
        raise ValueError(f"a host copy of {entry[:4]} at {times}")
    unit = int(stage), int(micro_batch), int(token_slice)
    return TimedCopy(Content(content), *unit, start, arrived, dropped, back, end)


def _read_transfer(entry: Sequence[Any], shape: PipelineShape) -> Transfer:
    name, *times = entry
    op, (start, end, sent) = Op.parse(name), map(float, times)
    reader = reader_of(op, shape) if op.stage < shape.num_stages else None
    if reader is None or not -inf < start <= sent <= end < inf:
        raise ValueError(f"a transfer of {op} from {start} to {end}")
    return Transfer(op, channel_of(reader, shape), start, end, sent)


def executed_order(timeline: Timeline) -> Sequence[Sequence[Op]]:
    """Per rank, the ops of a timeline without their times, to compare with a schedule."""
    return [[span.op for span in rank] for rank in timeline.spans]


Event = Span | Transfer
"""Things that take time in a timeline."""


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of a timeline."""

    events: tuple[Event, ...]
    """First to last. If all times are simulated, each starts at the end of the one before it, and together they take
    the makespan."""
    slack: dict[Op, float]
    """Time by which each op could end later without a longer makespan, if all else keeps its order and length."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops on the path."""
        return tuple(event.op for event in self.events if isinstance(event, Span))


def critical_path(timeline: Timeline) -> CriticalPath:
    """Find the chain that determines the makespan, and the slack of all ops.

    Where several chains end at the same time, the one that stays on its rank longest is taken.
    """
    waits = _waits(timeline)
    slack = _slack(timeline, waits)  # first, since it finds out whether there is a path at all
    event: Event = max((span for spans in timeline.spans for span in spans), key=lambda span: span.end)
    events = [event]
    while (wait := max(waits[event], key=lambda each: each.time, default=None)) is not None:
        event = wait.event
        events.append(event)
    return CriticalPath(tuple(reversed(events)), slack)


class _Wait(NamedTuple):
    """An event that another one waits for, and the time from which it no longer waits."""

    event: Event
    time: float


def _end_of(event: Event) -> _Wait:
    return _Wait(event, event.end)


def _waits(timeline: Timeline) -> dict[Event, list[_Wait]]:
    """The events of a timeline, and those that each waits for; of several at the same time, the first counts."""
    shape = timeline.shape
    spans = {result(span.op): span for spans in timeline.spans for span in spans}
    transfers = {transfer.op: transfer for transfer in timeline.transfers}
    waits: dict[Event, list[_Wait]] = {}
    for row in timeline.spans:
        before: Span | None = None
        for span in row:
            waits[span] = [] if before is None else [_end_of(before)]
            for needed in prerequisites(span.op, shape):
                transfer = transfers.get(needed)
                if transfer is not None and needed.stage != span.op.stage:
                    waits[span].append(_end_of(transfer))
                elif needed in spans:
                    waits[span].append(_end_of(spans[needed]))
            before = span
    last_on: dict[Channel, Transfer] = {}
    for transfer in sorted(timeline.transfers, key=lambda each: (each.start, each.sent)):
        waits[transfer] = [_end_of(spans[transfer.op])]
        if (ahead := last_on.get(transfer.channel)) is not None:
            waits[transfer].append(_Wait(ahead, ahead.sent))
        last_on[transfer.channel] = transfer
    return waits


def _slack(timeline: Timeline, waits: Mapping[Event, Sequence[_Wait]]) -> dict[Op, float]:
    """Latest end minus end, from the last event to the first."""
    latest: dict[Event, float] = {}
    for event in reversed(_in_order(waits)):
        allowed = latest.setdefault(event, timeline.end)
        for wait in waits[event]:
            # The event it waits for must have ended early enough for this one to start in time.
            due = allowed - (event.end - event.start) - (wait.time - wait.event.end)
            latest[wait.event] = min(latest.get(wait.event, timeline.end), due)
    return {span.op: max(latest[span] - span.end, 0.0) for spans in timeline.spans for span in spans}


def _in_order(waits: Mapping[Event, Sequence[_Wait]]) -> list[Event]:
    """All events, each after all that it waits for: events that take no time cannot be sorted by start."""
    try:
        events = {event: [wait.event for wait in needed] for event, needed in waits.items()}
        return list(TopologicalSorter(events).static_order())
    except CycleError as error:
        op = error.args[1][0].op
        raise PlanError(f"op {op} is earlier than an op that it needs: give the timeline of a run that ended") from None
