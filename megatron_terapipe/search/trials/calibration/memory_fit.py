"""Constants of the memory model from measured peaks: the most probable ones, given what was known before.

As in `fit`, constants are fitted as logarithms around their defaults, and a robust loss bears with odd readings. A run
that ran out of memory says that it wanted more than there is, and one that did not, that it wanted less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.memory.overheads import (
    Counted,
    MemoryOverheads,
    default_overheads,
    total_bytes,
)
from megatron_terapipe.search.cost.memory.peaks import MemoryModel
from megatron_terapipe.search.op_times.constants import Prior
from megatron_terapipe.search.trials.calibration.fit import fit_constants
from megatron_terapipe.search.trials.trial import Trial, models_of

Floats = NDArray[np.float64]

NOISE = 0.05
"""Standard deviation of log(measured / predicted) that is expected of right constants: tables give whole GB."""

LARGE = 1.5
"""Residual, in standard deviations, from which the loss grows no longer with its square (soft L1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedMemory:
    """Memory overheads after some trials."""

    overheads: MemoryOverheads
    residual_sd: float
    """Standard deviation of log(measured / predicted) over the trials with a peak."""
    num_trials: int
    """How many said something of memory."""


class MemorySample:
    """Trials that say something of memory, counted once, to be assembled with other overheads again and again.

    Args:
        trials: any; those that say nothing of memory are left out.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials = [one for one in trials if one.peak_memory_bytes is not None or one.out_of_memory]
        counted = count_memory(self.trials)
        most = max((len(ranks) for ranks in counted), default=0)
        # Ranks that a trial does not have repeat its last one: the maximum over ranks stays.
        rows = [[*ranks, *[ranks[-1]] * (most - len(ranks))] for ranks in counted]
        self.counted = Counted(*np.moveaxis(np.array(rows, dtype=float).reshape(len(rows), most, 10), -1, 0))
        self.measured = np.array([one.peak_memory_bytes or np.nan for one in self.trials])
        self.capacity = np.array([device_memory_bytes(one) for one in self.trials])

    def __len__(self) -> int:
        """Number of trials."""
        return len(self.trials)

    def peaks(self, overheads: MemoryOverheads) -> Floats:
        """[n] bytes of the fullest rank."""
        peaks: Floats = np.asarray(total_bytes(self.counted, overheads), dtype=np.float64).max(axis=1)
        return peaks

    def errors(self, overheads: MemoryOverheads) -> Floats:
        """[n] log(predicted / measured); where memory ran out, how far the prediction is below what there is."""
        peaks = self.peaks(overheads)
        short = np.minimum(np.log(peaks / (self.capacity * overheads.usable_share)), 0.0)
        errors: Floats = np.where(np.isnan(self.measured), short, np.log(peaks / self.measured))
        return errors


def count_memory(trials: Sequence[Trial]) -> list[list[Counted]]:
    """Memory of each pipeline rank of each trial, as the memory model counts it."""

    def make(one: Trial) -> MemoryModel:
        return MemoryModel(workload=one.workload, cluster=one.cluster, software=one.software, precision=one.precision)

    return [
        model.count(one.strategy, activation_limit=one.activation_limit)
        for model, one in zip(models_of(trials, make), trials, strict=True)
    ]


def device_memory_bytes(trial: Trial) -> float:
    """Memory of the smallest device of a trial's cluster."""
    return min(node.device.memory_bytes for node in trial.cluster.nodes)


def fit_memory(trials: Sequence[Trial]) -> FittedMemory:
    """Fit memory overheads to trials of one cluster; those that say nothing of memory are left out."""
    sample = MemorySample(trials)
    if not len(sample):
        return FittedMemory(overheads=MemoryOverheads(), residual_sd=NOISE, num_trials=0)
    prior = Prior.of(default_overheads(sample.trials[0].cluster, sample.trials[0].software))
    logs, _ = fit_constants(lambda logs: sample.errors(prior.at(logs)), prior, noise=NOISE, large=LARGE, max_nfev=60)
    overheads = prior.at(logs)
    errors = sample.errors(overheads)[~np.isnan(sample.measured)]
    spread = float(np.sqrt(np.mean(errors**2))) if len(errors) else NOISE
    return FittedMemory(overheads=overheads, residual_sd=spread, num_trials=len(sample))
