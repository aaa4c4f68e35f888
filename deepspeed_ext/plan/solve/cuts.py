"""Cuts of a sequence: costs of a token slice with any start and end, places to cut at, and cuts by documents.

`TokenSliceCosts` is any function; `PolynomialCosts` is one with three coefficients per stage and kind of op,

    time(start, end) = fixed + linear (end - start) + quadratic (end^2 - start^2),

where `fixed` is the cost of an op of any length (so cutting is never free), `linear` are matrix products, and
`quadratic` is attention to the tokens before. The same three terms fit measured times of fused attention and of GPUs
that need long token slices to be busy: t(l, c) of TeraPipe (arXiv 2102.07988 section 3.3) with l = end - start,
c = start has no others, but for a product l c that is in end^2 - start^2.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.simulate.arrays import Numbers
from deepspeed_ext.plan.slicing import TokenSlices

NUM_TERMS = 3


class TokenSliceCosts(Protocol):
    """Times of token slices on stages."""

    def __call__(self, stages: Sequence[int], starts: Numbers, ends: Numbers) -> Numbers:
        """Times of F, BI and BW of token slices [start, end).

        Args:
            starts: first tokens, an array of any shape.
            ends: ends (exclusive), an array of the same shape.

        Returns:
            [3, stages, *shape of starts].
        """
        ...


@dataclass(frozen=True, eq=False)
class PolynomialCosts:
    """Costs in three terms."""

    coefficients: Numbers
    """[3 kinds, N stages, 3 terms] fixed, linear, quadratic; lengths in tokens."""

    def __call__(self, stages: Sequence[int], starts: Numbers, ends: Numbers) -> Numbers:
        """See `TokenSliceCosts`."""
        terms = np.stack([np.ones(starts.shape), ends - starts, ends**2.0 - starts**2.0])
        return np.tensordot(self.coefficients[:, list(stages)], terms, axes=1)

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[int],
        seq_length: int,
        attention_share: float,
        *,
        layer_time: float = 1.0,
        fixed: float = 0.0,
        head_time: float = 0.0,
    ) -> "PolynomialCosts":
        """Costs of stages of equal layers, by the share of attention as in `attention_costs`.

        Args:
            fixed: additional cost of each op on each stage.
            head_time: F, BI and BW, each, of the language-model head, which is on the last stage.
        """
        coefficients = np.zeros((3, len(layers), NUM_TERMS))
        coefficients[..., 0] = fixed
        linear = (1 - attention_share) * layer_time / seq_length
        quadratic = attention_share * layer_time / seq_length**2
        coefficients[..., 1] = linear * np.array(layers)
        coefficients[..., 2] = quadratic * np.outer([1, 2, 0], layers)
        coefficients[:, -1, 1] += head_time / seq_length
        return cls(coefficients)


def op_costs(
    shape: PipelineShape, cut: TokenSlices, token_slice_costs: TokenSliceCosts, transfer: float | TransferCosts = 0.0
) -> OpCosts:
    """Costs of the ops of a pipeline that runs a cut.

    Args:
        transfer: as `OpCosts.transfer`; the bytes of a micro-batch are dealt out to the token slices by length.
    """
    starts, ends = bounds_of(cut)
    times = token_slice_costs(range(shape.num_stages), starts, ends).tolist()
    forward, backward, weight_gradient = (tuple(map(tuple, rows)) for rows in times)
    if isinstance(transfer, TransferCosts):
        each = sum(transfer.message_bytes) / cut.seq_length
        transfer = replace(transfer, message_bytes=tuple(each * length for length in cut.lengths))
    return OpCosts(forward, backward, weight_gradient, transfer)


def bounds_of(cut: TokenSlices) -> tuple[Numbers, Numbers]:
    """Return the first token and the end of each token slice of a cut: two arrays of [S]."""
    ends = np.cumsum(cut.lengths)
    return ends - np.array(cut.lengths), ends


@dataclass(frozen=True, slots=True)
class CutGrid:
    """Places to cut a sequence at; tokens beyond the last multiple go to the last token slice."""

    seq_length: int
    granularity: int = 1
    min_length: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            extent = getattr(self, name)
            if extent < 1:
                raise PlanError(f"{name}={extent} is not a positive whole number: give 1 or more")

    @property
    def points(self) -> Numbers:
        """Positions at which token slices may begin or end: [places]."""
        inner = np.arange(0, self.seq_length - self.granularity + 1, self.granularity)
        return np.append(inner, self.seq_length)

    @property
    def shortest(self) -> int:
        """Fewest tokens of a token slice but the last: the minimum, as multiples of the granularity."""
        return -(-self.min_length // self.granularity) * self.granularity

    def check_count(self, num_token_slices: int) -> None:
        """Check that so many token slices fit."""
        last = max(self.min_length, self.granularity)
        most = 1 + (self.seq_length - last) // self.shortest if self.seq_length >= last else 0
        if not 1 <= num_token_slices <= most:
            raise PlanError(
                f"{num_token_slices} token slices of {self.seq_length} tokens, each of at least {self.min_length} and "
                f"a multiple of {self.granularity}: give between 1 and {most} token slices, or shorter ones"
            )

    def balanced(self, num_token_slices: int, attention: float) -> TokenSlices:
        """Cut so that all cost the same if attention is this share of the sequence's cost, as near as lengths allow."""
        self.check_count(num_token_slices)
        near = TokenSlices.balanced(self.seq_length, num_token_slices, attention, granularity=self.granularity)
        lengths = list(near.lengths)
        while min(lengths) < self.min_length:
            short = min(range(len(lengths)), key=lengths.__getitem__)
            long = max(range(len(lengths)), key=lengths.__getitem__)
            missing = -(-(self.min_length - lengths[short]) // self.granularity)
            moved = min(missing, (lengths[long] - self.min_length) // self.granularity) * self.granularity
            lengths[short] += moved
            lengths[long] -= moved
        return TokenSlices(tuple(lengths))


QUANTA = 8
"""Quanta of a token slice of average length. With more of them token slices are cut more evenly, and have more lengths;
`benchmarks/document_cuts.py` compares 4 to 32."""

SHORTEST, LONGEST = 4, 2
"""A token slice has at least a fourth and at most twice the average length, so that no kernel has too little to do, and
no activation is larger than twice an equal cut's."""


@dataclass(frozen=True, kw_only=True)
class DocumentCuts:
    """Cuts of sequences of packed documents into token slices of equal cost.

    A token costs its matrix products, whatever its position, and its attention to the tokens of its document so far. So
    a token at the end of a long document costs several times one of a short document:

    documents     [ 0 | 1 | 2 | 3                              | 4 |5| 6  | 7 ]
    cost           _.- _.- _.- _.---~~~~~~^^^^^^^^^^^^^^^^^^^^^ _.- .  _.- _.-
    equal cut     [           |           |           |           |           ]
    this cut      [               |         |      |    |                     ]

    Every rank cuts a micro-batch for itself, only from the starts of its documents, so that all cut alike. Lengths are
    multiples of a quantum: the average length over `quanta`, rounded down to the granularity, and at least that. Tokens
    beyond the last multiple go to the last token slice.

    Example:
        >>> cuts = DocumentCuts(seq_length=64, num_token_slices=4, linear_cost=8, attention_costs={None: 1})
        >>> str(cuts.cut([(0,)])), str(cuts.cut([range(0, 64, 4)])), str(cuts.cut([(0, 40)]))
        ('28,14,12,10', '16,16,16,16', '20,12,14,18')
    """

    seq_length: int
    num_token_slices: int
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
        """Return the cut with the cheapest most expensive token slice; of several, the one with the most even costs.

        Args:
            starts: for each row of the micro-batch, the positions at which a document begins, ascending, the first 0.
        """
        cost = self.cost_before(starts)
        dearest, _ = self._solved(cost, np.maximum, limit=inf)
        # A sum of squares is least where costs are even. A limit with room for rounding leaves the first answer in.
        _, places = self._solved(cost, lambda costs, before: costs**2 + before, limit=dearest * (1 + 1e-12))
        return TokenSlices(tuple(end - start for start, end in pairwise(self._positions[places].tolist())))

    def cost_before(self, starts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
        """Return the cost of all tokens before each place at which a token slice may begin or end: [quanta + 1]."""
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
