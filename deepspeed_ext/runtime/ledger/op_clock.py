"""Measures when each op of a step ran, on this rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator

from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.timeline import Span


class OpClock:
    """Stamps the start and end of ops, in seconds since the clock was made.

    Accelerators run behind the host, so there the stamps are events on their queue, read when the step is over.
    """

    def __init__(self) -> None:
        accelerator = get_accelerator()
        self._synchronous = accelerator.is_synchronized_device()
        if not self._synchronous:
            accelerator.synchronize()
        self._marks: list[tuple[Op, Any, Any]] = []
        self._origin = self._stamp()

    @contextmanager
    def measure(self, op: Op) -> Iterator[None]:
        """Stamp an op."""
        start = self._stamp()
        yield
        self._marks.append((op, start, self._stamp()))

    def spans(self) -> list[Span]:
        """The ops measured, in order."""
        if not self._synchronous:
            get_accelerator().synchronize()
        return [Span(op, self._seconds(start), self._seconds(end)) for op, start, end in self._marks]

    def _stamp(self) -> Any:
        if self._synchronous:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, stamp: Any) -> float:
        if self._synchronous:
            return float(stamp - self._origin)
        return float(self._origin.elapsed_time(stamp)) / 1000.0  # events tell milliseconds
