"""Positions that tokens attend to: the one count of them, for FLOPs, prices, measured times and balanced token slices.

A token at position x attends to min(x + 1, W) positions in a sliding window of W tokens, itself included, and to x + 1
without one. For the tokens [s, e) these are, with (n)+ for max(n, 0),

    sum of x + 1                (e - s) (e + s + 1) / 2
    less sum of (x + 1 - W)+    (p - q) (p + q + 1) / 2        p = (e - W)+ and q = (s - W)+

Arguments are numbers, or arrays that broadcast; counts of whole numbers below 2^53 are exact.
"""

from typing import Any


def attended_positions(start: Any, end: Any, window: int | None = None) -> Any:
    """Pairs of a token in [start, end) and a position that it attends to.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
    """
    pairs = (end - start) * (end + start + 1) / 2
    if window is None:
        return pairs
    first, last = _above_zero(start - window), _above_zero(end - window)
    return pairs - (last - first) * (last + first + 1) / 2


def positions_in_reach(start: Any, end: Any, window: int | None = None) -> Any:
    """Positions that the tokens [start, end) attend to, together.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
    """
    return end if window is None else end - _above_zero(start + 1 - window)


def _above_zero(number: Any) -> Any:
    return (number + abs(number)) / 2
