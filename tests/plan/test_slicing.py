from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.slicing import TokenSlices
from tests.strategies import cuts

lengths = st.integers(1, 5000)
weights = st.integers(0, 1000)


def test_uniform_gives_the_tokens_left_over_to_the_first():
    assert TokenSlices.uniform(10, 4).lengths == (3, 3, 2, 2)


@given(st.data(), lengths)
def test_uniform_cuts_cover_the_sequence_evenly(data, seq_length):
    num_token_slices = data.draw(st.integers(1, min(seq_length, 64)))
    cut = TokenSlices.uniform(seq_length, num_token_slices)
    assert len(cut) == num_token_slices
    assert cut.seq_length == seq_length
    assert max(cut.lengths) - min(cut.lengths) <= 1


@given(cuts())
def test_bounds_are_contiguous_and_prefixes_are_what_lies_before(cut):
    bounds = list(cut.bounds())
    assert bounds[0][0] == 0 and bounds[-1][1] == cut.seq_length == sum(cut.lengths)
    assert all(end == start for (_, end), (start, _) in pairwise(bounds))
    assert [end - start for start, end in bounds] == list(cut.lengths)
    assert [start for start, _ in bounds] == [cut.prefix_len(index) for index in range(len(cut))]


@given(cuts())
def test_the_text_form_parses_back(cut):
    assert TokenSlices.parse(str(cut)) == cut


def test_balanced_by_hand():
    # Attention alone: the first e of 100 tokens cost e^2, so the cuts lie at 100 * sqrt(j / 4).
    assert TokenSlices.balanced(100, 4, linear_cost=0, attention_cost=1).lengths == (50, 21, 16, 13)
    assert TokenSlices.balanced(100, 4, linear_cost=1, attention_cost=0).lengths == (25, 25, 25, 25)


@given(st.data(), lengths, weights, weights)
def test_balanced_cuts_cover_the_sequence_with_tokens_everywhere(data, seq_length, linear_cost, attention_cost):
    assume(linear_cost + attention_cost > 0)
    num_token_slices = data.draw(st.integers(1, min(seq_length, 64)))
    cut = TokenSlices.balanced(seq_length, num_token_slices, linear_cost=linear_cost, attention_cost=attention_cost)
    assert len(cut) == num_token_slices
    assert cut.seq_length == seq_length


@given(st.integers(1, 12), st.integers(200, 5000), weights, weights)
def test_balanced_costs_are_equal_within_a_token(num_token_slices, seq_length, linear_cost, attention_cost):
    assume(linear_cost + attention_cost > 0)
    cut = TokenSlices.balanced(seq_length, num_token_slices, linear_cost=linear_cost, attention_cost=attention_cost)

    def cost(end):
        return linear_cost * end + Fraction(attention_cost * end * end, 2)

    target = cost(seq_length) / num_token_slices
    dearest_token = linear_cost + attention_cost * seq_length
    # Either end of a token slice is off by at most half a token from where real numbers would have it.
    assert all(abs(cost(end) - cost(start) - target) <= dearest_token for start, end in cut.bounds())


@given(st.integers(1, 8), st.integers(100, 2000), weights, weights)
def test_equal_costs_are_those_of_the_closed_form(num_token_slices, seq_length, linear_cost, attention_cost):
    assume(linear_cost + attention_cost > 0)
    cut = TokenSlices.of_equal_cost(
        seq_length, num_token_slices, lambda tokens: linear_cost * tokens + attention_cost * tokens * tokens / 2
    )
    closed = TokenSlices.balanced(seq_length, num_token_slices, linear_cost=linear_cost, attention_cost=attention_cost)
    ends, expected = ([end for _, end in each.bounds()] for each in (cut, closed))
    # Where a real number lies between two tokens, rounding may go either way.
    assert all(abs(end - other) <= 1 for end, other in zip(ends, expected, strict=True))


def test_equal_costs_may_have_a_bend():
    cut = TokenSlices.of_equal_cost(1000, 4, lambda tokens: min(tokens, 200) * 3 + tokens, granularity=20)
    assert cut.lengths == (100, 100, 400, 400)


def test_balanced_token_slices_shrink_along_the_sequence():
    cut = TokenSlices.balanced(2048, 8, linear_cost=1000, attention_cost=1)
    assert list(cut.lengths) == sorted(cut.lengths, reverse=True)


def test_covering_accepts_its_own_length_alone():
    cut = TokenSlices.parse("704,688,656")
    assert cut.covering(2048) is cut
    with pytest.raises(PlanError, match=r"sum to 2048, but the sequence has 2000 tokens: change one of them by -48"):
        cut.covering(2000)


@pytest.mark.parametrize("text", ["", "1,,2", "a", "1.5", "704;688"])
def test_text_that_is_no_list_of_numbers(text):
    with pytest.raises(PlanError, match="are not whole numbers with commas between them"):
        TokenSlices.parse(text)


@pytest.mark.parametrize("bad", [(), (0,), (4, -1)])
def test_every_token_slice_has_tokens(bad):
    with pytest.raises(PlanError, match="each of at least one token"):
        TokenSlices(bad)


@pytest.mark.parametrize("num_token_slices", [0, -1, 5])
def test_there_are_no_more_token_slices_than_tokens(num_token_slices):
    with pytest.raises(PlanError, match="give between 1 and 4 token slices"):
        TokenSlices.uniform(4, num_token_slices)
    with pytest.raises(PlanError, match="give between 1 and 4 token slices"):
        TokenSlices.balanced(4, num_token_slices, linear_cost=1, attention_cost=1)


@pytest.mark.parametrize("linear_cost, attention_cost", [(-1, 1), (1, -1), (0, 0)])
def test_costs_of_a_token_are_positive(linear_cost, attention_cost):
    with pytest.raises(PlanError, match="must be positive"):
        TokenSlices.balanced(8, 2, linear_cost=linear_cost, attention_cost=attention_cost)
