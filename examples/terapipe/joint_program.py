"""TeraPipe's dynamic program: cuts a batch into micro-batches, and each of them into token slices, for gpipe.

TeraPipe (arXiv 2102.07988 sections 3.3 and 3.4) runs all forwards in a wave over P equal stages, then all backwards:

    makespan = sum of all ops of a stage + (P - 1) (longest forward + longest backward)

If no forward may be above one limit and no backward above another, only the sum remains. Then every micro-batch is
best cut on its own, by a dynamic program over its tokens, and a knapsack finds the sizes of micro-batches that fill the
batch. The paper tries many values of a limit that forward and backward share. Here pairs of limits are searched by
branch and bound, which is exact for any times: a box of pairs contains the cuts with maxima in it, and its bound is
the shortest sum under the box's upper corner, plus P - 1 times its lower corner.

It is exact for equal stages and no transfers. Of uneven stages the busiest counts for the sum and the mean of all
others for the waits, so the caller should simulate the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf, nextafter
from typing import NamedTuple

import numpy as np

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.simulate.arrays import Numbers, compiled
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import CutGrid, TokenSliceCosts

MOST_POINTS = 1024
"""Places where a sequence may be cut: each micro-batch size has tables of this squared."""

_Pair = tuple[float, float]
"""One number for forwards and one for backwards."""
_Ends = tuple[int, ...]
"""Numbers of the points at which token slices begin or end."""


@dataclass(frozen=True, slots=True)
class TerapipeCut:
    """A batch in micro-batches and token slices."""

    micro_batches: tuple[tuple[int, TokenSlices], ...]
    """Sequences of each micro-batch and its cut, the largest micro-batch first."""
    makespan: float
    lower_bound: float
    """Makespan that nothing can beat."""


@dataclass(frozen=True, eq=False)
class TerapipeProblem:
    """A batch to be cut, its times tabulated. Make it with `of`."""

    tables: Mapping[int, "_Tables"]
    """Times of token slices, by size of micro-batches."""
    grid: CutGrid
    batch_size: int
    """Sequences that one pipeline trains on in a step."""
    num_waits: int
    """How often the longest ops count: P - 1."""

    @classmethod
    def of(
        cls, costs: Mapping[int, TokenSliceCosts], grid: CutGrid, batch_size: int, num_stages: int, num_waits: int
    ) -> "TerapipeProblem":
        """Tabulate the times of all token slices there can be: tables of [places, places].

        Args:
            costs: times of token slices, by size of micro-batches in sequences.
            batch_size: sequences that one pipeline trains on in a step; with only micro-batches of size 1, their
                number.
            num_waits: P - 1, however many stages `costs` has.
        """
        places = len(grid.points) - 1
        if places > MOST_POINTS:
            raise PlanError(
                f"granularity {grid.granularity} leaves {places} places to cut {grid.seq_length} tokens at: "
                f"give {-(-grid.seq_length // MOST_POINTS)} or more"
            )
        tables = {size: _Tables.of(one, grid, num_stages) for size, one in costs.items()}
        return cls(tables, grid, batch_size, num_waits)

    def solve(
        self, num_token_slices: int | None = None, *, equal_sizes: bool = False, tolerance: float = 1e-3
    ) -> TerapipeCut:
        """Find the micro-batches and token slices with the shortest makespan under gpipe.

        Args:
            num_token_slices: of each micro-batch; None for any number, which needs costs with a fixed part to be a
                small one.
            equal_sizes: whether all micro-batches have one size, as the trainer runs them.
            tolerance: how far the makespan may be above the best, relative; 0 for exact.
        """
        self.grid.check_count(num_token_slices or 1)
        best: _Filling | None = None
        best_makespan, lower_bound = inf, None
        ties = count()
        boxes: list[tuple[float, int, _Pair, _Pair]] = [(0.0, next(ties), (0.0, 0.0), self._highest())]
        while boxes:
            bound, _, low, high = heappop(boxes)
            if bound >= best_makespan * (1 - tolerance) and best is not None:
                lower_bound = min(bound, best_makespan)
                break
            found = self._shortest(num_token_slices or 0, equal_sizes, high)
            if found is None:
                continue
            makespan = found.total + self.num_waits * sum(found.longest)
            if makespan < best_makespan:
                best, best_makespan = found, makespan
            # Nothing in this box with maxima of at least these is better, so one of the maxima must be smaller.
            below = (nextafter(found.longest[0], -inf), nextafter(found.longest[1], -inf))
            forward_smaller = (low, (below[0], high[1]))
            backward_smaller = ((max(low[0], found.longest[0]), low[1]), (high[0], below[1]))
            for box in (forward_smaller, backward_smaller):
                for half in _halves(*box):
                    bound = found.total + self.num_waits * sum(half[0])
                    if bound < best_makespan * (1 - tolerance):
                        heappush(boxes, (bound, next(ties), *half))
        if best is None:
            sizes = ", ".join(map(str, self.tables))
            raise PlanError(f"micro-batches of {sizes} sequences do not fill a batch of {self.batch_size}")
        cuts = {size: self._token_slices(ends) for size, ends in best.ends.items()}
        micro_batches = tuple((size, cuts[size]) for size in best.sizes)
        return TerapipeCut(
            micro_batches, best_makespan, best_makespan * (1 - tolerance) if lower_bound is None else lower_bound
        )

    def _highest(self) -> _Pair:
        """Limits that every token slice is within."""
        forward, backward = (
            max(float(table[np.isfinite(table)].max()) for table in tables)
            for tables in zip(*((one.forward, one.backward) for one in self.tables.values()), strict=True)
        )
        return forward, backward

    def _token_slices(self, ends: _Ends) -> TokenSlices:
        return TokenSlices(tuple(int(length) for length in np.diff(self.grid.points[list(ends)])))

    def _shortest(self, num_token_slices: int, equal_sizes: bool, limits: _Pair) -> "_Filling | None":
        """The shortest sum under limits: a cut for each size, then sizes that fill the batch."""
        totals, cuts = {}, {}
        for size, table in self.tables.items():
            total, ends = _shortest_cut(table, num_token_slices, limits)
            if ends:
                totals[size], cuts[size] = total, ends
        if equal_sizes:
            fillings = [[size] * (self.batch_size // size) for size in totals if self.batch_size % size == 0]
            sizes = min(fillings, key=lambda sizes: totals[sizes[0]] * len(sizes), default=[])
        else:
            sizes = _sizes(totals, self.batch_size)
        if not sizes:
            return None
        forward, backward = (
            max(float(getattr(self.tables[size], name)[cuts[size][:-1], cuts[size][1:]].max()) for size in set(sizes))
            for name in ("forward", "backward")
        )
        return _Filling(sum(totals[size] for size in sizes), (forward, backward), sizes, cuts)


class _Filling(NamedTuple):
    """Micro-batches that fill the batch."""

    total: float
    """Sum of all their ops on the busiest stage."""
    longest: _Pair
    """Their longest forward and longest backward."""
    sizes: list[int]
    """Sequences of each, the largest first."""
    ends: dict[int, _Ends]
    """How each size is cut."""


@dataclass(frozen=True, eq=False, slots=True)
class _Tables:
    """Times of the token slices between points, of one size of micro-batches."""

    times: Numbers
    """[points, points] of all ops of the busiest stage, which add up."""
    forward: Numbers
    """[points, points] of the forward of other stages; infinite where there is no token slice."""
    backward: Numbers
    """[points, points] of their backward."""

    @classmethod
    def of(cls, costs: TokenSliceCosts, grid: CutGrid, num_stages: int) -> "_Tables":
        """Tabulate the times of all possible token slices."""
        points = grid.points
        whole = costs(range(num_stages), points[:1], points[-1:])
        busiest = int(whole.sum(axis=(0, 2)).argmax())
        starts, ends = np.triu_indices(len(points), 1)
        long_enough = points[ends] - points[starts] >= grid.min_length
        starts, ends = starts[long_enough], ends[long_enough]
        values = costs(range(num_stages), points[starts], points[ends])
        others = [stage for stage in range(num_stages) if stage != busiest] or [busiest]
        waits = values[:, others].mean(axis=1)

        def table(entries: Numbers) -> Numbers:
            filled = np.full((len(points), len(points)), np.inf)
            filled[starts, ends] = entries
            return filled

        return cls(table(values[:, busiest].sum(axis=0)), table(waits[0]), table(waits[1] + waits[2]))


def _halves(low: _Pair, high: _Pair) -> list[tuple[_Pair, _Pair]]:
    """Halve a box along its longer side; none if it is empty."""
    if low[0] > high[0] or low[1] > high[1]:
        return []
    middle = (low[0] + high[0]) / 2, (low[1] + high[1]) / 2
    if high[0] - low[0] >= high[1] - low[1]:
        return [(low, (middle[0], high[1])), ((middle[0], low[1]), high)]
    return [(low, (high[0], middle[1])), ((low[0], middle[1]), high)]


def _sizes(totals: Mapping[int, float], batch_size: int) -> list[int]:
    """The sizes, the largest first, that fill the batch in the shortest time; none if they cannot: a knapsack."""
    reached: list[tuple[float, int] | None] = [(0.0, 0)]
    for filled in range(1, batch_size + 1):
        choices = []
        for size, total in totals.items():
            before = reached[filled - size] if size <= filled else None
            if before is not None:
                choices.append((before[0] + total, size))
        reached.append(min(choices, default=None))
    sizes: list[int] = []
    while (left := batch_size - sum(sizes)) and (last := reached[left]) is not None:
        sizes.append(last[1])
    return sorted(sizes, reverse=True) if sum(sizes) == batch_size else []


def _shortest_cut(table: _Tables, num_token_slices: int, limits: _Pair) -> tuple[float, _Ends]:
    """The shortest sum of one micro-batch and the points it is cut at; no points if there is no cut."""
    begins = np.zeros((num_token_slices or 1, len(table.times)), np.int64)
    total = _shortest_sum(table.times, table.forward, table.backward, *limits, not num_token_slices, begins)
    if not np.isfinite(total):
        return total, ()
    ends = [len(table.times) - 1]
    while ends[-1] > 0:
        ends.append(int(begins[-len(ends) if num_token_slices else 0, ends[-1]]))
    return total, tuple(reversed(ends))


@compiled
def _shortest_sum(
    times: Numbers,
    forward: Numbers,
    backward: Numbers,
    most_forward: float,
    most_backward: float,
    any_number: bool,
    begins: Numbers,
) -> float:
    """Shortest sum of times over the cuts of a sequence with no token slice above a limit.

    Args:
        times: [points, points] time of the token slice from a point to a later one.
        forward: [points, points] time under the first limit; infinite = no such token slice.
        backward: [points, points] the same for the second.
        any_number: whether any number of token slices is allowed, or as many as there are rows.
        begins: [rows, points] becomes the point where the token slice that ends at each point begins; one row for any
            number of them.

    Returns:
        The sum; infinite if there is no such cut.
    """
    rows, size = begins.shape
    reached = np.full(size, np.inf)
    reached[0] = 0.0
    for row in range(rows):
        # Any number of token slices continue from points that the same row reached.
        further = reached if any_number else np.full(size, np.inf)
        for start in range(size - 1):
            if not np.isfinite(reached[start]):
                continue
            for end in range(start + 1, size):
                if forward[start, end] <= most_forward and backward[start, end] <= most_backward:
                    total = reached[start] + times[start, end]
                    if total < further[end]:
                        further[end] = total
                        begins[row, end] = start
        reached = further
    return float(reached[size - 1])
