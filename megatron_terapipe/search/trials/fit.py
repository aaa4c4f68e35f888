"""Constants from measured runs: the most probable ones, given what was known of them before.

Constants are fitted as logarithms. Each starts at its default, from which its prior says how far it may be; each
measured run pulls at those that its time depends on. So eight runs already help, and none is fitted by heart: there is
no constant of a single strategy, model or row. A robust loss keeps a failed run from spoiling the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.op_times.constants import Prior
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.trials.sample import Sample

Floats = NDArray[np.float64]

NOISE = 0.04
"""Standard deviation of the logarithm of a measured time that constants this coarse leave, before any were fitted."""

LARGE = 2.5
"""Residual, in standard deviations of `NOISE`, from which the loss grows no longer with its square (soft L1)."""

SIMULATIONS = 2
"""How often closed forms are held to the simulator: with the constants of the fit before."""


def fit_constants(
    errors: Callable[[Floats], Floats],
    prior: Prior[Any],
    *,
    noise: float = NOISE,
    large: float = LARGE,
    begin: Floats | None = None,
    **settings: Any,
) -> tuple[Floats, Floats]:
    """Return the most probable constants, and how surely the trials and the prior determine them.

    Args:
        errors: takes [p] logarithms of constant / start, and returns [n] log(predicted / measured).
        prior: of the p constants.
        noise: standard deviation of the errors that right constants leave.
        large: error, in standard deviations, from which the loss grows no longer with its square.
        begin: [p] logarithms that the fit begins with; None = those of the prior.
        **settings: of `scipy.optimize.least_squares`.

    Returns:
        [p] logarithms, and [p, p] the inverse of their covariance if the errors' standard deviation is `noise`.
    """
    from scipy.optimize import least_squares

    def residuals(logs: Floats) -> Floats:
        return np.concatenate([soft_l1(errors(logs) / noise, large), logs / prior.widths])

    solution = least_squares(
        residuals,
        np.zeros(len(prior.names)) if begin is None else begin,
        x_scale=prior.widths,
        bounds=(-np.inf, prior.most + 1e-9),
        **settings,
    )
    return solution.x, solution.jac.T @ solution.jac


def soft_l1(scaled: Floats, large: float) -> Floats:
    """Residuals [n] whose square is the soft L1 loss, 2 large^2 (sqrt(1 + z^2) - 1) for z = residual / large.

    Args:
        scaled: residuals [n], in standard deviations.
        large: residual from which on the loss no longer grows with their square.
    """
    return np.asarray(np.sign(scaled) * large * np.sqrt(2 * (np.sqrt(1 + (scaled / large) ** 2) - 1)), dtype=np.float64)


def residual_sd_of(errors: Floats, precision: Floats, prior: Prior[Any]) -> float:
    """Standard deviation of the errors that a fit leaves, its freedom taken off.

    Args:
        errors: [n] log(predicted / measured).
        precision: [p, p] inverse of the covariance of the logarithms, the prior's part in it.
        prior: of the p constants.
    """
    # Of every constant the trials determine a part, and the prior the rest.
    determined = len(prior.names) - float(np.sum(np.diag(np.linalg.inv(precision)) / prior.widths**2))
    return float(np.sqrt(np.sum(errors**2) / max(len(errors) - determined, 1.0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedEfficiency:
    """HardwareEfficiency after some trials, and how sure it is.

    Attributes:
        efficiency: the most probable constants.
        covariance: [p, p] of the logarithms of the fitted ones, in the order of the prior.
        residual_sd: standard deviation of log(measured / predicted) over the trials, the fit's freedom taken off.
    """

    efficiency: HardwareEfficiency
    covariance: Floats
    residual_sd: float


def fit_efficiency(sample: Sample) -> FittedEfficiency:
    """Fit efficiency to trials of one cluster, which may be of several models and layouts.

    A trial without a time says nothing, unless it says how long it took at least: then a prediction is wrong only
    below that.
    """
    prior = Prior.of(HardwareEfficiency())
    inverse = np.diag(prior.widths**-2.0)
    if not len(sample):
        return FittedEfficiency(efficiency=prior.start, covariance=np.diag(prior.widths**2), residual_sd=NOISE)
    found, precision, ratio = np.zeros(len(prior.names)), inverse, np.ones(len(sample))

    def errors(logs: Floats) -> Floats:
        return sample.errors(prior.at(logs), ratio)

    for _ in range(SIMULATIONS):
        ratio = sample.simulated_ratio(prior.at(found))
        found, precision = fit_constants(errors, prior, begin=found, ftol=1e-4, xtol=1e-4)
    spread = residual_sd_of(errors(found), precision, prior)
    weight = min((NOISE / max(spread, 1e-9)) ** 2, 1.0)
    covariance: Floats = np.linalg.inv((precision - inverse) * weight + inverse).astype(np.float64)
    return FittedEfficiency(efficiency=prior.at(found), covariance=covariance, residual_sd=spread)
