"""Measures how long a rank is in each phase of a step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.runtime.ledger.observers import OPS, PHASES
from deepspeed_ext.runtime.ledger.stamps import Stamps

FORWARD, BACKWARD = "forward-compute", "backward-compute"
"""Parts of the ops: those that go forward, and all others, weight gradients included."""


class PhaseClock:
    """Adds up the seconds of a step, by phase. An `Observer`.

    Args:
        parts: whether to measure forwards and backwards, too.
    """

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
        """Return the seconds since the last call, by name, and start anew."""
        self._stamps.wait()
        seconds = dict.fromkeys(self.names, 0.0)
        for name, start, end in self._marks:
            seconds[name] += self._stamps.seconds(start, end)
        self._marks.clear()
        return seconds
