"""Branch and bound over two maxima: the part of TeraPipe's program that does not depend on what is cut.

What shall be small is a sum plus `num_waits` times the largest forward and the largest backward. Once both maxima have
limits, the sum alone is left, and a caller's dynamic program finds the smallest. TeraPipe (arXiv 2102.07988 section
3.3, equation 6) tries one limit after the other for forward and backward together; here boxes of pairs of limits are
cut in halves, the most promising first, which is exact for any times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf, nextafter
from typing import Generic, TypeVar

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
