"""Cross-validation: every trial is predicted by a calibration that has not seen its group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.cost.memory.overheads import default_overheads, total_bytes
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.profile import Profile
from megatron_terapipe.search.op_times.profile_efficiency import measured_efficiency
from megatron_terapipe.search.op_times.profile_times import MeasuredProfile
from megatron_terapipe.search.trials.calibration.calibration import Calibration, on_several_nodes
from megatron_terapipe.search.trials.calibration.cluster_calibrations import Calibrations, calibrated_slopes
from megatron_terapipe.search.trials.calibration.memory_fit import count_memory, device_memory_bytes
from megatron_terapipe.search.trials.trial import Trial

Step = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """A trial and its prediction."""

    trial: Trial
    iteration_time_s: float
    interval_s: tuple[float, float]
    """Shortest and longest that the stated share of iterations takes."""
    peak_memory_bytes: float
    """Predicted for the fullest device."""
    fits: bool
    """Whether that fits."""
    calibration: Calibration
    """What the constants were fitted to."""


def predict_trials(
    trials: Sequence[Trial],
    calibrations: Calibrations,
    *,
    profile: Profile | None = None,
    step: Step = lambda _: None,
) -> list[Predicted]:
    """Predict each trial as if nobody had measured it.

    Args:
        profile: measured op times and links of the machine; None = the roofline.
        step: told how many trials are done.
    """
    places: dict[tuple[object, ...], list[int]] = {}
    for index, one in enumerate(trials):
        key = one.source, one.device, id(one.workload), id(one.cluster), one.software, one.precision
        places.setdefault(key, []).append(index)
    found: dict[int, Predicted] = {}
    for rows in places.values():
        alike = [trials[index] for index in rows]
        calibration = calibrations.of_trial(alike[0])
        found.update(zip(rows, _predict_alike(alike, calibration, profile), strict=True))
        step(len(rows))
    return [found[index] for index in range(len(trials))]


def _predict_alike(trials: Sequence[Trial], calibration: Calibration, profile: Profile | None) -> list[Predicted]:
    """Trials of one model on one cluster."""
    first = trials[0]
    efficiency = calibration.efficiency or HardwareEfficiency()
    op_times = None
    if profile is not None:
        op_times = MeasuredProfile(profile)
        efficiency = measured_efficiency(profile, first.cluster, efficiency, first.software)
    model = CostModel(
        first.workload,
        first.cluster,
        software=first.software,
        efficiency=efficiency,
        op_times=op_times,
        precision=first.precision,
    )
    if calibration.factors is not None:
        model = model.with_factors(calibration.factors)
    memory_overheads = calibration.memory_overheads or default_overheads(first.cluster, first.software)
    capacity = device_memory_bytes(first) * memory_overheads.usable_share
    slopes = calibrated_slopes(calibration, model, [one.strategy for one in trials])
    predicted = []
    for one, counted, row in zip(trials, count_memory(trials), slopes, strict=True):
        time_s = model.predict_time(one.strategy, activation_limit=one.activation_limit).iteration_time_s
        peak = float(np.max([total_bytes(rank, memory_overheads) for rank in counted]))
        predicted.append(
            Predicted(
                trial=one,
                iteration_time_s=time_s,
                interval_s=calibration.intervals.interval_s(time_s, row[None, :]),
                peak_memory_bytes=peak,
                fits=peak <= capacity,
                calibration=calibration,
            )
        )
    return predicted


Cluster = tuple[str, str, bool]
"""Source, devices, and whether on several nodes: what is calibrated apart."""

SEED = 2026
"""Which groups fall together; always the same ones."""


def deal_groups(trials: Sequence[Trial], num_folds: int, seed: int = SEED) -> list[int]:
    """Deal the groups of each cluster to folds, whole and as evenly as can be.

    Returns:
        [n] the fold of each trial.
    """
    groups: dict[Cluster, list[str]] = {}
    for one in trials:
        of_cluster = groups.setdefault(_cluster(one), [])
        if one.group not in of_cluster:
            of_cluster.append(one.group)
    fold_of: dict[tuple[Cluster, str], int] = {}
    for cluster, names in groups.items():
        order = np.random.default_rng(seed).permutation(len(names))
        for place, index in enumerate(order):
            fold_of[cluster, sorted(names)[index]] = place % num_folds
    return [fold_of[_cluster(one), one.group] for one in trials]


def _cluster(trial: Trial) -> Cluster:
    return trial.source, trial.device, on_several_nodes(trial.cluster)


LEFT_OUT: Mapping[str, Callable[[Trial], int]] = MappingProxyType(
    {
        "hidden_size": lambda one: max(layer.hidden_size for layer in one.workload.layers),
        "layers": lambda one: len(one.workload.layers),
        "devices": lambda one: sum(node.num_devices for node in one.cluster.nodes),
    }
)
"""What may be left out at a time, to see how predictions extrapolate; by name."""


def leave_out(trials: Sequence[Trial], what: str) -> list[int]:
    """Return the fold of each trial, [n]: trials that agree in something are in one."""
    return [LEFT_OUT[what](one) for one in trials]


def predict_in_folds(
    trials: Sequence[Trial],
    folds: Sequence[int],
    *,
    more: Sequence[Trial] = (),
    profile: Profile | None = None,
    step: Callable[[int], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Predicted]:
    """Predict each trial from those of the other folds.

    A cluster whose trials are all in one fold has no others to be calibrated on: nothing is fitted for it.

    Args:
        folds: of each trial, from `deal_groups` or `leave_out`.
        more: trials that every calibration sees.
        step: told how many trials are done.
    """
    places: dict[tuple[str, str, int], list[int]] = {}
    for index, (one, fold) in enumerate(zip(trials, folds, strict=True)):
        places.setdefault((one.source, one.device, fold), []).append(index)
    predicted: dict[int, Predicted] = {}
    for (*site, fold), rows in places.items():
        others = [
            one for one, own in zip(trials, folds, strict=True) if [one.source, one.device] == site and own != fold
        ]
        calibrations = Calibrations([*more, *others], progress=progress, profile=profile)
        found = predict_trials([trials[index] for index in rows], calibrations, profile=profile, step=step)
        predicted.update(zip(rows, found, strict=True))
    return [predicted[index] for index in range(len(trials))]
