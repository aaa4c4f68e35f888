import numpy as np
import pytest

from megatron_terapipe.search.learn.calibration import MemorySample, fit_memory
from megatron_terapipe.search.price.memory import MemoryOverheads
from tests.search.learn.synthetic import failed, measured

TRUE = MemoryOverheads(framework_bytes=6e9, communicator_bytes=0.4e9, state_factor=1.05, activation_factor=1.15)


def test_constants_of_another_cluster_are_found() -> None:
    trials = measured(memory_overheads=TRUE)
    seen, unseen = trials[::2], MemorySample(trials[1::2])
    before = np.abs(unseen.errors(MemoryOverheads())).mean()
    overheads, residual_sd, num_trials = fit_memory(seen)
    assert overheads is not None
    assert np.abs(unseen.errors(overheads)).mean() < 0.02 < 0.05 < before
    assert overheads.framework_bytes == pytest.approx(TRUE.framework_bytes, rel=0.2)
    assert (num_trials, residual_sd < 0.02) == (len(seen), True)


def test_one_odd_reading_spoils_nothing() -> None:
    trials = measured(memory_overheads=TRUE)
    odd = trials[3]
    object.__setattr__(odd, "peak_memory_bytes", 3 * (odd.peak_memory_bytes or 0))
    overheads, _, _ = fit_memory(trials)
    assert overheads is not None
    assert np.median(np.abs(MemorySample(trials).errors(overheads))) < 0.02


def test_what_ran_out_of_memory_wanted_more_than_there_is() -> None:
    trials = [failed(trial) for trial in measured()[:6]]
    sample = MemorySample(trials)
    assert (sample.errors(MemoryOverheads()) <= 0).all()
    # Nothing but a larger demand can explain them.
    overheads, _, _ = fit_memory(trials)
    assert overheads is not None and overheads.framework_bytes > MemoryOverheads().framework_bytes


def test_trials_that_say_nothing_of_memory() -> None:
    trials = measured()
    for trial in trials:
        object.__setattr__(trial, "peak_memory_bytes", None)
    overheads, _, num_trials = fit_memory(trials)
    assert (num_trials, overheads) == (0, None)
