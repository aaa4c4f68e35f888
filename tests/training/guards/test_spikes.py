"""Losses that jump are found, and others are not."""

import random
from math import inf, nan

import pytest

from megatron_terapipe.config.training import NumbersConfig
from megatron_terapipe.errors import NumbersError
from megatron_terapipe.training.number_guards import LEAST_VALUES, SpikeGuard, SpikeWatch


def spikes_among(values: list[float], least_ratio: float = 1.07) -> list[int]:
    watch = SpikeWatch(least_ratio)
    return [number for number, value in enumerate(values) if watch.exceeded_by(value) is not None]


def falling(count: int) -> list[float]:
    """Losses of a run that learns, with noise."""
    noise = random.Random(0)
    return [2 + 8 / (1 + 0.05 * number) + noise.gauss(0, 0.05) for number in range(count)]


def test_a_loss_that_falls_with_noise_has_no_spikes() -> None:
    assert spikes_among(falling(1000)) == []


def test_a_jump_is_a_spike_and_a_plateau_above_becomes_the_usual() -> None:
    losses = falling(400)
    losses[300] *= 2
    assert spikes_among(losses) == [300]
    assert spikes_among([2.0] * 200 + [4.0] * 200) == list(range(200, 250)), "until half of the last 100 are so high"


def test_there_is_no_bound_by_a_few_values() -> None:
    assert spikes_among([1.0] * (LEAST_VALUES - 1) + [100.0]) == []
    assert spikes_among([1.0] * LEAST_VALUES + [100.0]) == [LEAST_VALUES]


def test_what_hardly_varies_may_rise_by_the_least_ratio() -> None:
    assert spikes_among([2.0] * 50 + [2.13]) == []
    assert spikes_among([2.0] * 50 + [2.15]) == [50]
    assert spikes_among([2.0] * 50 + [5.9], least_ratio=3) == []


def test_spikes_are_noted_by_default_and_end_the_run_if_asked() -> None:
    noted: list[str] = []
    for policy in ("note", "stop", "ignore"):
        guard = SpikeGuard(NumbersConfig(spiky_loss=policy, large_grads="ignore"))
        for iteration in range(1, 31):
            guard.look(iteration, 2.0, 1.0)
        found = guard.look(31, 20.0, 99.0)
        assert (found.spiky_loss, found.large_grads) == (policy != "ignore", False)
        if policy == "stop":
            with pytest.raises(NumbersError, match=r"loss of iteration 31 is 20, above 2\.14"):
                found.tell(noted.append)
        else:
            found.tell(noted.append)
    assert noted == [" warning: the loss of iteration 31 is 20, above 2.14, the bound by those before it"]


def test_large_gradients_are_found_where_asked_for() -> None:
    guard = SpikeGuard(NumbersConfig(large_grads="note"))
    for iteration in range(1, 31):
        guard.look(iteration, 2.0, 1.0)
    assert guard.look(31, 2.0, 3.1).large_grads and not guard.look(32, 2.0, 2.9).large_grads


def test_what_is_no_number_or_was_skipped_is_no_spike_and_moves_no_bound() -> None:
    guard = SpikeGuard(NumbersConfig(large_grads="note"))
    for iteration in range(1, 101):
        guard.look(iteration, 2.0, 1.0)
        assert guard.look(iteration, nan, None)[:2] == guard.look(iteration, inf, inf)[:2] == (False, False)
    assert guard.look(101, 9.0, 9.0)[:2] == (True, True)
