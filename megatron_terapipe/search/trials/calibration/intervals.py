"""How far off a prediction may be: intervals that hold a stated share of measurements, honestly.

A prediction is uncertain for two reasons. The constants are known only so well: with slopes J of log(time) and the
covariance C of their logarithms that is a variance J C J'. And right constants leave a residual. Both together are the
scale of a strategy, larger the less it resembles what was measured.

How many scales wide an interval must be, the trials themselves say (conformal prediction: Vovk, Gammerman and Shafer,
Algorithmic Learning in a Random World, 2005, chapter 2; scaled residuals: Lei et al., arXiv 1604.04173 section 5.2):
each group of trials is predicted by a fit that has not seen it (`group_effects`), and the multiplier is the quantile of
|error| / scale, with the scale that this fit gives. Trials of one group are alike, so where there are few groups the
quantile is drawn to that of Student's t-distribution. Fewer than nine groups do not determine nine tenths: they may
widen an interval beyond that of a normal distribution, and not narrow it (docs/adr/0060).
"""

from dataclasses import dataclass
from math import ceil, exp, hypot, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.op_times.constants import Prior
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.trials.calibration.fit import LARGE, NOISE, weights_of
from megatron_terapipe.search.trials.calibration.group_effects import GroupEffects

Floats = NDArray[np.float64]

COVERAGE = 0.9
"""Share of measurements that shall be inside."""

PRIOR_RESIDUAL_SD = 0.12
"""Standard deviation of log(measured / predicted) where nothing was calibrated, beside what the prior of the constants
says: about what the default efficiency leaves on the published trials (docs/benchmarks)."""

USUAL_RESIDUAL_SD = 0.05
"""Standard deviation of log(measured / predicted) that fits usually leave on groups which they have not seen, over
published trials of several clusters."""

USUAL_GROUPS = 4
"""Groups that it weighs as much as: trials of few groups may agree with a fit by chance."""

NORMAL = 1.645
"""Standard deviations of a normal distribution that hold 90 %."""

PRIOR_GROUPS = 2
"""Groups that the quantile of Student's t-distribution, for as many groups as there are and one, weighs as much as:
trials of few groups may agree with each other by chance."""


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Intervals of predicted times."""

    coverage: float
    """Share of measurements that shall be inside."""
    multiplier: float
    """Half the width of an interval, in scales."""
    residual_sd: float
    """Standard deviation of log(measured / predicted) that right constants leave."""
    covariance: Floats
    """[p, p] of the logarithms of the constants."""
    parameter_names: tuple[str, ...]

    def half_width(self, slopes: Floats) -> Floats:
        """Half the width of log(time).

        Args:
            slopes: [n, p] of the strategies, from `sensitivities`.

        Returns:
            [n], so that time / exp(width) to time * exp(width) is the interval.
        """
        return self.multiplier * _scale(self.residual_sd, self.covariance, slopes)

    def interval_s(self, time_s: float, slopes: Floats) -> tuple[float, float]:
        """Shortest and longest seconds of one strategy.

        Args:
            time_s: predicted seconds.
            slopes: its sensitivities to the constants, [1, p].
        """
        factor = exp(float(self.half_width(slopes)[0]))
        return time_s / factor, time_s * factor


def uncalibrated(prior: Prior[Any] | None = None) -> Intervals:
    """Return intervals before any trial was seen: as wide as the prior; None = that of `HardwareEfficiency`."""
    prior = prior or Prior.of(HardwareEfficiency())
    return Intervals(
        coverage=COVERAGE,
        multiplier=NORMAL,
        residual_sd=PRIOR_RESIDUAL_SD,
        covariance=np.diag(prior.widths**2),
        parameter_names=prior.names,
    )


def conformal(
    errors: Floats,
    slopes: Floats,
    groups: GroupEffects,
    *,
    prior: Prior[Any],
    residual_sd: float,
    covariance: Floats | None = None,
) -> Intervals:
    """Return intervals from n trials with a time, each predicted as if the fit had not seen its group.

    Args:
        errors: [n] log(predicted / measured) of the fit.
        slopes: [n, p] of log(time).
        residual_sd: standard deviation of the errors, the fit's freedom taken off.
        covariance: [p, p] of the logarithms of the constants; None = what slopes and errors say.
    """
    from scipy.special import stdtrit

    count = len(groups)
    spread = sqrt((count * residual_sd**2 + USUAL_GROUPS * USUAL_RESIDUAL_SD**2) / (count + USUAL_GROUPS))
    if covariance is None:
        covariance = np.linalg.inv(slopes.T @ slopes / spread**2 + np.diag(prior.widths**-2.0)).astype(np.float64)
    # Trials count as much as they did in the fit: less where they are far off.
    variances = spread**2 / weights_of(errors / NOISE, LARGE)
    unseen = groups.unseen(errors, slopes, variances, prior.widths)
    scores = np.abs(unseen.errors) / np.sqrt(spread**2 + unseen.variances)
    seen_share = count / (count + PRIOR_GROUPS)
    usual = float(stdtrit(count + 1, (1 + COVERAGE) / 2))
    multiplier = conformal_quantile(scores, COVERAGE) ** seen_share * usual ** (1 - seen_share)
    determined = ceil((count + 1) * COVERAGE) <= count
    return Intervals(
        coverage=COVERAGE,
        multiplier=multiplier if determined else max(multiplier, NORMAL),
        residual_sd=hypot(spread, groups.offset),
        covariance=covariance,
        parameter_names=prior.names,
    )


def conformal_quantile(scores: Floats, coverage: float) -> float:
    """Quantile that holds a new score with at least this probability, if all are alike.

    Of n scores it is the ceil((n + 1) coverage)-th smallest. Where n is too small for one, Student's t-distribution
    says how far beyond the largest it may be.

    Args:
        scores: [n].
    """
    rank = ceil((len(scores) + 1) * coverage)
    if rank <= len(scores):
        return float(np.sort(scores)[rank - 1])
    from scipy.special import stdtrit

    spread = float(np.sqrt(np.mean(scores**2)))
    return max(float(scores.max()), spread * float(stdtrit(len(scores), (1 + coverage) / 2)))


def _scale(residual_sd: float, covariance: Floats, slopes: Floats) -> Floats:
    scale: Floats = np.sqrt(residual_sd**2 + np.einsum("np,pq,nq->n", slopes, covariance, slopes))
    return scale
