"""Plans host copies, as `programs.host_copies` describes them, by the numbers of a timeline without them.

    ops of a rank with their times --long pauses--> copies --room of the host--> fewer --in time--> CopyColumns

The trainer, the plan command and the search plan copies by this one function. It goes through the copies of a lane one
after the other only for the times at which they end: each depends on the one before.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopy, HostCopySettings, TimedCopy
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.simulate.arrays import BACKWARD, FORWARD, INPUT_GRADIENT, NOTHING, Numbers, OpColumns
from deepspeed_ext.plan.timeline import Span

AHEAD = 1
"""Ops by which a fetch is posted ahead of the op that reads, at least, since real times differ from the timeline."""


class TimedColumns(NamedTuple):
    """The ops of one rank with their start and end, in columns; [N] each."""

    order: OpColumns
    starts: Numbers
    ends: Numbers

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "TimedColumns":
        """The columns of some ops."""
        ops, starts, ends = zip(*spans, strict=True) if spans else ((), (), ())
        return cls(OpColumns.of(ops), np.array(starts, np.float64), np.array(ends, np.float64))


class CopyColumns(NamedTuple):
    """Host copies of one rank in columns, as `HostCopy` has them; [C] each."""

    content: Numbers
    """Number of its content, in the order of `Content`."""
    stage: Numbers
    micro_batch: Numbers
    token_slice: Numbers
    size: Numbers
    offload: Numbers
    drop: Numbers
    fetch: Numbers
    reader: Numbers

    def of(self, content: Content) -> "CopyColumns":
        """Return the copies with a content."""
        return self.at(self.content == tuple(Content).index(content))

    def at(self, places: Numbers) -> "CopyColumns":
        """Return some of the copies."""
        return CopyColumns(*(column[places] for column in self))

    def copies(self) -> list[HostCopy]:
        """Return the copies, one by one."""
        content, *others = (column.tolist() for column in self)
        return list(map(HostCopy, map(tuple(Content).__getitem__, content), *others))


@dataclass(frozen=True, slots=True, eq=False)
class HostCopyPlan:
    """The copies of all ranks."""

    ranks: tuple[CopyColumns, ...]
    """Per rank its copies, by the place of their fetch."""
    to_host: float = inf
    """Bytes per time from a device to its host."""
    from_host: float = inf
    """Bytes per time back."""

    @classmethod
    def of(cls, ranks: Iterable[TimedColumns], shape: PipelineShape, settings: HostCopySettings) -> "HostCopyPlan":
        """Plan the copies of all ranks."""
        planned = tuple(plan_host_copies(timed, shape, settings) for timed in ranks)
        return cls(planned, settings.to_host, settings.from_host)

    @property
    def joined(self) -> CopyColumns:
        """The copies of all ranks, one rank after the other."""
        return CopyColumns(*map(np.concatenate, zip(*self.ranks, strict=True)))


def plan_host_copies(timed: TimedColumns, shape: PipelineShape, settings: HostCopySettings) -> CopyColumns:
    """Return the copies of one rank, by the place of their fetch, in the order in which fetches are posted.

    Args:
        timed: the rank's ops on a timeline without copies.
    """
    copies = _in_long_pauses(timed, shape, settings)
    copies = copies.at(_with_room(copies, settings.host_bytes))
    drops = _drops(copies, timed, settings)
    fetched, places = _fetches(copies._replace(drop=drops), timed, settings)
    if len(fetched) < len(drops):
        # Without those that would not be back in time, the others are on the host earlier or at the same time.
        there = np.sort(fetched)
        drops[there] = _drops(copies.at(there), timed, settings)
    return copies._replace(drop=drops).at(fetched)._replace(fetch=places)


@lru_cache(maxsize=8)
def _tensors(shape: PipelineShape, settings: HostCopySettings) -> tuple[Numbers, Numbers]:
    """[stages, token slices, contents] bytes of each tensor, and the last token slice that reads it."""
    settings = settings.fitting(shape)
    tensors = list(product(range(shape.num_stages), range(shape.num_token_slices), Content))
    size, reader = (
        np.array([of(content, stage, token_slice) for stage, token_slice, content in tensors])
        for of in (settings.size, settings.last_reader)
    )
    extents = shape.num_stages, shape.num_token_slices, len(Content)
    return size.reshape(extents), reader.reshape(extents)


def _in_long_pauses(timed: TimedColumns, shape: PipelineShape, settings: HostCopySettings) -> CopyColumns:
    """Copies of tensors whose pause is longer than a copy to the host and one back, in the order of their offloads.

    They are dropped right after the last forward that reads them, and fetched right before the first backward.
    """
    order, starts, ends = timed
    sizes, readers = _tensors(shape, settings)
    written = np.flatnonzero(order.kind == FORWARD)
    turned = np.flatnonzero((order.kind == INPUT_GRADIENT) | (order.kind == BACKWARD))
    forwards, backwards = np.full((2, shape.num_stages, shape.num_micro_batches, shape.num_token_slices), NOTHING)
    for table, ops in ((forwards, written), (backwards, turned)):
        table[tuple(column[ops] for column in order[1:])] = ops
    # [forwards, contents]
    stage, micro_batch, token_slice = (column[written, None] for column in order[1:])
    content = np.arange(len(Content))
    size, last = (table[stage, token_slice, content] for table in (sizes, readers))
    before, after = (table[stage, micro_batch, last] for table in (forwards, backwards))
    is_long = starts[after] - ends[before] > size / settings.to_host + size / settings.from_host
    columns = content, stage, micro_batch, token_slice, size, written[:, None] + 1, before + 1, after, after
    found = (size > 0) & (after != NOTHING) & is_long
    return CopyColumns(*(column[found] for column in np.broadcast_arrays(*columns)))


def _with_room(copies: CopyColumns, most: float) -> Numbers:
    """Places of copies that the host has room for: of those there at a time, the one that is read first is left out."""
    by_reader = np.argsort(copies.reader)
    gone = np.concatenate([[0.0], np.cumsum(copies.size[by_reader])])
    on_host = np.cumsum(copies.size) - gone[np.searchsorted(copies.reader[by_reader], copies.offload)]
    if on_host.max(initial=0.0) < most * (1 - ROUNDING):
        return np.arange(len(copies.size))
    left_out: set[int] = set()
    there: list[tuple[int, int]] = []
    held = 0.0
    reader, offload, size = (column.tolist() for column in (copies.reader, copies.offload, copies.size))
    for place in range(len(size)):
        while there and there[0][0] < offload[place]:
            held -= size[heappop(there)[1]]
        heappush(there, (reader[place], place))
        held += size[place]
        while held > most:
            first = heappop(there)[1]
            held -= size[first]
            left_out.add(first)
    return np.array([place for place in range(len(size)) if place not in left_out], np.int64)


ROUNDING = 1e-9
"""Relative difference of two sums of the same sizes in another order, at most."""


def _drops(copies: CopyColumns, timed: TimedColumns, settings: HostCopySettings) -> Numbers:
    """First place at which the rank need not wait to drop each: its copy ends before the next op starts."""
    free, copied = -inf, []
    times = copies.size / settings.to_host
    for end, time in zip(timed.ends[copies.offload - 1].tolist(), times.tolist(), strict=True):
        free = (end if end > free else free) + time
        copied.append(free)
    return np.maximum(copies.drop, np.searchsorted(timed.starts, copied))


def _fetches(copies: CopyColumns, timed: TimedColumns, settings: HostCopySettings) -> tuple[Numbers, Numbers]:
    """Copies that are back in time, in the order of their fetches, and the last place from which each is.

    Placed from the last to the first: each must end before its reader starts, and before the next copy does.
    """
    backwards = np.lexsort((-copies.offload, -copies.reader))
    copies = copies.at(backwards)
    latest = copies.reader - AHEAD
    # A copy back starts behind the op at the place of the drop, and so is posted behind this place.
    dropped = np.where(copies.drop < latest, timed.ends[np.minimum(copies.drop, latest)], inf)
    times = copies.size / settings.from_host
    next_start, starts, placed = inf, [], []
    columns = (timed.starts[copies.reader], times, dropped)
    for place, (needed, time, earliest) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        start = (needed if needed < next_start else next_start) - time
        if start >= earliest:
            next_start = start
            starts.append(start)
            placed.append(place)
    first_to_last = np.array(placed, np.int64)[::-1]
    places = np.minimum(np.searchsorted(timed.ends, starts[::-1], side="right"), latest[first_to_last])
    return backwards[first_to_last], places


OFFLOADED, FETCHED, DROPPED = range(3)
"""Events of a host copy at a place, and the rows of their times."""


class CopyEvents(NamedTuple):
    """Host copies as the loop reads them. Copies are numbered rank by rank, ops of N by their places in the rows."""

    posts: Numbers
    """[N + 1] first index in `posted` of the copies with a place after each op."""
    posted: Numbers
    """[events] number of a copy, times 3, plus its event."""
    copying: Numbers
    """[2 * C] times of C copies to the host, then of those from it; empty without copies."""
    back: Numbers
    """[N] the copy that an op waits for; -1 if none."""

    @classmethod
    def of(cls, plan: HostCopyPlan, width: int) -> "CopyEvents":
        """Number the copies of a plan, for rows of a width."""
        content, *_, size, offload, drop, fetch, reader = plan.joined
        first = np.repeat(np.arange(len(plan.ranks)) * width, [len(copies.size) for copies in plan.ranks])
        number = np.arange(len(size))
        back = np.full(len(plan.ranks) * width, NOTHING, np.int64)
        # Of an op the last one, since they are back in this order.
        np.maximum.at(back, first + reader, number)
        # By op, then by event, then in the order in which copies are posted.
        op = np.concatenate([first + each - 1 for each in (offload, fetch, drop)])
        event = np.repeat([OFFLOADED, FETCHED, DROPPED], len(number))
        order = np.lexsort((np.concatenate([content, np.zeros(2 * len(number))]), event, op))
        return cls(
            np.concatenate([[0], np.cumsum(np.bincount(op, minlength=len(back)))]),
            (3 * np.tile(number, 3) + event)[order],
            np.concatenate([size / speed for speed in (plan.to_host, plan.from_host)]),
            back,
        )

    def timed(self, plan: HostCopyPlan, copied: Numbers) -> Iterator[TimedCopy]:
        """Yield the copies that have run, by rank and start, from their times [3 * copies]."""
        to_host, from_host = self.copying.reshape(2, -1)
        offloaded, fetched, dropped = copied.reshape(3, -1)
        rank = np.repeat(np.arange(len(plan.ranks)), [len(copies.size) for copies in plan.ranks])
        copies = plan.joined
        order = np.lexsort((copies.content, copies.offload, rank))
        times = (offloaded, offloaded + to_host, dropped, fetched, fetched + from_host)
        for copy, *of_copy in zip(copies.at(order).copies(), *(each[order].tolist() for each in times), strict=True):
            yield TimedCopy(*copy[:4], *of_copy)


NO_COPIES = CopyEvents(*(np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.float64, np.int64)))
