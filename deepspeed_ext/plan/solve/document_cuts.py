"""Token slices cut by what the packed documents of a micro-batch cost, with lengths from a small set.

A token costs its matrix products, whatever its position, and its attention to the tokens of its document so far. So a
token at the end of a long document costs several times one of a short document, and where long documents lie differs
from micro-batch to micro-batch:

    documents     [ 0 | 1 | 2 | 3                              | 4 |5| 6  | 7 ]
    cost           _.- _.- _.- _.---~~~~~~^^^^^^^^^^^^^^^^^^^^^ _.- .  _.- _.-
    equal cut     [           |           |           |           |           ]
    this cut      [               |         |      |    |                     ]

Every rank cuts a micro-batch for itself, from the starts of its documents alone, so that all cut alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.slicing import TokenSlices

QUANTA = 8
"""Quanta of a token slice of average length. With more of them token slices are cut more evenly, and have more lengths;
`benchmarks/document_cuts.py` compares 4 to 32."""

SHORTEST, LONGEST = 4, 2
"""A token slice has at least a fourth and at most twice the average length, so that no kernel has too little to do, and
no activation is larger than twice that of an equal cut."""


@dataclass(frozen=True, kw_only=True)
class DocumentCuts:
    """Cuts of sequences of packed documents into token slices of equal cost.

    Lengths are multiples of a quantum: the average length over `quanta`, rounded down to the granularity, and at least
    that. Tokens beyond the last multiple go to the last token slice.

    Example:
        >>> cuts = DocumentCuts(seq_length=64, num_token_slices=4, linear_cost=8, attention_costs={None: 1})
        >>> str(cuts.cut([(0,)])), str(cuts.cut([range(0, 64, 4)])), str(cuts.cut([(0, 40)]))
        ('28,14,12,10', '16,16,16,16', '20,12,14,18')

    Raises:
        PlanError: if there are more token slices than multiples of the granularity, or no cost is positive.
    """

    seq_length: int
    """Tokens of a sequence."""
    num_token_slices: int
    """Token slices of a sequence."""
    linear_cost: float
    """Cost of a token whatever its position, in any unit."""
    attention_costs: Mapping[int | None, float]
    """Cost per token and position that it attends to, in the same unit, of all layers with one window (None: without),
    by the window."""
    granularity: int = 1
    """Lengths are multiples of this, as ranks that share tokens need it."""
    quanta: int = QUANTA
    """Quanta of a token slice of average length."""

    def __post_init__(self) -> None:
        """Check sizes and costs."""
        TokenSlices.uniform(self.seq_length, self.num_token_slices, granularity=self.granularity)
        costs = self.linear_cost, *self.attention_costs.values()
        if min(costs) < 0 or max(costs) == 0:
            raise PlanError(f"costs {costs} of a token must be positive")

    @cached_property
    def quantum(self) -> int:
        """Tokens of a quantum."""
        average = self.seq_length // self.num_token_slices
        return self.granularity * max(1, average // (self.quanta * self.granularity))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that a token slice may have, all multiples of the quantum; the last may have some tokens more."""
        average = self.seq_length // self.quantum / self.num_token_slices
        multiples = range(max(1, int(average / SHORTEST)), ceil(average * LONGEST) + 1)
        return tuple(multiple * self.quantum for multiple in multiples)

    def cut(self, starts: Sequence[Sequence[int]]) -> TokenSlices:
        """Return the cut whose most expensive token slice is cheapest; of several, the one with the most even costs.

        Args:
            starts: for each row of the micro-batch, the positions at which a document begins, ascending, the first 0.
        """
        cost = self.cost_before(starts)
        dearest, _ = self._solved(cost, np.maximum, limit=inf)
        # A sum of squares is least where costs are even. A limit with room for rounding leaves the first answer in.
        _, places = self._solved(cost, lambda costs, before: costs**2 + before, limit=dearest * (1 + 1e-12))
        return TokenSlices(tuple(end - start for start, end in pairwise(self._positions[places].tolist())))

    def cost_before(self, starts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
        """Return the cost of all tokens before each place at which a token slice may begin or end: [quanta + 1].

        Args:
            starts: for each row, the positions at which a document begins, ascending; the first is 0.
        """
        cost = self._positions.astype(np.float64) * (self.linear_cost * len(starts))
        for row in starts:
            begins = np.asarray(row, np.int64)
            document = begins.searchsorted(self._positions, side="right") - 1
            inside = self._positions - begins[document]
            for window, each in self.attention_costs.items():
                # Whole numbers, which are exact: so all ranks cut alike, whatever order their processors add in.
                before = np.cumsum(_attended(np.diff(begins, prepend=0), window))
                cost += each * (before[document] + _attended(inside, window)).astype(np.float64)
        return cost

    @cached_property
    def _positions(self) -> NDArray[np.int64]:
        """Places at which a token slice may begin or end, in tokens: [quanta + 1]."""
        positions = np.arange(self.seq_length // self.quantum + 1, dtype=np.int64) * self.quantum
        positions[-1] = self.seq_length
        return positions

    def _solved(
        self,
        cost: NDArray[np.float64],
        summed: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
        limit: float,
    ) -> tuple[float, list[int]]:
        """Return the least sum over the costs of token slices, and the places between them, first and last included.

        Args:
            cost: cost of all tokens before each place, [places].
            summed: the sum so far, [places], of the cost of a token slice and the sum before it.
        """
        count = len(cost)
        least, choices = np.full(count, inf), []
        least[0] = 0.0
        multiples = [length // self.quantum for length in self.lengths]
        for _ in range(self.num_token_slices):
            options = np.full((len(multiples), count), inf)  # by the length of the last token slice, and its end
            for option, length in zip(options, multiples, strict=True):
                costs = cost[length:] - cost[:-length]
                option[length:] = np.where(costs <= limit, summed(costs, least[:-length]), inf)
            choices.append(options.argmin(axis=0))
            least = options.min(axis=0)
        place, places = count - 1, [count - 1]
        for choice in reversed(choices):
            place -= multiples[choice[place]]
            places.append(place)
        return float(least[-1]), places[::-1]


def _attended(lengths: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    """Return the pairs of a token of a document and a position that it attends to, of documents of lengths [...]."""
    hidden = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    return (lengths * (lengths + 1) - hidden * (hidden + 1)) // 2
