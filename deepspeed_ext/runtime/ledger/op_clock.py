"""Measures when each op of a step ran on this rank, and each copy between its device and the host."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.programs.copy_lanes import TimedCopy
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.timeline import Span
from deepspeed_ext.runtime.ledger.stamps import Stamps


class OpClock:
    """Stamps the start and end of ops, in seconds since the clock was made. An `Observer`."""

    def __init__(self) -> None:
        self.stamps = Stamps()
        self.stamps.wait()
        self._marks: list[tuple[Op, Any, Any]] = []
        self._copies: list[tuple[tuple[Content, int, int, int], list[Any]]] = []
        self._origin = self.stamps.now()

    def begin(self) -> None:
        """Go on; one clock may measure several batches."""

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Stamp an op."""
        start = self.stamps.now()
        yield
        self._marks.append((op, start, self.stamps.now()))

    def copied(self, what: tuple[Content, int, int, int], stamps: Sequence[Any]) -> None:
        """Take the stamps of a copy that is back.

        Args:
            what: what was copied: its content, stage, micro-batch and token slice.
            stamps: begin and end of the copy to the host, the drop, begin and end of the copy back; less where the copy
                began before anybody measured.
        """
        if len(stamps) == _STAMPS_OF_COPY:
            self._copies.append((what, list(stamps)))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Let a phase be."""
        return nullcontext()

    def spans(self) -> list[Span]:
        """The ops measured, in order."""
        self.stamps.wait()
        since = partial(self.stamps.seconds, self._origin)
        return [Span(op, since(start), since(end)) for op, start, end in self._marks]

    def host_copies(self) -> list[TimedCopy]:
        """The copies measured, by the start of the copy to the host."""
        self.stamps.wait()
        # Stamps of two streams may differ by their resolution.
        timed = (
            TimedCopy(*what, *accumulate((self.stamps.seconds(self._origin, each) for each in stamps), max))
            for what, stamps in self._copies
        )
        return sorted(timed, key=lambda copy: copy.offload_start)


_STAMPS_OF_COPY = 5
