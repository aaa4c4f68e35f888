"""Constants from measured runs: the most probable ones, given what was known of them before.

Constants are fitted as logarithms. Each starts at its default, from which its prior says how far it may be; each
measured run pulls at those that its time depends on. So eight runs already help, and none is fitted by heart: there is
no constant of a single strategy, model or row. A robust loss keeps a failed run from spoiling the rest, and errors that
the runs of a group share count once, not once for each run (`group_effects`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.op_times.constants import Prior
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.trials.calibration.group_effects import GroupEffects
from megatron_terapipe.search.trials.calibration.sample import Sample, sample_sensitivities

Floats = NDArray[np.float64]

NOISE = 0.03
"""Standard deviation of the logarithm of a measured time that constants this coarse leave, before any were fitted."""

LARGE = 1.2
"""Residual, in standard deviations of `NOISE`, from which the loss grows no longer with its square (soft L1)."""

SIMULATIONS = 2
"""How often closed forms are held to the simulator: with the constants of the step before."""

GROUPS_FROM = 3
"""Step from which on it is known well enough what constants explain to say how far groups differ."""

STEPS = 12
"""Steps of a fit at most."""

LONGEST_STEP = 0.5
"""By how much the logarithm of a constant moves in one step: beyond, slopes say little."""

HALVINGS = 4
"""How often a step is halved, as long as it makes a fit worse."""

REWEIGHTINGS = 4
"""How often a step finds anew which trials are far off."""

STANDSTILL = 0.01
"""Part of the misfit that a step takes away, below which a fit has ended."""


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
        noise: standard deviation of the errors that right constants leave.
        large: error, in standard deviations, from which the loss grows no longer with its square.
        begin: [p] logarithms that the fit begins with; None = those of the prior.

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


def weights_of(scaled: Floats, large: float) -> Floats:
    """Weights [n] in (0, 1] with which least squares have the slope of the soft L1 loss: 1 / sqrt(1 + z^2).

    Args:
        scaled: residuals [n], in standard deviations.
        large: residual from which on the loss no longer grows with their square.
    """
    return np.asarray(1 / np.sqrt(1 + (scaled / large) ** 2), dtype=np.float64)


def residual_sd_of(
    errors: Floats, precision: Floats, prior: Prior[Any], noise: float = NOISE, large: float = LARGE
) -> float:
    """Standard deviation of the errors that a fit leaves, large ones counted as the fit does, its freedom taken off.

    Args:
        errors: [n] log(predicted / measured).
        precision: [p, p] inverse of the covariance of the logarithms, the prior's part in it.
        large: error, in standard deviations, from which the loss grows no longer with its square.
    """
    # Of every constant the trials determine a part, and the prior the rest.
    determined = len(prior.names) - float(np.sum(np.diag(np.linalg.inv(precision)) / prior.widths**2))
    counted = noise * soft_l1(errors / noise, large)
    return float(np.sqrt(np.sum(counted**2) / max(len(errors) - determined, 1.0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedEfficiency:
    """HardwareEfficiency after some trials, and how sure it is."""

    efficiency: HardwareEfficiency
    covariance: Floats
    """[p, p] of the logarithms of the fitted ones for a group that was not seen, in the order of the prior."""
    residual_sd: float
    """Standard deviation of log(measured / predicted) over the trials, large errors counted as the fit counts them, the
    fit's freedom taken off."""
    groups: GroupEffects
    """Of the trials, and how far they are from each other."""


def fit_efficiency(sample: Sample) -> FittedEfficiency:
    """Fit efficiency to trials of one cluster, which may be of several models and layouts.

    A trial without a time says nothing, unless it says how long it took at least: then a prediction is wrong only
    below that.
    """
    prior = Prior.of(HardwareEfficiency())
    groups = GroupEffects([(one.source, one.group) for one in sample.trials])
    if not len(sample):
        return FittedEfficiency(
            efficiency=prior.start, covariance=np.diag(prior.widths**2), residual_sd=NOISE, groups=groups
        )
    found = np.zeros(len(prior.names))
    for step in range(STEPS):
        if step < SIMULATIONS:
            ratio = sample.simulated_ratio(prior.at(found))
        slopes = sample_sensitivities(sample, prior.at(found), prior.names)
        errors = sample.errors(prior.at(found), ratio)
        if step == GROUPS_FROM:
            variances = NOISE**2 / weights_of(errors / NOISE, LARGE)
            groups = groups.most_probable(errors - slopes @ found, slopes, variances, prior.widths)
        after = _step(errors, slopes, found, prior, groups)
        white = groups.whitening(slopes, NOISE**2 / weights_of(errors / NOISE, LARGE), prior.widths)
        before = _misfit(errors, found, white, prior)
        for _ in range(HALVINGS):
            now = _misfit(sample.errors(prior.at(after), ratio), after, white, prior)
            if now <= before:
                break
            after = (after + found) / 2
        if step > GROUPS_FROM and now > (1 - STANDSTILL) * before:
            break
        found = after
    errors = sample.errors(prior.at(found), ratio)
    variances = NOISE**2 / weights_of(errors / NOISE, LARGE)
    precision = groups.precision(slopes, variances, prior.widths)
    spread = residual_sd_of(errors, precision, prior)
    if spread > NOISE:
        precision = groups.precision(slopes, variances * (spread / NOISE) ** 2, prior.widths)
    covariance: Floats = np.linalg.inv(precision).astype(np.float64) + np.diag((groups.share * prior.widths) ** 2)
    return FittedEfficiency(efficiency=prior.at(found), covariance=covariance, residual_sd=spread, groups=groups)


def _misfit(errors: Floats, logs: Floats, white: Floats, prior: Prior[Any]) -> float:
    """What a step makes less: squares of errors, made independent, and of the way from the prior, in its widths."""
    return float(np.sum((white @ errors) ** 2) + np.sum((logs / prior.widths) ** 2))


def _step(errors: Floats, slopes: Floats, logs: Floats, prior: Prior[Any], groups: GroupEffects) -> Floats:
    """The most probable logarithms, if times follow their slopes, none further away than a step may be long.

    Large errors count less: weights of the soft L1 loss, of what of an error is not its group's, found again a few
    times (iteratively reweighted least squares).
    """
    from scipy.optimize import lsq_linear

    weights, after = np.ones(len(errors)), logs
    lower, upper = logs - LONGEST_STEP, np.minimum(logs + LONGEST_STEP, np.maximum(prior.most, logs))
    for _ in range(REWEIGHTINGS):
        white = groups.whitening(slopes, NOISE**2 / weights, prior.widths)
        system = np.concatenate([white @ slopes, np.diag(1 / prior.widths)])
        wanted = np.concatenate([white @ (slopes @ logs - errors), np.zeros(len(logs))])
        after = lsq_linear(system, wanted, bounds=(lower, upper + 1e-9), method="bvls").x
        left = errors + slopes @ (after - logs)
        own = NOISE**2 / weights * (white.T @ (white @ left))
        weights = weights_of(own / NOISE, LARGE)
    return np.asarray(after, dtype=np.float64)
