"""Which iterations are measured: as they are given, or the first that are not slower than the rest."""

import pytest

from megatron_terapipe.config.logging import IterationNumbers, LoggingConfig


@pytest.mark.parametrize(
    ("text", "named"),
    [("10", {10}), ("4,2", {2, 4}), ("3-5", {3, 4, 5}), ("9, 2-3", {2, 3, 9}), ("1-3,2-4", {1, 2, 3, 4})],
)
def test_numbers_and_runs_of_numbers(text: str, named: set[int]) -> None:
    numbers = IterationNumbers.parse(text, "--flag")
    assert {iteration for iteration in range(20) if iteration in numbers} == named
    assert numbers.last == max(named)


@pytest.mark.parametrize(
    ("start", "last", "measured"),
    [(0, 10, {3, 4, 5}), (100, 200, {103, 104, 105}), (0, 4, {3, 4}), (0, 2, {2}), (7, 8, {8})],
)
def test_by_default_a_few_after_the_first_of_this_run(start: int, last: int, measured: set[int]) -> None:
    numbers = LoggingConfig(timeline="out").measured_iterations(start, last)
    assert {iteration for iteration in range(1, 300) if iteration in numbers} == measured


def test_what_is_given_counts_from_the_start_of_training() -> None:
    numbers = LoggingConfig(timeline="out", timeline_iterations="150").measured_iterations(100, 200)
    assert 150 in numbers and 103 not in numbers
