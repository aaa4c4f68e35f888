"""When the host copies of a rank run: one lane to the host and one from it, while the rank goes through its ops.

    place      p        p+1           p+2
    rank       [op p-1  ][op p        ][op p+1 ]         A copy is posted at its place: when all ops before it have
    to host             [=======]                        ended. Copies of one direction run one after the other.
    from host                          [====]

The rank waits twice: to drop, until the copy to the host has ended; and before an op, until what it reads is back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import (
    HostCopy,
    HostCopySettings,
    TimedOpsOfRank,
    copies_by_place,
    plan_host_copies,
)
from deepspeed_ext.plan.programs.program import Content


class TimedCopy(NamedTuple):
    """The way of one thing to the host and back. The device holds it until `dropped`, and from `fetch_start` on."""

    content: Content
    stage: int
    micro_batch: int
    token_slice: int
    offload_start: float
    offload_end: float
    dropped: float
    fetch_start: float
    fetch_end: float


@dataclass(frozen=True, slots=True)
class HostCopyPlan:
    """The copies of all ranks."""

    ranks: tuple[tuple[HostCopy, ...], ...]
    """Per rank its copies, by the place of their fetch."""
    to_host: float = inf
    """Bytes per time from a device to its host."""
    from_host: float = inf
    """Bytes per time back."""

    @classmethod
    def of(cls, spans: TimedOpsOfRank, shape: PipelineShape, settings: HostCopySettings) -> "HostCopyPlan":
        """Plan the copies of all ranks.

        Args:
            spans: ops of any rank on a timeline without copies.
        """
        ranks = (plan_host_copies(spans(rank), shape, settings) for rank in range(shape.num_ranks))
        return cls(tuple(map(tuple, ranks)), settings.to_host, settings.from_host)


class CopyLanes:
    """The lanes of one rank while its ops are simulated, first to last."""

    def __init__(self, copies: Sequence[HostCopy], plan: HostCopyPlan) -> None:
        self._places = copies_by_place(copies)
        self._to_host, self._from_host = plan.to_host, plan.from_host
        self._to_host_free = self._from_host_free = -inf
        self._there: dict[int, float] = {}
        self._offloads: dict[HostCopy, tuple[float, float]] = {}
        self._dropped: dict[HostCopy, float] = {}
        self._fetches: dict[HostCopy, tuple[float, float]] = {}

    def arrive(self, place: int, time: float) -> float:
        """Post what stands at a place.

        Args:
            place: that the rank has come to.

        Returns:
            When the rank goes on: later if a copy to the host has not ended by the time at which it must.
        """
        copied = self._places.get(place)
        if copied is None:
            return time
        for copy in copied.offloaded:
            start = max(time, self._to_host_free)
            self._to_host_free = start + copy.size / self._to_host
            self._offloads[copy] = start, self._to_host_free
        for copy in copied.fetched:
            start = max(time, self._from_host_free)
            self._from_host_free = start + copy.size / self._from_host
            self._fetches[copy] = start, self._from_host_free
            self._there[copy.reader] = self._from_host_free
        for copy in copied.dropped:
            time = max(time, self._offloads[copy][1])
            self._dropped[copy] = time
        return time

    def there(self, number: int) -> float:
        """When all is back that an op waits for, by its number in the order of the rank."""
        return self._there.get(number, -inf)

    def timed(self) -> Iterator[TimedCopy]:
        """Yield the copies that have run, in the order in which they went to the host."""
        for copy, offload in self._offloads.items():
            fetch = self._fetches[copy]
            yield TimedCopy(*copy[:4], *offload, self._dropped[copy], *fetch)
