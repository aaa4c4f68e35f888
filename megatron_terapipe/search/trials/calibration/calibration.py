"""Calibration on trials of one cluster: constants of time and of memory, and their uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_terapipe.search.cost.memory.overheads import MemoryOverheads
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.op_times.constants import Prior
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.kernel_efficiency import is_guessed
from megatron_terapipe.search.op_times.profile_factors import ProfileFactors
from megatron_terapipe.search.trials.calibration.fit import fit_efficiency
from megatron_terapipe.search.trials.calibration.intervals import Intervals, conformal, uncalibrated
from megatron_terapipe.search.trials.calibration.memory_fit import fit_memory
from megatron_terapipe.search.trials.calibration.sample import Sample, sample_sensitivities
from megatron_terapipe.search.trials.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants of one cluster."""

    source: str = ""
    """Who measured the trials; empty = nobody did, these are the defaults."""
    device: str = ""
    """Kinds of devices that they ran on."""
    several_nodes: bool | None = None
    """Whether on several nodes; None = some on one and some on several."""
    efficiency: HardwareEfficiency | None = None
    """Of time; None = the defaults of the devices."""
    factors: ProfileFactors | None = None
    """On a measured profile, which then says the rest; None = trials were priced without one."""
    memory_overheads: MemoryOverheads | None = None
    """Of memory; None = the defaults of the devices."""
    intervals: Intervals
    memory_sd: float = 0.12
    """Standard deviation of log(measured / predicted) peaks."""
    num_trials: int = 0
    num_memory_trials: int = 0
    """Trials with a peak, or that ran out of memory."""
    notes: tuple[str, ...] = ()
    """What was left out, a line each."""


KERNELS = frozenset({"gemm_efficiency", "gemm_area", "attention_efficiency", "fused_attention", "memory_efficiency"})
"""Constants of kernels."""

GUESSED = 2.0
"""How much wider their priors are on devices of whose generation there is no table."""


def no_calibration(cluster: Cluster | None = None) -> Calibration:
    """Defaults, and how far off they may be.

    Args:
        cluster: whose devices they are of; None = A100s.
    """
    prior = Prior.of(HardwareEfficiency())
    if cluster is not None and any(is_guessed(node.device) for node in cluster.nodes):
        wider = np.array([GUESSED if name in KERNELS else 1.0 for name in prior.names])
        prior = replace(prior, widths=prior.widths * wider)
    return Calibration(intervals=uncalibrated(prior))


def on_several_nodes(cluster: Cluster) -> bool:
    """Whether ranks of a cluster can be on different nodes."""
    return len(cluster.nodes) > 1


def calibrate(trials: Sequence[Trial], memory_trials: Sequence[Trial] | None = None) -> Calibration:
    """Fit everything that trials of one cluster say.

    Args:
        trials: at least one; they may be of several models, layouts and groups.
        memory_trials: those that memory is fitted to; None = the same.
    """
    sample = Sample.of(trials)
    fitted = fit_efficiency(sample)
    efficiency, prior, seen = fitted.efficiency, Prior.of(HardwareEfficiency()), ~sample.cut_off
    intervals = uncalibrated()
    if seen.any():
        intervals = conformal(
            sample.errors(efficiency, sample.simulated_ratio(efficiency))[seen],
            sample_sensitivities(sample, efficiency, prior.names)[seen],
            fitted.groups.some(seen),
            prior=prior,
            residual_sd=fitted.residual_sd,
            covariance=fitted.covariance,
        )
    return calibration_of(
        trials,
        memory_trials=trials if memory_trials is None else memory_trials,
        efficiency=efficiency,
        intervals=intervals,
        num_trials=len(sample),
    )


def calibration_of(
    trials: Sequence[Trial],
    *,
    memory_trials: Sequence[Trial],
    intervals: Intervals,
    num_trials: int,
    efficiency: HardwareEfficiency | None = None,
    factors: ProfileFactors | None = None,
    notes: tuple[str, ...] = (),
) -> Calibration:
    """Put what trials said of time together with what they say of memory.

    Args:
        num_trials: how many of them have a time.
    """
    memory = fit_memory(memory_trials)
    spreads = {on_several_nodes(one.cluster) for one in trials}
    return Calibration(
        several_nodes=spreads.pop() if len(spreads) == 1 else None,
        source=", ".join(sorted({one.source for one in trials})),
        device=", ".join(sorted({one.device for one in trials})),
        efficiency=efficiency,
        factors=factors,
        memory_overheads=memory.overheads if memory.num_trials else None,
        intervals=intervals,
        memory_sd=memory.residual_sd,
        num_trials=num_trials,
        num_memory_trials=memory.num_trials,
        notes=notes,
    )
