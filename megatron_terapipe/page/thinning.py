"""Curves of many points, thinned for a picture without losing an extreme."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

Point = tuple[float, float]
"""x and y."""

MOST_BINS = 300
"""Bins of a curve: about one for each pixel of a small chart."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Points of a curve that lie next to each other."""

    x: float
    least: float
    mean: float
    most: float
    num_points: int


def thinned(points: Sequence[Point], most: int = MOST_BINS) -> list[Bin]:
    """Return the bins of a curve, one for each point where there are few; values that are no numbers are left out.

    Args:
        points: in rising order of x.
    """
    finite = [(x, y) for x, y in points if isfinite(y)]
    if not finite:
        return []
    if len(finite) <= most:
        return [Bin(x, y, y, y, 1) for x, y in finite]
    first, width = finite[0][0], (finite[-1][0] - finite[0][0]) / most
    binned: dict[int, list[Point]] = {}
    for x, y in finite:
        # The last point belongs to the last bin.
        binned.setdefault(min(int((x - first) / width), most - 1), []).append((x, y))
    return [_bin(each) for each in binned.values()]


def _bin(points: Sequence[Point]) -> Bin:
    values = [y for _, y in points]
    return Bin((points[0][0] + points[-1][0]) / 2, min(values), fmean(values), max(values), len(points))
