"""Factors on a measured profile from measured runs: the most probable ones, given what was known of them before.

A profile leaves few things open, so few factors are fitted, as logarithms with a prior around 1 and a robust loss, as
`fit` does with constants of the roofline. Trials are priced on their real schedules. Gauss-Newton: times are taken as
straight lines in the logarithms of the factors, which they nearly are, and drawn again where the last ones led.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.op_times.profile import Profile
from megatron_terapipe.search.op_times.profile_efficiency import measured_efficiency
from megatron_terapipe.search.op_times.profile_factors import ProfileFactors, RememberedTimes
from megatron_terapipe.search.op_times.profile_times import MeasuredProfile
from megatron_terapipe.search.trials.calibration import Calibration, calibration_of
from megatron_terapipe.search.trials.fit import NOISE, fit_lines
from megatron_terapipe.search.trials.intervals import intervals_left_out, uncalibrated
from megatron_terapipe.search.trials.trial import Trial
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

PRIOR_WIDTH: Mapping[str, float] = MappingProxyType({"ops": 0.4, "messages": 0.8, "gaps": 0.7, "step": 0.5})
"""Factors that are fitted, and the standard deviation of their logarithms before any trial was seen: guesses, the first
wide enough for two ranks that share what one had alone, the second for collectives that wait for a busy processor."""

STEP = 0.05
"""Change of a factor's logarithm over which a slope is taken."""

LINES = 3
"""How often times are drawn as straight lines."""


@dataclass(frozen=True)
class _Runs:
    """Trials that say something about time, and what prices each as the profile has it."""

    trials: tuple[Trial, ...]
    models: tuple[CostModel, ...]
    measured: Floats
    cut_off: NDArray[np.bool_]

    @classmethod
    def of(cls, trials: Sequence[Trial], profile: MeasuredProfile) -> "_Runs":
        known = tuple(one for one in trials if one.iteration_time_s or one.longer_than_s)
        shared: dict[tuple[object, ...], CostModel] = {}
        op_times = RememberedTimes(profile)
        for one in known:
            key = _shared_by(one)
            if key not in shared:
                shared[key] = CostModel(
                    one.workload,
                    one.cluster,
                    software=one.software,
                    efficiency=measured_efficiency(profile.profile, one.cluster, software=one.software),
                    op_times=op_times,
                    precision=one.precision,
                )
        return cls(
            known,
            tuple(shared[_shared_by(one)] for one in known),
            np.array([one.iteration_time_s or one.longer_than_s or 0.0 for one in known]),
            np.array([one.iteration_time_s is None for one in known], dtype=bool),
        )

    def log_times(self, factors: ProfileFactors) -> Floats:
        """[n] logarithms of predicted seconds."""
        moved = {id(model): model.with_factors(factors) for model in self.models}
        return np.array(
            [
                _log_time(moved[id(model)], one.strategy, one.activation_limit)
                for model, one in zip(self.models, self.trials, strict=True)
            ]
        )

    def slopes(self, factors: ProfileFactors, log_times: Floats) -> Floats:
        """[n, p] change of them with the logarithm of each factor."""
        columns = [self.log_times(_moved(factors, name)) - log_times for name in PRIOR_WIDTH]
        return np.stack(columns, axis=1) / STEP


def calibrate_on_profile(
    trials: Sequence[Trial], profile: Profile, memory_trials: Sequence[Trial] | None = None
) -> Calibration:
    """Fit factors on a profile, and constants of memory, to trials of its cluster.

    Trials of models that the profile has not measured say nothing of the factors, and are left out.

    Args:
        trials: at least one.
        profile: of these devices.
        memory_trials: those that memory is fitted to; None = the same.

    Raises:
        ConfigError: if no trial is of a model that the profile covers.
    """
    measured = MeasuredProfile(profile)
    covered = [one for one in trials if one.precision == profile.precision and measured.covers(one.workload)]
    if not covered:
        raise ConfigError(
            f"--profile {profile.source or 'just measured'} covers no trial of {trials[0].path or 'the given'}: it has "
            f"other layers than their models, or is not {trials[0].precision}: measure one of these models, or drop "
            "one of the flags"
        )
    left_out = len(trials) - len(covered)
    notes = (f"{left_out} trials are of models that the profile does not cover, and are left out",) if left_out else ()
    runs = _Runs.of(covered, measured)
    factors, intervals = ProfileFactors(), uncalibrated(PRIOR_WIDTH)
    if len(runs.trials):
        logs = np.zeros(len(PRIOR_WIDTH))
        widths = np.array([*PRIOR_WIDTH.values()])
        for _ in range(LINES):
            at = _factors(logs)
            log_times = runs.log_times(at)
            slopes = runs.slopes(at, log_times)
            # The straight lines' values where all factors are 1.
            errors = log_times - np.log(runs.measured) - slopes @ logs
            logs = fit_lines(errors, slopes, widths, runs.cut_off, NOISE)
        factors = _factors(logs)
        errors = runs.log_times(factors) - np.log(runs.measured)
        seen = ~runs.cut_off
        if seen.any():
            intervals = intervals_left_out(errors[seen], slopes[seen], PRIOR_WIDTH, NOISE)
    return calibration_of(
        covered,
        memory_trials=trials if memory_trials is None else memory_trials,
        factors=factors,
        intervals=intervals,
        num_trials=len(runs.trials),
        notes=notes,
    )


def factor_slopes(model: CostModel, strategies: Sequence[Strategy]) -> Floats:
    """How much each factor moves the times of strategies that nobody ran.

    Args:
        model: prices them with the factors that trials gave.
        strategies: n of them.

    Returns:
        [n, p] change of log(time) with the logarithm of each factor, in the order of `PRIOR_WIDTH`.
    """
    known = model.with_efficiency(model.efficiency, RememberedTimes(model.op_times))
    models = [known, *(known.with_factors(_moved(ProfileFactors(), name)) for name in PRIOR_WIDTH)]
    times = np.array([[_log_time(each, one) for each in models] for one in strategies])
    slopes: Floats = (times[:, 1:] - times[:, :1]) / STEP
    return slopes


def _log_time(model: CostModel, strategy: Strategy, activation_limit: float | None = None) -> float:
    return float(np.log(model.predict_time(strategy, activation_limit=activation_limit).iteration_time_s))


def _factors(logs: Floats) -> ProfileFactors:
    return ProfileFactors(**dict(zip(PRIOR_WIDTH, np.exp(logs).tolist(), strict=True)))


def _moved(factors: ProfileFactors, name: str) -> ProfileFactors:
    return replace(factors, **{name: getattr(factors, name) * float(np.exp(STEP))})


def _shared_by(trial: Trial) -> tuple[object, ...]:
    return id(trial.workload), id(trial.cluster), trial.software, trial.precision
