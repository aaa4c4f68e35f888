"""The critical path of a timeline: the chain of ops and transfers that ends last, and the slack of all others.

    rank 0 | [F0.0]*[F0.1]                    [B0.1] [B0.0]*
                  '--->* transfer           .--------'
    rank 1 |            [F0.0]*[F0.1]*[B0.1]*[B0.0]*          * = on the critical path

From the op that ends last the path goes back: to what the op waited for last. That is the op before it on its rank, a
result of its own rank, a transfer, or a copy between its device and the host; and a transfer waited for its op, or for
the one before it on its channel. `copy_waits` says what copies wait for.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from deepspeed_ext.plan.dependencies import prerequisites, result
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.programs.copy_waits import CopyRun, copy_waits
from deepspeed_ext.plan.programs.program import Channel
from deepspeed_ext.plan.timeline import Span, Timeline, Transfer

__all__ = ["CriticalPath", "PathStep", "Reason", "critical_path"]


class Reason(StrEnum):
    """Kinds of events that a step of the critical path waited for."""

    START = "start"
    """Nothing: it is the first."""
    RANK = "rank"
    """Its rank was busy with the op before."""
    DATA = "data"
    """A result: of its own rank, or of another whose transfer took no time or was not recorded."""
    TRANSFER = "transfer"
    """A result that was on its way."""
    CHANNEL = "channel"
    """The transfer before it on its channel."""
    COPY = "copy"
    """A copy to the host that lets memory go, or one back that the op reads."""
    LANE = "lane"
    """The copy before it, in the same direction."""


Event = Span | Transfer | CopyRun
"""What a timeline consists of."""


class PathStep(NamedTuple):
    """One op, transfer or host copy on the critical path."""

    event: Event
    reason: Reason
    """Kind of dependency between it and the step before."""
    idle: float
    """Time between the end of what it waited for and its start. Where times are measured: what nobody accounts for."""


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of a timeline."""

    steps: tuple[PathStep, ...]
    """First to last. If all times are simulated, each starts where the one before it ends, and together they take the
    makespan."""
    slack: dict[Op, float]
    """By how much each op could end later without a longer makespan, if all else keeps its order and length."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops on the path."""
        return tuple(step.event.op for step in self.steps if isinstance(step.event, Span))


def critical_path(timeline: Timeline) -> CriticalPath:
    """Find the chain that determines the makespan, and what may come later without harm.

    Where several chains end at the same time, the one that stays on its rank longest is taken.

    Args:
        timeline: simulated, or measured. Of a measured one, each op waited for what ended last before it.

    Raises:
        PlanError: if ops stand in an order that nobody can have run.
    """
    return _Graph(timeline).critical_path()


class _Wait(NamedTuple):
    """An event cannot start before `time`, because of another event."""

    time: float
    lag: float
    """How long after the end of that event, or before it if negative."""
    reason: Reason
    event: Event


class _Graph:
    """Events of a timeline, and what each waits for."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._spans = {result(span.op): span for spans in timeline.spans for span in spans}
        self._transfers = {transfer.op: transfer for transfer in timeline.transfers}
        self._before_on_rank: dict[Op, Span] = {}
        for spans in timeline.spans:
            for before, span in pairwise(spans):
                self._before_on_rank[span.op] = before
        self._before_on_channel: dict[Op, Transfer] = {}
        last: dict[Channel, Transfer] = {}
        for transfer in sorted(timeline.transfers, key=lambda each: (each.start, each.sent)):
            if transfer.channel in last:
                self._before_on_channel[transfer.op] = last[transfer.channel]
            last[transfer.channel] = transfer
        self._copies = copy_waits(timeline)

    def _waits(self, event: Event) -> Iterator[_Wait]:
        """Event that an event waits for; of several at the same time, the first."""
        if isinstance(event, CopyRun):
            waited = self._copies.of_copies[event]
            if waited.op is not None:
                yield _Wait(waited.op.end, 0.0, Reason.DATA, waited.op)
            if waited.before is not None:
                yield _Wait(waited.before.end, 0.0, Reason.LANE, waited.before)
            if waited.offload is not None:
                yield _Wait(waited.offload.end, 0.0, Reason.COPY, waited.offload)
            return
        if isinstance(event, Transfer):
            producer = self._spans[event.op]
            yield _Wait(producer.end, 0.0, Reason.DATA, producer)
            if (ahead := self._before_on_channel.get(event.op)) is not None:
                yield _Wait(ahead.sent, ahead.sent - ahead.end, Reason.CHANNEL, ahead)
            return
        if (before := self._before_on_rank.get(event.op)) is not None:
            yield _Wait(before.end, 0.0, Reason.RANK, before)
        for copy in self._copies.of_ops.get(event.op, ()):
            yield _Wait(copy.end, 0.0, Reason.COPY, copy)
        for needed in prerequisites(event.op, self._timeline.shape):
            transfer = self._transfers.get(needed)
            if transfer is not None and needed.stage != event.op.stage:
                yield _Wait(transfer.end, 0.0, Reason.TRANSFER, transfer)
            elif needed in self._spans:
                yield _Wait(self._spans[needed].end, 0.0, Reason.DATA, self._spans[needed])

    def critical_path(self) -> CriticalPath:
        slack = self._slack()  # first, since it sees whether there is a path at all
        event: Event = max((span for spans in self._timeline.spans for span in spans), key=lambda span: span.end)
        steps = []
        while (wait := max(self._waits(event), key=lambda each: each.time, default=None)) is not None:
            steps.append(PathStep(event, wait.reason, event.start - wait.time))
            event = wait.event
        steps.append(PathStep(event, Reason.START, event.start - self._timeline.start))
        return CriticalPath(tuple(reversed(steps)), slack)

    def _slack(self) -> dict[Op, float]:
        """Latest end minus end, from the last event to the first."""
        latest: dict[Event, float] = {}
        for event in reversed(self._in_order()):
            allowed = latest.setdefault(event, self._timeline.end)
            for wait in self._waits(event):
                # The event it waits for must have ended early enough for this one to start in time.
                due = allowed - (event.end - event.start) - wait.lag
                latest[wait.event] = min(latest.get(wait.event, self._timeline.end), due)
        spans = (span for spans in self._timeline.spans for span in spans)
        return {span.op: max(latest[span] - span.end, 0.0) for span in spans}

    def _in_order(self) -> list[Event]:
        """All events, each after all that it waits for: also those that take no time, whose starts do not tell."""
        followers: dict[Event, list[Event]] = defaultdict(list)
        missing: dict[Event, int] = {}
        events: list[Event] = [span for spans in self._timeline.spans for span in spans]
        events += [*self._timeline.transfers, *self._copies.of_copies]
        for event in events:
            waits = list(self._waits(event))
            missing[event] = len(waits)
            for wait in waits:
                followers[wait.event].append(event)
        ready = deque(event for event in events if not missing[event])
        ordered = []
        while ready:
            event = ready.popleft()
            ordered.append(event)
            for follower in followers[event]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        if len(ordered) < len(events):
            op = next(event.op for event in events if missing[event] and isinstance(event, Span | Transfer))
            raise PlanError(f"op {op} stands before what it waits for: give the timeline of a run that ended")
        return ordered
