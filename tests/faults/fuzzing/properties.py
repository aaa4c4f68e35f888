"""Inputs of hypothesis, which searches for the smallest that breaks a promise."""

from collections.abc import Callable

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.faults.fuzzing.edits import KINDS, WORDS, Edit, mutated, words_of
from tests.faults.fuzzing.target import Target


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """Inputs of a parser: its seeds after some edits, or any bytes."""
    words = st.sampled_from((*WORDS, *words_of(target.seeds), *target.words))
    share = st.floats(0, 1, exclude_max=True)
    edits = st.builds(Edit, kind=st.sampled_from(KINDS), place=share, extent=share, word=words)
    edited = st.builds(mutated, st.sampled_from(target.seeds), st.lists(edits, min_size=1, max_size=6))
    return st.one_of(edited, edited, edited, st.binary(max_size=200))


def try_examples(attempt: Callable[[bytes], object], target: Target, number: int, start: int) -> None:
    """Give examples to a function."""

    @seed(start)
    @settings(
        max_examples=number, database=None, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False
    )
    @given(inputs(target))
    def each(data: bytes) -> None:
        attempt(data)

    each()
