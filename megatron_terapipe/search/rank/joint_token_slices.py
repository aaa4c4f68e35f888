"""TeraPipe's joint program: how to cut a batch into micro-batches, and each of them into token slices, for gpipe.

TeraPipe (arXiv 2102.07988 sections 3.3 and 3.4) runs all forwards in a wave over P equal stages, then all backwards:

    time = sum of all ops of a stage + (P - 1) (longest forward + longest backward)

With limits for the two longest, every micro-batch is best cut on its own, by a dynamic program over its tokens; which
sizes of micro-batches fill the batch is a knapsack. `limits` searches the limits. Exact for equal stages; of uneven
ones the busiest counts for the sum and the mean of all others for the waits, which the caller should simulate.

Unlike TeraPipe's own program this holds for any op times: nothing is fitted, forwards and backwards have limits of
their own (their maxima may fall on different token slices), and transfers of a micro-batch are those of its size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf, nextafter
from typing import Generic, TypeVar

import numpy as np

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.optimise.problem import Numbers
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.grid import Grid
from deepspeed_ext.plan.solve.token_slice_costs import TokenSliceCosts

# Branch and bound over two maxima: the part of TeraPipe's program that does not depend on what is cut.
#
# What shall be small is a sum plus `num_waits` times the largest forward and the largest backward. Once both maxima
# have
# limits, the sum alone is left, and a caller's dynamic program finds the smallest. TeraPipe (arXiv 2102.07988 section
# 3.3, equation 6) tries one limit after the other for forward and backward together; here boxes of pairs of limits are
# cut in halves, the most promising first, which is exact for any times.
#

_Found = TypeVar("_Found")
Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Shortest(Generic[_Found]):
    """What a dynamic program found under limits.

    Attributes:
        total: the smallest sum.
        maxima: largest forward and largest backward of what has it.
        found: what has it.
    """

    total: float
    maxima: Pair
    found: _Found


@dataclass(frozen=True, slots=True)
class Least(Generic[_Found]):
    """The answer.

    Attributes:
        value: sum plus waits.
        bound: that nothing is below.
        found: what has the value.
    """

    value: float
    bound: float
    found: _Found


def least_of_limits(
    shortest: Callable[[Pair], Shortest[_Found] | None], highest: Pair, num_waits: float, tolerance: float
) -> Least[_Found] | None:
    """Find the least sum plus waits.

    Args:
        shortest: smallest sum whose maxima are within limits; None if nothing is.
        highest: limits that everything is within.
        num_waits: how often the maxima count.
        tolerance: how far the value may be above the least, relative; 0 for exact.

    Returns:
        The best; None if there is nothing at all.
    """
    best: Least[_Found] | None = None
    ties = count()
    boxes: list[tuple[float, int, Pair, Pair]] = [(0.0, next(ties), (0.0, 0.0), highest)]
    while boxes:
        bound, _, low, high = heappop(boxes)
        if best is not None and bound >= best.value * (1 - tolerance):
            return Least(best.value, min(bound, best.value), best.found)
        found = shortest(high)
        if found is None:
            continue
        value = found.total + num_waits * sum(found.maxima)
        if best is None or value < best.value:
            best = Least(value, value, found.found)
        # Nothing in this box with maxima of at least these is better, so one of the maxima must be smaller.
        below = (nextafter(found.maxima[0], -inf), nextafter(found.maxima[1], -inf))
        forward_smaller = (low, (below[0], high[1]))
        backward_smaller = ((max(low[0], found.maxima[0]), low[1]), (high[0], below[1]))
        for box in (forward_smaller, backward_smaller):
            for half in _halves(*box):
                bound = found.total + num_waits * sum(half[0])
                if bound < best.value * (1 - tolerance):
                    heappush(boxes, (bound, next(ties), *half))
    if best is None:
        return None
    return Least(best.value, best.value * (1 - tolerance), best.found)


def _halves(low: Pair, high: Pair) -> list[tuple[Pair, Pair]]:
    """Halve a box along its longer side; none if it is empty."""
    if low[0] > high[0] or low[1] > high[1]:
        return []
    if high[0] - low[0] >= high[1] - low[1]:
        middle = (low[0] + high[0]) / 2
        return [(low, (middle, high[1])), ((middle, low[1]), high)]
    middle = (low[1] + high[1]) / 2
    return [(low, (high[0], middle)), ((low[0], middle), high)]


MOST_POINTS = 1024
"""Places where a sequence may be cut: each micro-batch size has tables of this squared."""

MicroBatch = tuple[int, TokenSlices]
"""Sequences that go through the pipeline together, and how they are cut."""


@dataclass(frozen=True, slots=True)
class JointCut:
    """A batch in micro-batches and token slices.

    Attributes:
        micro_batches: size and cut of each, the largest first.
        time_s: of the formula above.
        lower_bound_s: time that no other has.
    """

    micro_batches: tuple[MicroBatch, ...]
    time_s: float
    lower_bound_s: float


def solve_joint(
    costs_of_size: Callable[[int], TokenSliceCosts],
    seq_length: int,
    batch_size: int,
    *,
    num_stages: int,
    sizes: Sequence[int] | None = None,
    equal_sizes: bool = False,
    num_token_slices: int | None = None,
    granularity: int = 8,
    min_length: int = 1,
    tolerance: float = 1e-3,
) -> JointCut:
    """Cut a batch.

    Args:
        costs_of_size: times of token slices of micro-batches of a size, in seconds.
        seq_length: tokens of a sequence.
        batch_size: sequences that one pipeline trains on in a step.
        num_stages: P.
        sizes: of micro-batches to try; None = all that divide the batch.
        equal_sizes: whether all micro-batches have one size, as the trainer runs them.
        num_token_slices: how many; None = any number.
        granularity: token slices are multiples of this. TeraPipe cuts at multiples of 8.
        min_length: tokens of a token slice at least.
        tolerance: how far the time may be above the best, relative; 0 for exact.

    Raises:
        PlanError: if the token slices cannot be that long, the sizes cannot fill the batch, or there are too many
            places to cut at.
    """
    grid = Grid(seq_length, granularity, min_length)
    wanted = [size for size in range(1, batch_size + 1) if batch_size % size == 0] if sizes is None else sorted(sizes)
    problem = JointProblem.of(
        {size: costs_of_size(size) for size in wanted}, grid, batch_size, num_stages, num_stages - 1
    )
    return problem.solve(num_token_slices, equal_sizes=equal_sizes, tolerance=tolerance)


@dataclass(frozen=True, eq=False)
class JointProblem:
    """A batch to be cut, its times tabulated. Make it with `of`.

    Attributes:
        tables: by size of micro-batches.
        grid: where token slices may begin and end.
        batch_size: sequences that one pipeline trains on in a step.
        num_waits: how often the longest ops count: P - 1.
    """

    tables: Mapping[int, "_Tables"]
    grid: Grid
    batch_size: int
    num_waits: int

    @classmethod
    def of(
        cls, costs: Mapping[int, TokenSliceCosts], grid: Grid, batch_size: int, num_stages: int, num_waits: int
    ) -> "JointProblem":
        """Ask for the times of all token slices there can be.

        Args:
            costs: times of token slices by size of micro-batches, in seconds.
            grid: where token slices may begin and end.
            batch_size: sequences that one pipeline trains on in a step.
            num_stages: stages that `costs` knows.
            num_waits: P - 1, however many of the stages `costs` tells apart.

        Raises:
            PlanError: if there are too many places to cut at.
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
    ) -> JointCut:
        """Cut the batch; see `solve_joint`.

        Raises:
            PlanError: if so many token slices do not fit, or the sizes cannot fill the batch.
        """
        self.grid.check_count(num_token_slices or 1)
        highest = [
            max(float(table[np.isfinite(table)].max()) for table in each)
            for each in zip(*((one.forward, one.backward) for one in self.tables.values()), strict=True)
        ]
        search = partial(_shortest, self.tables, self.batch_size, equal_sizes, num_token_slices or 0)
        least = least_of_limits(search, (highest[0], highest[1]), self.num_waits, tolerance)
        if least is None:
            sizes = ", ".join(map(str, self.tables))
            raise PlanError(f"micro-batches of {sizes} sequences do not fill a batch of {self.batch_size}")
        points = self.grid.points
        micro_batches = tuple(
            (size, TokenSlices(tuple(int(length) for length in np.diff(points[list(ends)]))))
            for size, ends in least.found
        )
        return JointCut(micro_batches, least.value, least.bound)

    def time_s(self, size: int, cut: TokenSlices) -> float:
        """The formula above for a batch of micro-batches of one size, all cut alike at points of the grid."""
        bounds = np.searchsorted(self.grid.points, [0, *np.cumsum(cut.lengths)])
        table, between = self.tables[size], (bounds[:-1], bounds[1:])
        total = float(table.times[between].sum()) * (self.batch_size // size)
        return total + self.num_waits * float(table.forward[between].max() + table.backward[between].max())


@dataclass(frozen=True, eq=False, slots=True)
class _Tables:
    """Times of the token slices between points, of one size of micro-batches.

    Attributes:
        times: [points, points] of all ops of the busiest stage, which add up.
        forward: [points, points] of the forward of other stages; infinite where there is no token slice.
        backward: [points, points] of their backward.
    """

    times: Numbers
    forward: Numbers
    backward: Numbers

    @classmethod
    def of(cls, costs: TokenSliceCosts, grid: Grid, num_stages: int) -> "_Tables":
        """Ask for the times of all token slices there can be."""
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


_Ends = tuple[int, ...]


def _shortest(
    tables: Mapping[int, _Tables], batch_size: int, equal_sizes: bool, num_token_slices: int, limits: Pair
) -> Shortest[tuple[tuple[int, _Ends], ...]] | None:
    """The shortest sum under limits: a cut for each size, then sizes that fill the batch."""
    cuts = {}
    for size, table in tables.items():
        total, ends = _shortest_cut(table, num_token_slices, limits)
        if ends:
            cuts[size] = total, ends
    filling = _equal_fill(cuts, batch_size) if equal_sizes else _fill(cuts, batch_size)
    if not filling:
        return None
    maxima = [
        max(float(getattr(tables[size], name)[cuts[size][1][:-1], cuts[size][1][1:]].max()) for size in set(filling))
        for name in ("forward", "backward")
    ]
    total = sum(cuts[size][0] for size in filling)
    return Shortest(total, (maxima[0], maxima[1]), tuple((size, cuts[size][1]) for size in filling))


def _shortest_cut(table: _Tables, num_token_slices: int, limits: Pair) -> tuple[float, _Ends]:
    """The shortest sum of one micro-batch and the points it is cut at; no points if there is no cut."""
    from megatron_terapipe.search.rank.joint_kernel import shortest_cut

    begins = np.zeros((num_token_slices or 1, len(table.times)), np.int64)
    total = shortest_cut(table.times, table.forward, table.backward, *limits, not num_token_slices, begins)
    if not np.isfinite(total):
        return total, ()
    ends = [len(table.times) - 1]
    while ends[-1] > 0:
        ends.append(int(begins[-len(ends) if num_token_slices else 0, ends[-1]]))
    return total, tuple(reversed(ends))


_Cuts = dict[int, tuple[float, _Ends]]


def _equal_fill(cuts: _Cuts, batch_size: int) -> list[int]:
    """The one size that fills the batch best, as often as it takes; none if there is none."""
    fitting = [size for size in cuts if batch_size % size == 0]
    best = min(fitting, key=lambda size: cuts[size][0] * (batch_size // size), default=None)
    return [] if best is None else [best] * (batch_size // best)


def _fill(cuts: _Cuts, batch_size: int) -> list[int]:
    """The sizes, the largest first, that fill the batch in the shortest time; none if they cannot: a knapsack."""
    reached: list[tuple[float, int] | None] = [(0.0, 0)]
    for filled in range(1, batch_size + 1):
        choices = []
        for size, (total, _) in cuts.items():
            before = reached[filled - size] if size <= filled else None
            if before is not None:
                choices.append((before[0] + total, size))
        reached.append(min(choices, default=None))
    sizes: list[int] = []
    while (left := batch_size - sum(sizes)) and (last := reached[left]) is not None:
        sizes.append(last[1])
    return sorted(sizes, reverse=True) if sum(sizes) == batch_size else []
