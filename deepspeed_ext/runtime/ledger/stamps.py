"""Stamps of the time at which a device is at a place of its work."""

import time
from typing import Any

from deepspeed.accelerator import get_accelerator


class Stamps:
    """Takes stamps, and tells the time between two.

    Accelerators run behind the host, so there stamps are events on their queue, read when the work is over.
    """

    def __init__(self) -> None:
        self._synchronous = get_accelerator().is_synchronized_device()

    def now(self) -> Any:
        """A stamp of this place."""
        if self._synchronous:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device is done with all it was given; stamps can then be read."""
        if not self._synchronous:
            get_accelerator().synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one stamp to another."""
        if self._synchronous:
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000.0  # events tell milliseconds
