"""Cuts of sequences into token slices, and the parts of them that sequence-parallel ranks have."""

from fractions import Fraction
from itertools import pairwise
from math import sqrt

from hypothesis import assume, given
from hypothesis import strategies as st

from deepspeed_ext.plan.slicing import TokenSlices, parts_of_all_ranks, parts_of_rank
from tests.strategies import cuts

lengths = st.integers(1, 5000)
weights = st.integers(0, 1000)


@given(cuts())
def test_bounds_are_contiguous_and_prefixes_are_the_tokens_before(cut):
    bounds = list(cut.bounds())
    assert bounds[0][0] == 0 and bounds[-1][1] == cut.seq_length == sum(cut.lengths)
    assert all(end == start for (_, end), (start, _) in pairwise(bounds))
    assert [end - start for start, end in bounds] == list(cut.lengths)
    assert [start for start, _ in bounds] == [cut.prefix_len(index) for index in range(len(cut))]
    assert TokenSlices.parse(str(cut)) == cut


def test_balanced_by_hand():
    # Only attention: the first e of 100 tokens cost e^2, so the cuts are at 100 * sqrt(j / 4).
    assert TokenSlices.balanced(100, 4, 1.0).lengths == (50, 21, 16, 13)
    assert TokenSlices.balanced(100, 4, 0.0).lengths == (25, 25, 25, 25)


@given(st.integers(1, 12), st.integers(200, 5000), st.fractions(0, 1))
def test_balanced_costs_are_equal_within_a_token(num_token_slices, seq_length, share):
    cut = TokenSlices.balanced(seq_length, num_token_slices, float(share))

    def cost(end):
        return (1 - share) * end + share * Fraction(end * end, seq_length)

    target = cost(seq_length) / num_token_slices
    dearest_token = 1 - share + 2 * share
    # Either end of a token slice is off by at most half a token from where real numbers would have it.
    assert all(abs(cost(end) - cost(start) - target) <= dearest_token for start, end in cut.bounds())


@given(st.integers(1, 8), st.integers(100, 2000), weights, weights)
def test_equal_costs_are_those_of_the_closed_form(num_token_slices, seq_length, linear_cost, attention_cost):
    assume(linear_cost + attention_cost > 0)
    cut = TokenSlices.of_equal_cost(
        seq_length, num_token_slices, lambda tokens: linear_cost * tokens + attention_cost * tokens * tokens / 2
    )
    total = linear_cost * seq_length + attention_cost * seq_length**2 / 2
    for index, (end, _) in enumerate([*cut.bounds()][1:], start=1):
        # The stable root of a e + b e^2 / 2 = cost; it also holds for b = 0.
        spent = index / num_token_slices * total
        root = 2 * spent / (linear_cost + sqrt(linear_cost**2 + 2 * attention_cost * spent))
        # Where a real number is between two tokens, rounding may go either way.
        assert abs(end - root) <= 0.5 + 1e-6


def test_equal_costs_may_have_a_bend():
    cut = TokenSlices.of_equal_cost(1000, 4, lambda tokens: min(tokens, 200) * 3 + tokens, granularity=20)
    assert cut.lengths == (100, 100, 400, 400)


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
