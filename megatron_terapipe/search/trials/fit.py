"""HardwareEfficiency from measured runs: the most probable constants, given what was known of them before.

Constants are fitted as logarithms. Each starts at its default, from which `PRIOR_WIDTH` says how far it may be; each
measured run pulls at those that its time depends on. So eight runs already help, and none is fitted by heart: there is
no constant of a single strategy, model or row. A robust loss keeps a failed run from spoiling the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.op_times.hardware_efficiency import PRIOR_WIDTH, SHARES, HardwareEfficiency
from megatron_terapipe.search.trials.sample import Sample
from megatron_terapipe.search.trials.trial import Trial

Floats = NDArray[np.float64]


def soft_l1(scaled: Floats, large: float) -> Floats:
    """Residuals whose square is the soft L1 loss, 2 large^2 (sqrt(1 + z^2) - 1) for z = residual / large.

    Args:
        scaled: residuals, in standard deviations.
        large: from which on the loss grows no longer with their square.
    """
    return np.asarray(np.sign(scaled) * large * np.sqrt(2 * (np.sqrt(1 + (scaled / large) ** 2) - 1)), dtype=np.float64)


NOISE = 0.04
"""Standard deviation of the logarithm of a measured time that constants this coarse leave, before any were fitted."""

LARGE = 2.5
"""Residual, in standard deviations of `NOISE`, from which the loss grows no longer with its square (soft L1)."""

SIMULATIONS = 2
"""How often closed forms are held to the simulator: with the constants of the fit before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedEfficiency:
    """HardwareEfficiency after some trials, and how sure it is.

    Attributes:
        efficiency: the most probable constants.
        covariance: [p, p] of the logarithms of the fitted ones.
        residual_sd: standard deviation of log(measured / predicted) over the trials, the fit's freedom taken off.
        parameter_names: the p constants.
        num_trials: how many trials it saw.
    """

    efficiency: HardwareEfficiency
    covariance: Floats
    residual_sd: float
    parameter_names: tuple[str, ...]
    num_trials: int


def fit(
    trials: Sequence[Trial],
    efficiency: HardwareEfficiency | None = None,
    *,
    prior_width: Mapping[str, float] = PRIOR_WIDTH,
    noise: float = NOISE,
) -> FittedEfficiency:
    """Fit efficiency to trials of one cluster.

    A trial without a time says nothing, unless it says how long it took at least: then a prediction is wrong only
    below that.

    Args:
        trials: measured runs; they may be of several models and layouts.
        efficiency: constants before the first trial; None = the defaults.
        prior_width: constants that are fitted, and the standard deviation of their logarithms before.
        noise: standard deviation of log(measured / predicted) that is expected of right constants.
    """
    from scipy.optimize import least_squares

    start = efficiency or HardwareEfficiency()
    names = tuple(prior_width)
    widths = np.array([prior_width[name] for name in names])
    sample = Sample.of(trials)
    found = np.zeros(len(names))
    if not len(sample):
        return FittedEfficiency(
            efficiency=start,
            covariance=np.diag(widths**2),
            residual_sd=noise,
            parameter_names=names,
            num_trials=0,
        )

    # No share is more than the whole.
    most = np.array([-np.log(getattr(start, name)) if name in SHARES else np.inf for name in names])

    def at(logs: Floats) -> HardwareEfficiency:
        return replace(
            start, **{name: getattr(start, name) * float(np.exp(log)) for name, log in zip(names, logs, strict=True)}
        )

    def residuals(logs: Floats, ratio: Floats) -> Floats:
        scaled = sample.errors(at(logs), ratio) / noise
        return np.concatenate([soft_l1(scaled, LARGE), logs / widths])

    ratio = np.ones(len(sample))
    for _ in range(SIMULATIONS):
        ratio = sample.simulated_ratio(at(found))
        solution = least_squares(
            residuals, found, args=(ratio,), x_scale=widths, bounds=(-np.inf, most + 1e-9), ftol=1e-4, xtol=1e-4
        )
        found = solution.x
    errors = sample.errors(at(found), ratio)
    # Of every constant the trials determine a part, and the prior the rest.
    precision = solution.jac.T @ solution.jac
    determined = len(names) - float(np.sum(np.diag(np.linalg.inv(precision)) / widths**2))
    freedom = max(len(sample) - determined, 1.0)
    spread = float(np.sqrt(np.sum(errors**2) / freedom))
    weight = (noise / max(spread, 1e-9)) ** 2
    data = precision - np.diag(widths**-2.0)
    return FittedEfficiency(
        efficiency=at(found),
        covariance=np.linalg.inv(data * min(weight, 1.0) + np.diag(widths**-2.0)),
        residual_sd=spread,
        parameter_names=names,
        num_trials=len(sample),
    )


def fit_lines(
    errors: Floats, slopes: Floats, widths: Floats, cut_off: NDArray[np.bool_], noise: float = NOISE
) -> Floats:
    """The most probable logarithms of constants, where log(time) is a straight line in each of them.

    Args:
        errors: [n] log(predicted / measured) where all logarithms are 0.
        slopes: [n, p] of log(predicted).
        widths: [p] standard deviations of the logarithms before any trial was seen.
        cut_off: [n] whether a run took longer than measured: only too short a prediction is wrong.
        noise: standard deviation of log(measured / predicted) that is expected of right constants.
    """
    from scipy.optimize import least_squares

    def residuals(logs: Floats) -> Floats:
        left = errors + slopes @ logs
        return np.concatenate([soft_l1(np.where(cut_off & (left > 0), 0.0, left) / noise, LARGE), logs / widths])

    found: Floats = least_squares(residuals, np.zeros(len(widths)), x_scale=widths).x
    return found
