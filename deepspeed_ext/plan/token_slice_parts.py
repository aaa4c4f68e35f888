"""The parts of token slices that sequence-parallel ranks have.

Rank r of R has the tokens r N / R .. (r + 1) N / R of a token slice of N tokens:

    token slices    [ 0             | 1     ]
    rank 0 of 2     [ 0.0   |       | 1.0   ...
    rank 1 of 2     [       | 0.1   | ...     1.1 ]
"""

from collections.abc import Iterator
from dataclasses import dataclass

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.slicing import TokenSlices


@dataclass(frozen=True, slots=True)
class TokenSliceParts(TokenSlices):
    """The part of each token slice that one rank has. Whoever cuts by token slices cuts by these as well.

    Made by `parts_of_rank`. Lengths and bounds are those of the parts; the sequence is the whole one.

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
        """Tokens of the whole sequence, those of other ranks among them."""
        return self.whole.seq_length

    def prefix_len(self, token_slice: int) -> int:
        """Tokens before this rank's part of a token slice, those of other ranks among them."""
        return self.whole.prefix_len(token_slice) + self.rank * self.lengths[token_slice]

    def bounds(self) -> Iterator[tuple[int, int]]:
        """First position and end of each part."""
        starts = (start for start, _ in self.whole.bounds())
        for start, length in zip(starts, self.lengths, strict=True):
            yield start + self.rank * length, start + (self.rank + 1) * length


def parts_of_rank(token_slices: TokenSlices, rank: int, num_ranks: int) -> TokenSlices:
    """Return the part of each token slice that a rank has; of one rank, the token slices themselves.

    Args:
        token_slices: lengths of the token slices.
        num_ranks: number of the sequence-parallel ranks.

    Raises:
        PlanError: if they cannot share a token slice evenly.
    """
    if num_ranks == 1:
        return token_slices
    uneven = next((number for number, length in enumerate(token_slices.lengths) if length % num_ranks), None)
    if uneven is not None:
        raise PlanError(
            f"token slice {uneven} of {token_slices} has {token_slices.lengths[uneven]} tokens, which "
            f"{num_ranks} sequence-parallel ranks cannot share evenly: let every length be a multiple of {num_ranks}"
        )
    lengths = tuple(length // num_ranks for length in token_slices.lengths)
    return TokenSliceParts(lengths, whole=token_slices, rank=rank)


def parts_of_all_ranks(token_slices: TokenSlices, num_ranks: int) -> TokenSlices:
    """Return the parts of all ranks in the order of their tokens, each as if it were a token slice.

    Args:
        token_slices: lengths of the token slices.
        num_ranks: number of the sequence-parallel ranks, which can share each of them.
    """
    return TokenSlices(tuple(length // num_ranks for length in token_slices.lengths for _ in range(num_ranks)))
