"""Predictions beside runs of ArcticTraining. One constant is fitted: bytes of the host for a parameter."""

import pytest

from megatron_terapipe.search.rank.rivals import RivalTimes
from tests.search.rivals.published import RUNS, with_measured


@pytest.mark.parametrize("name", RUNS)
def test_what_ran_is_predicted_to_fit(name: str) -> None:
    run = RUNS[name]
    assert run.limits.fullness(run.memory()) <= 1


@pytest.mark.parametrize("name", with_measured("longest"))
def test_longest_sequences_are_at_most_a_quarter_longer(name: str) -> None:
    run = RUNS[name]
    assert 1 <= run.longest() / run.line["seq_length"] <= 1.25


@pytest.mark.parametrize("name", with_measured("device_gib"))
def test_memory_of_devices(name: str) -> None:
    run = RUNS[name]
    measured = run.line["measured"]["device_gib"] * 2**30
    assert run.memory().device == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", with_measured("iteration_time_s"))
def test_times(name: str) -> None:
    run = RUNS[name]
    predicted = RivalTimes(run.pricing.cost_model).price(run.settings).total_s
    assert predicted == pytest.approx(run.line["measured"]["iteration_time_s"], rel=0.15)
