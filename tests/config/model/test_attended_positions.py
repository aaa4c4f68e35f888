"""Positions that tokens attend to, counted one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_terapipe.config.flops import attended_positions, positions_in_reach

tokens = st.integers(0, 60)


@given(start=tokens, length=tokens, window=st.none() | st.integers(1, 80))
def test_every_pair_is_counted_once(start: int, length: int, window: int | None) -> None:
    end = start + length
    seen = [{key for key in range(token + 1) if window is None or key > token - window} for token in range(start, end)]
    assert attended_positions(start, end, window) == sum(map(len, seen))
    if length:
        # Without a window all from the first on, which later ones see.
        assert positions_in_reach(start, end, window) == len(set().union(*seen))


@given(bounds=st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5), window=st.none() | st.integers(1, 80))
def test_arrays_are_as_their_numbers(bounds: list[tuple[int, int]], window: int | None) -> None:
    starts = np.array([start for start, _ in bounds], dtype=float)
    ends = starts + np.array([length for _, length in bounds])
    for count in (attended_positions, positions_in_reach):
        one_by_one = [count(*pair, window) for pair in zip(starts.tolist(), ends.tolist(), strict=True)]
        assert count(starts, ends, window).tolist() == one_by_one
