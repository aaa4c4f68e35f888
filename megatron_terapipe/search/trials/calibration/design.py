"""Which few trials would teach most: those after which the predictions of all candidates are surest.

With slopes J of log(time), a trial of strategy i changes the covariance C of the constants' logarithms to

    C - C j_i j_i' C / (s^2 + j_i' C j_i)

whatever time it takes, so what it teaches is known before it runs (Chaloner and Verdinelli, Bayesian experimental
design, Statistical Science 10(3), 1995, sections 2 and 4). Trials are chosen one after the other, each to leave the
least mean variance of log(time) over all candidates (Bayesian A-optimality for the predictions, also called
V-optimality).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.trials.calibration.calibration import Calibration
from megatron_terapipe.search.trials.calibration.cluster_calibrations import calibrated_slopes
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]


MISFIT_SHARE = 0.1
"""Part of a strategy's variance that right constants would leave: where they matter most, formulas are least exact, and
a design that trusts them there chooses nothing but extremes."""


def propose(
    slopes: Floats, covariance: Floats, residual_sd: float, num_trials: int, misfit_share: float = MISFIT_SHARE
) -> list[int]:
    """Choose trials one after the other; the first ones teach most.

    Args:
        slopes: [n, p] of the candidates.
        covariance: [p, p] of the constants' logarithms before.
        residual_sd: standard deviation of log(measured / predicted) that right constants leave.
        num_trials: how many are wanted; a candidate is chosen once.
        misfit_share: part of each candidate's variance before, that no trial takes away.

    Returns:
        Indices of the candidates.
    """
    covariance = covariance.copy()
    noise = residual_sd**2 + misfit_share * np.einsum("np,pq,nq->n", slopes, covariance, slopes)
    chosen: list[int] = []
    for _ in range(min(num_trials, len(slopes))):
        moved = slopes @ covariance
        variances = np.einsum("np,np->n", moved, slopes)
        # Row i: how much a trial of i takes off the variance of each candidate.
        taken = ((moved @ slopes.T) ** 2 / (noise + variances)[:, None]).mean(axis=1)
        taken[chosen] = -1.0
        best = int(np.argmax(taken))
        chosen.append(best)
        covariance -= np.outer(moved[best], moved[best]) / (noise[best] + variances[best])
    return chosen


def propose_strategies(
    model: CostModel, candidates: Sequence[Strategy], calibration: Calibration, num_trials: int
) -> list[Strategy]:
    """The candidates whose measurement would make predictions of all of them surest, most telling first.

    Args:
        calibration: what is known of its constants, and how surely.
    """
    intervals = calibration.intervals
    slopes = calibrated_slopes(calibration, model, candidates)
    indices = propose(slopes, intervals.covariance, intervals.residual_sd, num_trials)
    return [candidates[index] for index in indices]
