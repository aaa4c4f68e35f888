"""Tiles of attention that is written out keep within the scores that may exist at once."""

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import SHORTEST_IN_WINDOW, tile_length

sizes = st.integers(1, 5000)


@given(num_queries=sizes, prefix_len=st.integers(0, 5000), heads=st.integers(1, 64), window=st.none() | sizes)
def test_tiles_have_no_more_scores_than_may_exist(
    num_queries: int, prefix_len: int, heads: int, window: int | None
) -> None:
    at_once = 100_000
    length = tile_length(num_queries, prefix_len + num_queries, heads, window, at_once)
    reached = prefix_len + num_queries if window is None else min(prefix_len + num_queries, window - 1 + length)
    assert 1 <= length <= num_queries
    assert length == 1 or length * heads * reached <= at_once
    if window is not None:
        # At most half as many again are computed as windows have, but for narrow ones.
        assert length <= max(window / 2, SHORTEST_IN_WINDOW)


def test_few_scores_are_one_tile() -> None:
    assert tile_length(1000, 9000, 8, None) == 1000
