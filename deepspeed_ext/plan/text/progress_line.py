"""One line on a terminal that says what is being done, how much of it is done, and how long it will still take."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

Progress = Callable[[float], None]
"""Takes the share that is done of some work, from 0 to 1."""

INTERVAL_S = 0.2
"""Seconds between two changes of the line."""

SILENT_S = 1.0
"""Seconds before the line appears: what is done by then needs none."""


def unseen(share: float) -> None:
    """Take the share that is done, and show it to nobody."""


class ProgressLine:
    """A line that is written over again, and gone at the end. Where nobody watches, nothing is written.

    Args:
        stream: where it is shown, if that is a terminal; None = standard error.
        clock: gives the seconds since some moment.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_seen = self._stream is not None and self._stream.isatty()
        self._began = self._shown_at = clock()
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("")

    def part(self, doing: str, first: float = 0.0, last: float = 1.0) -> Progress:
        """Return what takes the progress of a part of the work.

        Args:
            first: share of all work that is done before it.
            last: share of all work that is done after it.
        """
        if not self._is_seen:
            return unseen

        def show(share: float) -> None:
            now = self._clock()
            if now - self._began < SILENT_S or now - self._shown_at < INTERVAL_S:
                return
            self._shown_at = now
            done = first + min(max(share, 0.0), 1.0) * (last - first)
            left = f", about {time_left(now - self._began, done)} left" if done > 0.01 else ""
            self._write(f"{doing}: {done:.0%}{left}")

        return show

    def _write(self, line: str) -> None:
        if line or self._width:
            print(f"\r{line:<{self._width}}", end="" if line else "\r", file=self._stream, flush=True)
            self._width = len(line)


def time_left(elapsed_s: float, done: float) -> str:
    """Return how long it will take from here, in words, if the rest goes as what is done.

    Args:
        elapsed_s: seconds so far.
        done: share that is done, above 0.
    """
    left_s = elapsed_s * (1 - done) / done
    if left_s < 100:
        return f"{left_s:.0f} s"
    return f"{left_s / 60:.0f} min" if left_s < 6000 else f"{left_s / 3600:.1f} h"
