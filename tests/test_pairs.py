"""The setups of a commit hold every pair of values that all setups hold."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.pairs import covering_pairs, pairs_of

tables = st.lists(st.fixed_dictionaries({axis: st.integers(0, 2) for axis in "abcd"}), min_size=1, max_size=30)


@given(tables)
def test_no_pair_is_lost_and_no_setup_is_superfluous(table: list[dict[str, int]]) -> None:
    chosen = [pairs_of(table[index]) for index in covering_pairs(table)]
    assert set().union(*chosen) == set().union(*map(pairs_of, table))
    for number in range(len(chosen)):
        others = chosen[:number] + chosen[number + 1 :]
        assert chosen[number] - set().union(*others)


def test_few_of_a_full_product_are_enough() -> None:
    table = [dict(zip("abcdefgh", values, strict=True)) for values in product((0, 1), repeat=8)]
    assert len(covering_pairs(table)) <= 8
