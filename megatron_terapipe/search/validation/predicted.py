"""Trials with what was predicted of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_terapipe.search.calibrate.calibration import Calibration
from megatron_terapipe.search.calibrate.clusters import Calibrations
from megatron_terapipe.search.calibrate.memory_fit import count_memory, device_memory_bytes
from megatron_terapipe.search.calibrate.slopes import calibrated_slopes
from megatron_terapipe.search.cost.model import CostModel
from megatron_terapipe.search.cost.physics import Physics
from megatron_terapipe.search.memory.assembly import total_bytes
from megatron_terapipe.search.memory.physics import default_physics
from megatron_terapipe.search.profile import MeasuredProfile, Profile, measured_physics
from megatron_terapipe.search.trials.trial import Trial

Step = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """A trial and its prediction.

    Attributes:
        trial: what was measured.
        iteration_time_s: predicted.
        interval_s: shortest and longest that the stated share of iterations takes.
        peak_memory_bytes: predicted for the fullest device.
        fits: whether that fits.
        calibration: what the constants were fitted to.
    """

    trial: Trial
    iteration_time_s: float
    interval_s: tuple[float, float]
    peak_memory_bytes: float
    fits: bool
    calibration: Calibration


def predict_trials(
    trials: Sequence[Trial],
    calibrations: Calibrations,
    *,
    profile: Profile | None = None,
    step: Step = lambda _: None,
) -> list[Predicted]:
    """Predict each trial as if nobody had measured it.

    Args:
        trials: any.
        calibrations: of their clusters.
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
    physics = calibration.physics or Physics()
    op_times = None
    if profile is not None:
        op_times = MeasuredProfile(profile)
        physics = measured_physics(profile, first.cluster, physics, first.software)
    model = CostModel(
        first.workload,
        first.cluster,
        software=first.software,
        physics=physics,
        op_times=op_times,
        precision=first.precision,
    )
    if calibration.factors is not None:
        model = calibration.factors.model(model)
    memory_physics = calibration.memory_physics or default_physics(first.cluster)
    capacity = device_memory_bytes(first) * memory_physics.usable_share
    slopes = calibrated_slopes(calibration, model, [one.strategy for one in trials])
    predicted = []
    for one, counted, row in zip(trials, count_memory(trials), slopes, strict=True):
        time_s = model.predict_time(one.strategy, activation_limit=one.activation_limit).iteration_time_s
        peak = float(np.max([total_bytes(rank, memory_physics) for rank in counted]))
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
