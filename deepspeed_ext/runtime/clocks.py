"""Observers of the ops and phases of a step: clocks, timelines, and named ranges for profilers."""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import BACKWARD_MICRO_TIMER

from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.timeline import Span

__all__ = ["Observer", "ProfilerRanges"]


class Stamps:
    """Stamps of times, and the seconds between two.

    An accelerator is later than its host, so there stamps are events in its queue, read after the work.
    """

    def __init__(self) -> None:
        self._synchronous = get_accelerator().is_synchronized_device()

    def now(self) -> Any:
        """A stamp of the current time."""
        if self._synchronous:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device has completed all queued work; stamps can then be read."""
        if not self._synchronous:
            get_accelerator().synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one stamp to another."""
        if self._synchronous:
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000.0  # events measure milliseconds


OPS, SUMS, REDUCTIONS, UPDATE = "forward-backward", "shared-grads-sync", "all-grads-sync", "optimizer"
PHASES = (OPS, SUMS, REDUCTIONS, UPDATE)
"""Phases of a step, one after the other: ops and transfers; sums of gradients over the ranks of one replica; the
remaining sums over replicas; norm, clipping and update."""


class Observer:
    """Surrounds the ops and phases of an engine's steps."""

    def begin(self) -> None:
        """A batch begins."""

    def op(self, op: Op) -> AbstractContextManager[None]:
        """Surround the computing of an op."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Surround a phase of a step after the ops."""
        return nullcontext()


Joining = TypeVar("Joining", bound=Observer)


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, members: Iterable[Observer] = ()) -> None:
        self._members = list(members)

    @contextmanager
    def joined_by(self, observer: Joining) -> Iterator[Joining]:
        """Add another observer for the batches that run inside."""
        self._members.append(observer)
        try:
            yield observer
        finally:
            self._members.remove(observer)

    def begin(self) -> None:
        for member in self._members:
            member.begin()

    def op(self, op: Op) -> AbstractContextManager[None]:
        return self._around(member.op(op) for member in self._members)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._around(member.phase(name) for member in self._members)

    @contextmanager
    def _around(self, surroundings: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as entered:
            for each in surroundings:
                entered.enter_context(each)
            yield


class BackwardTimer(Observer):
    """Runs DeepSpeed's timer of backwards, of its setting `wall_clock_breakdown`. Its hooks time the forwards."""

    def __init__(self, engine: Any) -> None:
        self._timer = engine.timers(BACKWARD_MICRO_TIMER)

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Time an op other than a forward."""
        if op.kind is OpKind.FORWARD:
            yield
            return
        self._timer.start()
        yield
        self._timer.stop()


class ProfilerRanges(Observer):
    """Named ranges for ops and phases, in torch's profiler and on an accelerator's timeline (NVTX on CUDA)."""

    def op(self, op: Op) -> AbstractContextManager[None]:
        """Name an op: `2F0.3`."""
        return _named(str(op))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name a phase."""
        return _named(name)


@contextmanager
def _named(name: str) -> Iterator[None]:
    accelerator = get_accelerator()
    accelerator.range_push(name)
    try:
        # A range belongs to one thread, so kernels of a backward are launched by the thread of all other kernels.
        with torch.autograd.set_multithreading_enabled(False), torch.profiler.record_function(name):
            yield
    finally:
        accelerator.range_pop()


class OpClock(Observer):
    """Stamps the start and end of ops, in seconds since the clock was made."""

    def __init__(self) -> None:
        self.stamps = Stamps()
        self.stamps.wait()
        self._marks: list[tuple[Op, Any, Any]] = []
        self._origin = self.stamps.now()

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Stamp an op."""
        start = self.stamps.now()
        yield
        self._marks.append((op, start, self.stamps.now()))

    def since_start(self, *stamps: Any) -> list[float]:
        """Seconds from the start of the clock to each of some stamps."""
        self.stamps.wait()
        return [self.stamps.seconds(self._origin, each) for each in stamps]

    def spans(self) -> list[Span]:
        """The ops measured, in order."""
        return [Span(op, *self.since_start(start, end)) for op, start, end in self._marks]


FORWARD, BACKWARD = "forward-compute", "backward-compute"
"""Parts of the ops: forwards, and all others, weight gradients included."""


class PhaseClock(Observer):
    """Sums of the seconds of a step, by phase; with `parts` of forwards and backwards, too."""

    def __init__(self, *, parts: bool) -> None:
        self.names = PHASES + (FORWARD, BACKWARD) * parts
        self._parts, self._stamps = parts, Stamps()
        self._began: Any = None
        self._marks: list[tuple[str, Any, Any]] = []

    def begin(self) -> None:
        """Stamp the start of the ops."""
        self._began = self._stamps.now()

    def op(self, op: Op) -> AbstractContextManager[None]:
        """Measure an op, if parts are."""
        return self._measure(FORWARD if op.kind is OpKind.FORWARD else BACKWARD) if self._parts else nullcontext()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase; the first of a step ends the ops."""
        if self._began is not None:
            self._marks.append((OPS, self._began, self._stamps.now()))
            self._began = None
        with self._measure(name):
            yield

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        start = self._stamps.now()
        yield
        self._marks.append((name, start, self._stamps.now()))

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by name, and reset them."""
        self._stamps.wait()
        seconds = dict.fromkeys(self.names, 0.0)
        for name, start, end in self._marks:
            seconds[name] += self._stamps.seconds(start, end)
        self._marks.clear()
        return seconds
