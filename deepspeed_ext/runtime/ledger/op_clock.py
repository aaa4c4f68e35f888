"""Measures when each op of a step ran, on this rank."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.timeline import Span
from deepspeed_ext.runtime.ledger.stamps import Stamps


class OpClock:
    """Stamps the start and end of ops, in seconds since the clock was made. An `Observer`."""

    def __init__(self) -> None:
        self._stamps = Stamps()
        self._stamps.wait()
        self._marks: list[tuple[Op, Any, Any]] = []
        self._origin = self._stamps.now()

    def begin(self) -> None:
        """Go on; one clock may measure several batches."""

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Stamp an op."""
        start = self._stamps.now()
        yield
        self._marks.append((op, start, self._stamps.now()))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Let a phase be."""
        return nullcontext()

    def spans(self) -> list[Span]:
        """The ops measured, in order."""
        self._stamps.wait()
        since = partial(self._stamps.seconds, self._origin)
        return [Span(op, since(start), since(end)) for op, start, end in self._marks]
