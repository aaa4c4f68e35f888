"""How a sequence is cut into token slices, and which parts of them the sequence-parallel ranks have."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from deepspeed_ext.plan.errors import PlanError

__all__ = ["TokenSlices"]


@dataclass(frozen=True, slots=True)
class TokenSlices:
    """Lengths of the token slices of every sequence, first to last.

    Example:
        >>> cut = TokenSlices((704, 688, 656))
        >>> cut.seq_length, cut.prefix_len(2), list(cut.bounds())
        (2048, 1392, [(0, 704), (704, 1392), (1392, 2048)])
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or any(length < 1 for length in self.lengths):
            raise PlanError(
                f"token slices {','.join(map(str, self.lengths)) or '(none)'}: "
                "there must be at least one, each of at least one token"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __str__(self) -> str:
        return ",".join(map(str, self.lengths))

    @property
    def seq_length(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)

    def prefix_len(self, token_slice: int) -> int:
        """Tokens before a token slice: the length of the keys and values it finds cached."""
        return sum(self.lengths[:token_slice])

    def bounds(self) -> Iterator[tuple[int, int]]:
        """First position and end of each token slice."""
        return pairwise(accumulate(self.lengths, initial=0))

    def covering(self, seq_length: int) -> "TokenSlices":
        """Return this cut, once it is known to cover a sequence of `seq_length` tokens."""
        if self.seq_length != seq_length:
            raise PlanError(
                f"token slices {self} sum to {self.seq_length}, but the sequence has {seq_length} tokens: "
                f"change one of them by {seq_length - self.seq_length:+d}"
            )
        return self

    @classmethod
    def parse(cls, text: str) -> "TokenSlices":
        """Read `704,688,656`."""
        try:
            lengths = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise PlanError(
                f"token slices {text!r} are not whole numbers with commas between them: write them as 704,688,656"
            ) from None
        return cls(lengths)

    @classmethod
    def uniform(cls, seq_length: int, num_token_slices: int, *, granularity: int = 1) -> "TokenSlices":
        """Cut as evenly as multiples of `granularity` allow; the first token slices take the remainder.

        Tokens beyond the last multiple go to the last token slice.

        Args:
            granularity: lengths are multiples of this, but for the last.
        """
        _check_count(seq_length, num_token_slices, granularity)
        length, longer = divmod(seq_length // granularity, num_token_slices)
        *lengths, last = ((length + (index < longer)) * granularity for index in range(num_token_slices))
        return cls((*lengths, last + seq_length % granularity))

    @classmethod
    def balanced(
        cls, seq_length: int, num_token_slices: int, attention_share: float, *, granularity: int = 1
    ) -> "TokenSlices":
        """Cut so that every token slice costs the same, where attention is a share of the cost of a whole sequence.

        A token costs its matrix products, and its attention to all tokens before it: of N tokens, with a share rho, the
        first e cost (1 - rho) e + rho e^2 / N (the quadratic of Seq1F1B, arXiv 2406.03488 section 3.3).
        """

        def cost(tokens: float) -> float:
            return (1 - attention_share) * tokens + attention_share * tokens * tokens / seq_length

        return cls.of_equal_cost(seq_length, num_token_slices, cost, granularity=granularity)

    @classmethod
    def of_equal_cost(
        cls, seq_length: int, num_token_slices: int, cost: Callable[[float], float], *, granularity: int = 1
    ) -> "TokenSlices":
        """Cut where shares j/S of the whole cost end, at the nearest multiples that leave every token slice one.

        Args:
            cost: of the first tokens, given their number, which need not be whole; grows with it.
            granularity: cut at multiples of this, as kernels that work in tiles like it.
        """
        _check_count(seq_length, num_token_slices, granularity)
        whole, ends = cost(seq_length), [0]
        for index in range(1, num_token_slices):
            share, low, high = index / num_token_slices, 0.0, float(seq_length)
            while low < (middle := (low + high) / 2) < high:
                low, high = (middle, high) if cost(middle) < share * whole else (low, middle)
            room_left = (seq_length // granularity - (num_token_slices - index)) * granularity
            ends.append(min(max(round(high / granularity) * granularity, ends[-1] + granularity), room_left))
        return cls(tuple(end - start for start, end in pairwise([*ends, seq_length])))


def _check_count(seq_length: int, num_token_slices: int, granularity: int) -> None:
    most = seq_length // granularity
    if not 1 <= num_token_slices <= most:
        each = "" if granularity == 1 else f", each a multiple of {granularity}"
        raise PlanError(
            f"{num_token_slices} token slices of {seq_length} tokens{each}: give between 1 and {most} token slices"
        )


@dataclass(frozen=True, slots=True)
class TokenSliceParts(TokenSlices):
    """The part of each token slice that one rank has, made by `parts_of_rank`; the sequence is the whole one.

    Rank r of R has the tokens r N / R .. (r + 1) N / R of a token slice of N tokens:

    token slices    [ 0             | 1     ]
    rank 0 of 2     [ 0.0   |       | 1.0   ...
    rank 1 of 2     [       | 0.1   | ...     1.1 ]

    Example:
        >>> parts = parts_of_rank(TokenSlices((8, 4)), rank=1, num_ranks=2)
        >>> parts.lengths, list(parts.bounds()), parts.prefix_len(1), parts.seq_length
        ((4, 2), [(4, 8), (10, 12)], 10, 12)
    """

    whole: TokenSlices
    rank: int
    """Number of the rank among those that share them."""

    @property
    def seq_length(self) -> int:
        """Tokens of the whole sequence, on all ranks."""
        return self.whole.seq_length

    def prefix_len(self, token_slice: int) -> int:
        """Tokens before this rank's part of a token slice, on all ranks."""
        return self.whole.prefix_len(token_slice) + self.rank * self.lengths[token_slice]

    def bounds(self) -> Iterator[tuple[int, int]]:
        """First position and end of each part."""
        starts = (start for start, _ in self.whole.bounds())
        for start, length in zip(starts, self.lengths, strict=True):
            yield start + self.rank * length, start + (self.rank + 1) * length


def parts_of_rank(token_slices: TokenSlices, rank: int, num_ranks: int) -> TokenSlices:
    """Return the part of each token slice that a rank has; of one rank, the token slices themselves."""
    if num_ranks == 1:
        return token_slices
    uneven = next((number for number, length in enumerate(token_slices.lengths) if length % num_ranks), None)
    if uneven is not None:
        raise PlanError(
            f"token slice {uneven} of {token_slices} has {token_slices.lengths[uneven]} tokens, which "
            f"{num_ranks} sequence-parallel ranks cannot share evenly: give lengths that are multiples of {num_ranks}"
        )
    lengths = tuple(length // num_ranks for length in token_slices.lengths)
    return TokenSliceParts(lengths, whole=token_slices, rank=rank)


def parts_of_all_ranks(token_slices: TokenSlices, num_ranks: int) -> TokenSlices:
    """Return the parts of all ranks in the order of their tokens, each as if it were a token slice."""
    return TokenSlices(tuple(length // num_ranks for length in token_slices.lengths for _ in range(num_ranks)))
