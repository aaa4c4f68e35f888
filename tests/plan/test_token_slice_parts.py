"""Parts of token slices tile them, and cut as token slices do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.slicing import TokenSlices, parts_of_all_ranks, parts_of_rank
from tests.strategies import cuts


@given(cut=cuts(max_length=8), num_ranks=st.integers(1, 5))
def test_parts_tile_every_token_slice_in_the_order_of_ranks(cut: TokenSlices, num_ranks: int) -> None:
    cut = TokenSlices(tuple(length * num_ranks for length in cut.lengths))
    of_ranks = [parts_of_rank(cut, rank, num_ranks) for rank in range(num_ranks)]
    joined = [part for parts in zip(*(parts.bounds() for parts in of_ranks), strict=True) for part in parts]
    assert joined == list(parts_of_all_ranks(cut, num_ranks).bounds())
    for parts in of_ranks:
        assert len(parts) == len(cut)
        assert parts.seq_length == cut.seq_length
        assert [end - start for start, end in parts.bounds()] == list(parts.lengths)
        assert [start for start, _ in parts.bounds()] == [parts.prefix_len(index) for index in range(len(cut))]


def test_one_rank_has_the_token_slices_themselves() -> None:
    cut = TokenSlices((5, 3))
    assert parts_of_rank(cut, 0, 1) is cut


def test_lengths_that_are_no_multiple_are_refused_with_the_first_of_them() -> None:
    with pytest.raises(PlanError, match=r"token slice 1 of 8,6,5 has 6 tokens, which 4 sequence-parallel ranks cannot"):
        parts_of_rank(TokenSlices((8, 6, 5)), 0, 4)


def test_parts_know_whose_they_are() -> None:
    cut = TokenSlices((8, 4))
    parts = [parts_of_rank(cut, rank, 2) for rank in range(2)]
    assert parts[0] != parts[1] != cut
    assert str(parts[0]) == "4,2"
    assert parts[0].covering(12) is parts[0]
