"""The classes of links that ranks on nodes have: who sends to whom, and who does so at the same time.

inside a node       all ranks of a node             0 1 2 3 | 4 5 6 7        nodes do not disturb each other
between nodes       one rank of each node           0 . . . - 4 . . .        alone on the cards of its node
                    each rank with its like         0-4 1-5 2-6 3-7          flows that share the cards
                    all ranks                       0 1 2 3 - 4 5 6 7
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

Nodes = Sequence[Sequence[int]]
"""Ranks of each node."""


class LinkClass(NamedTuple):
    """Groups of ranks that all send at the same time."""

    where: Literal["inside", "network"]
    """`inside` a node, or over its `network`."""
    what: Literal["all_reduce", "transfer"]
    """`all_reduce` in each group, or `transfer` from its first to its second rank and back."""
    groups: tuple[tuple[int, ...], ...]
    ranks_per_node: int = 1
    """Ranks of a group that one node has."""
    flows: int = 1
    """Groups that use the links of a node at the same time."""

    @property
    def words(self) -> str:
        """What is measured, for people."""
        place = "inside a node" if self.where == "inside" else "between nodes"
        if self.what == "transfer":
            return f"messages {place}" + (f", {self.flows} at a time" if self.flows > 1 else "")
        if self.where == "inside":
            return f"all-reduces of the {len(self.groups[0])} ranks of a node"
        if self.ranks_per_node > 1:
            return f"all-reduces of all {len(self.groups[0])} ranks"
        together = f", {self.flows} at a time" if self.flows > 1 else ""
        return f"all-reduces of one rank of each of {len(self.groups[0])} nodes{together}"


def link_classes(nodes: Nodes) -> Iterator[LinkClass]:
    """Yield each class of links that the ranks of nodes have; none for one rank.

    Where nodes have different numbers of ranks, as many of each take part as the smallest has.
    """
    least = min(map(len, nodes))
    alike = [tuple(ranks[:least]) for ranks in nodes]
    if least > 1:
        yield LinkClass("inside", "all_reduce", tuple(alike), least)
        yield LinkClass("inside", "transfer", tuple((ranks[0], ranks[1]) for ranks in alike), 2)
    if len(alike) == 1:
        return
    columns = tuple(zip(*alike, strict=True))
    # Neighbours, as pipelines have them; every card sends and receives at most once per flow and direction.
    pairs = tuple((first[0], second[0]) for first, second in list(pairwise(alike))[::2])
    all_pairs = tuple(pair for first, second in list(pairwise(alike))[::2] for pair in zip(first, second, strict=True))
    yield LinkClass("network", "all_reduce", columns[:1])
    yield LinkClass("network", "transfer", pairs)
    if least > 1:
        yield LinkClass("network", "all_reduce", columns, flows=least)
        yield LinkClass("network", "all_reduce", (tuple(rank for ranks in alike for rank in ranks),), least)
        yield LinkClass("network", "transfer", all_pairs, flows=least)
