"""Factors on a measured profile from measured runs: the most probable ones, given what was known of them before.

A profile leaves few things open, so few factors are fitted, as logarithms with a prior around 1 and a robust loss, as
`fit` does with constants of the roofline. Trials are priced on their real schedules. Gauss-Newton: times are taken as
straight lines in the logarithms of the factors, which they nearly are, and drawn again where the last ones led.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.op_times.constants import Prior, moved
from megatron_terapipe.search.op_times.profile import Profile
from megatron_terapipe.search.op_times.profile_efficiency import measured_cluster, measured_efficiency
from megatron_terapipe.search.op_times.profile_factors import ProfileFactors, RememberedTimes
from megatron_terapipe.search.op_times.profile_times import MeasuredProfile
from megatron_terapipe.search.trials.calibration.calibration import Calibration, calibration_of
from megatron_terapipe.search.trials.calibration.fit import NOISE, fit_constants, residual_sd_of
from megatron_terapipe.search.trials.calibration.group_effects import GroupEffects
from megatron_terapipe.search.trials.calibration.intervals import conformal, uncalibrated
from megatron_terapipe.search.trials.trial import Trial, models_of
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

PRIOR = Prior.of(ProfileFactors())
"""Factors that are fitted, around 1."""

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
        known = tuple(one for one in trials if one.least_time_s)
        op_times = RememberedTimes(profile)

        def make(one: Trial) -> CostModel:
            return CostModel(
                one.workload,
                measured_cluster(profile.profile, one.cluster),
                software=one.software,
                efficiency=measured_efficiency(profile.profile, one.cluster, software=one.software),
                op_times=op_times,
                precision=one.precision,
            )

        return cls(
            known,
            tuple(models_of(known, make)),
            np.array([one.least_time_s for one in known]),
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
        columns = [self.log_times(moved(factors, [name], STEP)) - log_times for name in PRIOR.names]
        return np.stack(columns, axis=1) / STEP

    def errors_on_lines(self, at_one: Floats, slopes: Floats, logs: Floats) -> Floats:
        """Return [n] log(predicted / measured), where the logarithms of times are straight lines.

        Args:
            at_one: [n] the same where all factors are 1.
            slopes: [n, p] of the lines.
            logs: [p] logarithms of the factors.
        """
        errors = at_one + slopes @ logs
        return np.where(self.cut_off & (errors > 0), 0.0, errors)


def calibrate_on_profile(
    trials: Sequence[Trial], profile: Profile, memory_trials: Sequence[Trial] | None = None
) -> Calibration:
    """Fit factors on a profile, and constants of memory, to trials of its cluster.

    Trials of models that the profile has not measured say nothing of the factors, and are left out.

    Args:
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
    factors, intervals = ProfileFactors(), uncalibrated(PRIOR)
    if len(runs.trials):
        logs = np.zeros(len(PRIOR.names))
        for _ in range(LINES):
            at = PRIOR.at(logs)
            log_times = runs.log_times(at)
            slopes = runs.slopes(at, log_times)
            line = partial(runs.errors_on_lines, log_times - np.log(runs.measured) - slopes @ logs, slopes)
            logs, _ = fit_constants(line, PRIOR)
        factors = PRIOR.at(logs)
        errors = runs.log_times(factors) - np.log(runs.measured)
        seen = ~runs.cut_off
        if seen.any():
            errors, slopes = errors[seen], slopes[seen]
            precision = slopes.T @ slopes / NOISE**2 + np.diag(PRIOR.widths**-2.0)
            spread = residual_sd_of(errors, precision, PRIOR)
            intervals = conformal(
                errors, slopes, GroupEffects(range(len(errors)), share=0.0, offset=0.0), prior=PRIOR, residual_sd=spread
            )
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

    Returns:
        [n, p] change of log(time) with the logarithm of each factor, in the order of `PRIOR`.
    """
    known = model.with_efficiency(model.efficiency, RememberedTimes(model.op_times))
    models = [known, *(known.with_factors(moved(ProfileFactors(), [name], STEP)) for name in PRIOR.names)]
    times = np.array([[_log_time(each, one) for each in models] for one in strategies])
    slopes: Floats = (times[:, 1:] - times[:, :1]) / STEP
    return slopes


def _log_time(model: CostModel, strategy: Strategy, activation_limit: float | None = None) -> float:
    return float(np.log(model.predict_time(strategy, activation_limit=activation_limit).iteration_time_s))
