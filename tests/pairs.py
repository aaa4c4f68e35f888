"""A few setups of a long list that hold every pair of values which the whole list holds.

Most faults in how parts work together show as soon as two of them meet (D. R. Kuhn, D. R. Wallace and A. M. Gallo,
"Software fault interactions and implications for software testing", IEEE TSE 30(6), 2004). So a commit is tested on
setups that bring every two values together, and `make test-all` runs all setups.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Axes = Mapping[str, Hashable]
"""The value that a setup has on each axis."""


def pairs_of(axes: Axes) -> set[tuple[tuple[str, Hashable], tuple[str, Hashable]]]:
    """Every two axes of a setup, with their values.

    Args:
        axes: the setup's value on each axis.
    """
    return set(combinations(sorted(axes.items(), key=lambda item: item[0]), 2))


def covering_pairs(table: Sequence[Axes]) -> list[int]:
    """Indices of the setups of `table` that are enough to hold every pair of values in it, first to last.

    Greedy: the setup with the most pairs that no other has yet, until none are left; of equals the first. A setup whose
    pairs the others turn out to hold is dropped again.

    Args:
        table: each setup's value on each axis.
    """
    pairs = [pairs_of(axes) for axes in table]
    left = set().union(*pairs)
    chosen: list[int] = []
    while left:
        best = max(range(len(table)), key=lambda index: len(pairs[index] & left))
        chosen.append(best)
        left -= pairs[best]
    for index in list(chosen):
        others = set().union(*(pairs[other] for other in chosen if other != index))
        if pairs[index] <= others:
            chosen.remove(index)
    return sorted(chosen)
