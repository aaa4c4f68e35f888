"""TeraPipe's token slices: exact for gpipe, by dynamic programming (arXiv 2102.07988 section 3.3).

With equal stages and no transfers, gpipe runs all forwards in a wave over the P stages, then all backwards:

    makespan = M sum(F_j) + (P - 1) max(F_j) + M sum(B_j) + (P - 1) max(B_j)

for M micro-batches of one cut, with B = BI + BW. If no F may be above f and no B above b, the sums alone are left, and
the shortest sum over cuts of the first n tokens is found from those of fewer tokens. What limits to try? The paper
tries many values of a maximum that F and B share. Here pairs (f, b) are searched by branch and bound, which is exact
for any costs. A box of pairs holds the cuts whose maxima are in it; its bound is the shortest sum under the box's
upper corner, plus P - 1 times its lower corner.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise

import numpy as np

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.optimise.kernel import kernel
from deepspeed_ext.plan.optimise.problem import Numbers
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.grid import Grid
from deepspeed_ext.plan.solve.token_slice_costs import TokenSliceCosts

MOST_POINTS = 4096
"""Points where a sequence may be cut: tables have this squared."""


@dataclass(frozen=True)
class TerapipeCut:
    """A cut and its makespan under gpipe.

    Attributes:
        cut: the token slices.
        makespan: of the formula above.
        lower_bound: makespan that no cut can beat.
    """

    cut: TokenSlices
    makespan: float
    lower_bound: float


def solve_terapipe(
    token_slice_costs: TokenSliceCosts,
    seq_length: int,
    *,
    num_stages: int,
    num_micro_batches: int = 1,
    num_token_slices: int | None = None,
    granularity: int = 1,
    min_length: int = 1,
    tolerance: float = 1e-3,
) -> TerapipeCut:
    """Find the cut with the shortest makespan under gpipe.

    Args:
        token_slice_costs: times of token slices; of uneven stages the slowest counts, as if all were like it.
        seq_length: tokens of the sequence.
        num_stages: P.
        num_micro_batches: M.
        num_token_slices: how many; None for any number, which needs costs with a fixed part to be a small one.
        granularity: cuts are at multiples of this.
        min_length: tokens that each token slice has at least.
        tolerance: how far the makespan may be above the best, relative; 0 for exact.

    Raises:
        PlanError: if the token slices cannot all be that long, or there are too many places to cut at.
    """
    grid = Grid(seq_length, granularity, min_length)
    grid.check_count(num_token_slices or 1)
    points = grid.points
    if len(points) - 1 > MOST_POINTS:
        raise PlanError(
            f"granularity {granularity} leaves {len(points) - 1} places to cut {seq_length} tokens at: "
            f"give {-(-seq_length // MOST_POINTS)} or more"
        )
    forward, backward = _tables(token_slice_costs, points, num_stages, min_length)
    search = _Search(forward, backward, num_stages - 1, num_micro_batches, num_token_slices or 0)
    makespan, ends, bound = search.run(tolerance)
    return TerapipeCut(TokenSlices(tuple(int(length) for length in np.diff(points[ends]))), makespan, bound)


def _tables(
    token_slice_costs: TokenSliceCosts, points: Numbers, num_stages: int, min_length: int
) -> tuple[Numbers, Numbers]:
    """[points, points] times of F and of B from each point to each later one; infinite where that is too short."""
    whole = token_slice_costs(range(num_stages), points[:1], points[-1:])
    slowest = int(whole.sum(axis=(0, 2)).argmax())
    starts, ends = np.meshgrid(points, points, indexing="ij")
    times = token_slice_costs([slowest], starts, ends)[:, 0]
    too_short = ends - starts < min_length
    forward, backward = times[0], times[1] + times[2]
    forward[too_short] = np.inf
    backward[too_short] = np.inf
    return forward, backward


@dataclass(frozen=True, eq=False)
class _Search:
    """Branch and bound over pairs of limits."""

    forward: Numbers
    backward: Numbers
    num_waits: int
    num_micro_batches: int
    num_token_slices: int

    def run(self, tolerance: float) -> tuple[float, Numbers, float]:
        """Makespan, the points cut at, and the bound."""
        best, best_ends = np.inf, np.zeros(0, np.int64)
        ties = count()
        highest = [float(table[np.isfinite(table)].max()) for table in (self.forward, self.backward)]
        boxes = [(0.0, next(ties), (0.0, 0.0), (highest[0], highest[1]))]
        while boxes:
            bound, _, low, high = boxes[0]
            if bound >= best * (1 - tolerance):
                return best, best_ends, min(bound, best)
            heappop(boxes)
            total, ends = self._shortest_sum(*high)
            if not len(ends):
                continue
            most = tuple(
                max(float(table[start, end]) for start, end in pairwise(ends.tolist()))
                for table in (self.forward, self.backward)
            )
            makespan = total + self.num_waits * sum(most)
            if makespan < best:
                best, best_ends = makespan, ends
            # No cut in this box with maxima of at least these is better, so one of the maxima must be smaller.
            below = (np.nextafter(most[0], 0), np.nextafter(most[1], 0))
            for box in (
                (low, (below[0], high[1])),
                ((max(low[0], most[0]), low[1]), (high[0], below[1])),
            ):
                for half in _halves(*box):
                    bound = total + self.num_waits * sum(half[0])
                    if bound < best * (1 - tolerance):
                        heappush(boxes, (bound, next(ties), *half))
        return best, best_ends, best * (1 - tolerance)

    def _shortest_sum(self, most_forward: float, most_backward: float) -> tuple[float, Numbers]:
        """The shortest sum under limits, and the points to cut at; no points if there is no cut."""
        size = len(self.forward)
        previous = np.zeros((self.num_token_slices or 1, size), np.int64)
        reached = np.full(size, np.inf)
        reached[0] = 0.0
        for begins in previous:
            # Any number of token slices go on from points that this very row reached.
            further = np.full(size, np.inf) if self.num_token_slices else reached
            _extend(self.forward, self.backward, most_forward, most_backward, reached, further, begins)
            reached = further
        total = float(reached[-1])
        if not np.isfinite(total):
            return total, np.zeros(0, np.int64)
        ends = [size - 1]
        while ends[-1] > 0:
            row = self.num_token_slices - len(ends) if self.num_token_slices else 0
            ends.append(int(previous[row, ends[-1]]))
        return total * self.num_micro_batches, np.array(ends[::-1])


_Pair = tuple[float, float]


def _halves(low: _Pair, high: _Pair) -> list[tuple[_Pair, _Pair]]:
    """Halve a box along its longer side; none if it is empty."""
    if low[0] > high[0] or low[1] > high[1]:
        return []
    if high[0] - low[0] >= high[1] - low[1]:
        middle = (low[0] + high[0]) / 2
        return [(low, (middle, high[1])), ((middle, low[1]), high)]
    middle = (low[1] + high[1]) / 2
    return [(low, (high[0], middle)), ((low[0], middle), high)]


@kernel
def _extend(
    forward: Numbers,
    backward: Numbers,
    most_forward: float,
    most_backward: float,
    reached: Numbers,
    further: Numbers,
    previous: Numbers,
) -> None:
    """Add one token slice within the limits to the shortest sums that reach each point.

    Args:
        forward: times of the token slice from a point to another.
        backward: the same.
        most_forward: limit of the first.
        most_backward: limit of the second.
        reached: sum up to each point; infinite where none leads.
        further: the same with the token slice; brought up to date. May be `reached`.
        previous: where that token slice begins; brought up to date.
    """
    size = len(forward)
    for start in range(size - 1):
        if not np.isfinite(reached[start]):
            continue
        for end in range(start + 1, size):
            if forward[start, end] <= most_forward and backward[start, end] <= most_backward:
                total = reached[start] + forward[start, end] + backward[start, end]
                if total < further[end]:
                    further[end] = total
                    previous[end] = start
