"""Constants of the memory model from measured peaks: the most probable ones, given what was known before.

As in `fit`, constants are fitted as logarithms around their defaults, and a robust loss bears with odd readings. A run
that ran out of memory says that it wanted more than there is, and one that did not, that it wanted less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.memory_model import MemoryModel
from megatron_terapipe.search.cost.memory_overheads import (
    PRIOR_WIDTH,
    Counted,
    MemoryOverheads,
    default_overheads,
    total_bytes,
)
from megatron_terapipe.search.trials.fit import soft_l1
from megatron_terapipe.search.trials.trial import Trial

Floats = NDArray[np.float64]

NOISE = 0.05
"""Standard deviation of log(measured / predicted) that is expected of right constants: tables give whole GB."""

LARGE = 1.5
"""Residual, in standard deviations, from which the loss grows no longer with its square (soft L1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedMemory:
    """Memory overheads after some trials.

    Attributes:
        overheads: the most probable constants.
        residual_sd: standard deviation of log(measured / predicted) over the trials with a peak.
        num_trials: how many said something of memory.
    """

    overheads: MemoryOverheads
    residual_sd: float
    num_trials: int


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
    """What the memory model counts for each pipeline rank of each trial."""
    models: dict[tuple[object, ...], MemoryModel] = {}
    counted = []
    for one in trials:
        key = id(one.workload), id(one.cluster), one.software, one.precision
        if key not in models:
            models[key] = MemoryModel(
                workload=one.workload, cluster=one.cluster, software=one.software, precision=one.precision
            )
        counted.append(models[key].count(one.strategy, activation_limit=one.activation_limit))
    return counted


def device_memory_bytes(trial: Trial) -> float:
    """Memory of the smallest device of a trial's cluster."""
    return min(node.device.memory_bytes for node in trial.cluster.nodes)


def fit_memory(
    trials: Sequence[Trial],
    overheads: MemoryOverheads | None = None,
    *,
    prior_width: Mapping[str, float] = PRIOR_WIDTH,
    noise: float = NOISE,
) -> FittedMemory:
    """Fit memory overheads to trials of one cluster.

    Args:
        trials: measured runs; those without a peak that did not run out of memory say nothing.
        overheads: constants before the first trial; None = the defaults.
        prior_width: constants that are fitted, and the standard deviation of their logarithms before.
        noise: standard deviation of log(measured / predicted) that is expected of right constants.
    """
    from scipy.optimize import least_squares

    sample = MemorySample(trials)
    if not len(sample):
        return FittedMemory(overheads=overheads or MemoryOverheads(), residual_sd=noise, num_trials=0)
    start = overheads or default_overheads(sample.trials[0].cluster)
    names = tuple(prior_width)
    widths = np.array([prior_width[name] for name in names])

    def at(logs: Floats) -> MemoryOverheads:
        values = {name: getattr(start, name) * float(np.exp(log)) for name, log in zip(names, logs, strict=True)}
        return replace(start, **values)

    def residuals(logs: Floats) -> Floats:
        return np.concatenate([soft_l1(sample.errors(at(logs)) / noise, LARGE), logs / widths])

    found = least_squares(residuals, np.zeros(len(names)), x_scale=widths, max_nfev=60).x
    errors = sample.errors(at(found))[~np.isnan(sample.measured)]
    spread = float(np.sqrt(np.mean(errors**2))) if len(errors) else noise
    return FittedMemory(overheads=at(found), residual_sd=spread, num_trials=len(sample))
