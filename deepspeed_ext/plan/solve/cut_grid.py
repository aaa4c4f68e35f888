"""Where a sequence may be cut: at multiples of a granularity, into token slices of a minimum length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.optimise.problem import Numbers
from deepspeed_ext.plan.slicing import TokenSlices


@dataclass(frozen=True, slots=True)
class CutGrid:
    """Places to cut a sequence at; tokens beyond the last multiple go to the last token slice.

    Raises:
        PlanError: if an extent is not positive.
    """

    seq_length: int
    granularity: int = 1
    min_length: int = 1

    def __post_init__(self) -> None:
        """Check the extents."""
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
        """See that so many token slices fit.

        Raises:
            PlanError: if they do not.
        """
        last = max(self.min_length, self.granularity)
        most = 1 + (self.seq_length - last) // self.shortest if self.seq_length >= last else 0
        if not 1 <= num_token_slices <= most:
            raise PlanError(
                f"{num_token_slices} token slices of {self.seq_length} tokens, each of at least {self.min_length} and "
                f"a multiple of {self.granularity}: give between 1 and {most} token slices, or shorter ones"
            )

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether every token slice is long enough."""
        return min(lengths) >= self.min_length

    def balanced(self, num_token_slices: int, attention: float) -> TokenSlices:
        """Cut so that all cost the same if attention is this share of the sequence's cost, as near as lengths allow.

        Args:
            attention: share of attention in the cost of the sequence.

        Raises:
            PlanError: if so many token slices do not fit.
        """
        self.check_count(num_token_slices)
        near = TokenSlices.balanced(
            self.seq_length,
            num_token_slices,
            linear_cost=1 - attention,
            attention_cost=2 * attention / self.seq_length,
            granularity=self.granularity,
        )
        lengths = list(near.lengths)
        while not self.holds(lengths):
            short = min(range(len(lengths)), key=lengths.__getitem__)
            long = max(range(len(lengths)), key=lengths.__getitem__)
            missing = -(-(self.min_length - lengths[short]) // self.granularity)
            moved = min(missing, (lengths[long] - self.min_length) // self.granularity) * self.granularity
            lengths[short] += moved
            lengths[long] -= moved
        return TokenSlices(tuple(lengths))
