"""Constants of time from measured runs: the most probable ones, given their prior.

    Sample          trials, priced again and again under other constants; slopes J of log(time) in each constant
    GroupEffects    how far groups of trials differ by more than noise
    fit             robust Gauss-Newton steps on both

Constants are fitted as logarithms. Each starts at its default, with a prior for the distance from it; each measured run
pulls at those that its time depends on. So eight runs already help. There is no constant of a single strategy, model or
row. A robust loss keeps a failed run from spoiling the rest, and errors that the runs of a group share count once, not
once for each run.

Trials of one group (a model, a number of devices, a day) share errors of the formulas. So their errors are not
independent, and hundreds of them constrain the next group less than their number suggests. This is a hierarchical model
(Gelman et al., Bayesian Data Analysis, 3rd edition, chapters 5 and 15):

    e_g = J_g (x + d_g) + o_g + noise
    x ~ N(0, W^2)        d_g ~ N(0, omega^2 W^2)        o_g ~ N(0, tau^2)        noise ~ N(0, s^2)

with the errors e_g of the trials of group g, their slopes J_g in the logarithms x of the constants, and the widths W of
the prior; o_g is an error that no constant explains and all trials of a group share, such as a day's clocks. With d_g
and o_g integrated out, errors of a group have the covariance

    R_g = s^2 I + tau^2 1 1' + omega^2 J_g W^2 J_g'

and the logarithms of the constants, given all groups, have the covariance A^-1, A = W^-2 + sum_g J_g' R_g^-1 J_g.
Constants of a group without trials have A^-1 + omega^2 W^2: however many trials there are of others, a prediction that
depends on constants in another way than those stays unsure. Few groups pull constants less far from
their defaults than as many trials of many groups: they are shrunk (Efron and Morris, JASA 70, 1975).

The prediction for a group by a fit without it follows without another fit. For linear models this is exact; with
V = J_g A^-1 J_g',

    r(-g) = (I - V R_g^-1)^-1 r_g        V(-g) = V + V (R_g - V)^-1 V

Groups of one hidden size and one way to recompute run the same kernels, and may share errors of the formulas that
others do not. So strategies of a kind without trials have the uncertainty of the same model with kinds as its groups:
hundreds of trials of one kind are one group.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.learn.priors import Prior, moved, side_by_side
from megatron_terapipe.search.learn.trials import Trial, grouped, models_of
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.makespan import ScheduleSimulator
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

SHARES = (0.1, 0.2, 0.4)
"""How far constants of one group may be from its cluster's, in widths of the prior: omega."""

OFFSETS = (0.01, 0.03, 0.06)  # standard deviations that errors common to a group may have: tau

USUAL_SHARE, USUAL_OFFSET, DECADES = 0.2, 0.03, 0.3
"""Omega and tau before any trial was seen, and the standard deviation of their decimal logarithms: few groups
constrain them little."""


class GroupEffects:
    """Groups that trials fall into, and how far their constants are from each other's."""

    def __init__(self, groups: Sequence[Hashable], share: float = USUAL_SHARE, offset: float = USUAL_OFFSET) -> None:
        self._groups, self.share, self.offset = groups, share, offset
        self._rows = [np.array(rows) for rows in grouped(range(len(groups)), groups.__getitem__).values()]

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._rows)

    def some(self, which: NDArray[np.bool_]) -> "GroupEffects":
        """Return the groups of some of the trials; `which`: [n] whether a trial is one of them."""
        chosen = [group for group, used in zip(self._groups, which, strict=True) if used]
        return GroupEffects(chosen, self.share, self.offset)

    def apart(self) -> "GroupEffects":
        """Return each trial as a group of its own, which differs as much from others."""
        return GroupEffects(range(len(self._groups)), self.share, self.offset)

    def _covariances(
        self, slopes: Floats, variances: Floats, widths: Floats
    ) -> Iterator[tuple[NDArray[np.int64], Floats]]:
        """Yield the rows of each group, and R_g.

        Args:
            slopes: [n, p] of the trials.
            variances: [n] s^2, larger where a trial counts less.
            widths: [p] standard deviations of the prior.
        """
        shifted = slopes * (self.share * widths)
        for rows in self._rows:
            yield rows, np.diag(variances[rows]) + self.offset**2 + shifted[rows] @ shifted[rows].T

    def means(self, values: Floats) -> Floats:
        """[groups] means of values [n]."""
        return np.array([values[rows].mean() for rows in self._rows])

    def covariance(self, slopes: Floats, variances: Floats, widths: Floats) -> Floats:
        """[p, p] of the logarithms of the constants of a group without trials."""
        known = np.linalg.inv(self.precision(slopes, variances, widths))
        return np.asarray(known + np.diag((self.share * widths) ** 2), dtype=np.float64)

    def whitening(self, slopes: Floats, variances: Floats, widths: Floats) -> Floats:
        """Matrix [n, n] that makes the errors independent of each other, with variance 1."""
        matrix = np.zeros((len(slopes), len(slopes)))
        for rows, covariance in self._covariances(slopes, variances, widths):
            matrix[np.ix_(rows, rows)] = np.linalg.inv(np.linalg.cholesky(covariance))
        return matrix

    def precision(self, slopes: Floats, variances: Floats, widths: Floats) -> Floats:
        """A [p, p], the inverse of the covariance of the logarithms of the constants."""
        precision = np.diag(widths**-2.0)
        for rows, covariance in self._covariances(slopes, variances, widths):
            precision += slopes[rows].T @ np.linalg.solve(covariance, slopes[rows])
        return precision

    def log_evidence(self, errors: Floats, slopes: Floats, variances: Floats, widths: Floats) -> float:
        """Logarithm of the probability of the errors [n] before any constant was fitted, up to a constant term."""
        # Of S = R + J W^2 J', by the matrix determinant lemma and Woodbury's identity.
        precision, pulled, found = np.diag(widths**-2.0), np.zeros(len(widths)), 0.0
        for rows, covariance in self._covariances(slopes, variances, widths):
            solved = np.linalg.solve(covariance, np.column_stack([slopes[rows], errors[rows]]))
            precision += slopes[rows].T @ solved[:, :-1]
            pulled += slopes[rows].T @ solved[:, -1]
            found += errors[rows] @ solved[:, -1] + np.linalg.slogdet(covariance)[1]
        found += np.linalg.slogdet(precision)[1] - pulled @ np.linalg.solve(precision, pulled)
        return -0.5 * float(found)

    def most_probable(self, errors: Floats, slopes: Floats, variances: Floats, widths: Floats) -> "GroupEffects":
        """Return the same groups with the omega and tau that explain their errors [n] best (empirical Bayes)."""
        if not self.share:
            return self

        def score(groups: "GroupEffects") -> float:
            off = np.log10([groups.share / USUAL_SHARE, groups.offset / USUAL_OFFSET]) / DECADES
            return groups.log_evidence(errors, slopes, variances, widths) - 0.5 * float(off @ off)

        return max((GroupEffects(self._groups, *each) for each in product(SHARES, OFFSETS)), key=score)

    def unseen(self, errors: Floats, slopes: Floats, variances: Floats, widths: Floats) -> tuple[Floats, Floats]:
        """Return errors [n] of fits without the group of a trial, from errors of the fit of all, and variances."""
        known = np.linalg.inv(self.precision(slopes, variances, widths))
        found, expected = np.empty(len(errors)), np.empty(len(errors))
        for rows, covariance in self._covariances(slopes, variances, widths):
            explained = slopes[rows] @ known @ slopes[rows].T
            left = covariance - explained
            # (I - V R^-1)^-1 = R (R - V)^-1
            found[rows] = covariance @ np.linalg.solve(left, errors[rows])
            expected[rows] = np.diag(explained + explained @ np.linalg.solve(left, explained))
        return found, expected + (slopes**2) @ (self.share * widths) ** 2 + self.offset**2


def cost_model_of(trial: Trial, **settings: Any) -> CostModel:
    """Return the cost model of a trial by the data sheets of its devices."""
    return CostModel(trial.workload, trial.cluster, software=trial.software, precision=trial.precision, **settings)


def times_with(models: Sequence[CostModel], strategies: Sequence[Strategy], constants: Sequence[Any]) -> Floats:
    """Return seconds in closed form of n strategies, each by its model, with each of m sets of constants: [m, n]."""
    changed = with_constants(models, side_by_side(constants))
    times = (model.closed_form_s(one) for model, one in zip(changed, strategies, strict=True))
    return np.stack([np.broadcast_to(each, len(constants)) for each in times], axis=1)


def with_constants(models: Sequence[CostModel], constants: Any) -> list[CostModel]:
    """Return models with other constants; those that are one object stay one, which caches times."""
    changed = {model: model.with_constants(constants) for model in set(models)}
    return [changed[model] for model in models]


STEP = 0.02
"""Change of a constant's logarithm over which the slope is taken."""


def log_slopes(
    models: Sequence[CostModel], strategies: Sequence[Strategy], constants: Any, names: Sequence[str]
) -> Floats:
    """Return the change of the logarithms of times with the logarithm of each named constant: [n, p]."""
    logs = np.log(times_with(models, strategies, [constants, *(moved(constants, {name: STEP}) for name in names)]))
    return np.asarray((logs[1:] - logs[0]).T / STEP)


class Sample:
    """The trials of a sequence with a time, or a time that they took at least; priced again and again.

    Args:
        make: the cost model of a trial; trials of one workload and cluster share it. None = by data sheets.
    """

    def __init__(self, trials: Sequence[Trial], make: Callable[[Trial], CostModel] | None = None) -> None:
        self.trials = [one for one in trials if one.least_time_s]
        self.models = models_of(self.trials, make or partial(cost_model_of, simulator=ScheduleSimulator()))
        self.measured = np.array([one.least_time_s for one in self.trials])
        self.cut_off = np.array([one.iteration_time_s is None for one in self.trials], dtype=bool)
        self.groups = GroupEffects([(one.source, one.group) for one in self.trials])
        if make is not None:  # Trials that are priced by measured op times share no errors of formulas.
            self.groups = GroupEffects(range(len(self.trials)), share=0.0, offset=0.0)

    def __len__(self) -> int:
        """Number of trials."""
        return len(self.trials)

    def times(self, constants: Any) -> Floats:
        """[n] seconds in closed form."""
        return np.ravel(times_with(self.models, [one.strategy for one in self.trials], [constants]))

    def slopes(self, constants: Any, names: Sequence[str]) -> Floats:
        """[n, p] of the logarithms of times in the logarithm of each named constant."""
        return log_slopes(self.models, [one.strategy for one in self.trials], constants, names)

    def simulated_ratio(self, constants: Any) -> Floats:
        """[n] seconds on the schedule over those in closed form; constants hardly change it."""
        simulated = [
            model.predict_time(one.strategy, activation_limit=one.activation_limit).iteration_time_s
            for model, one in zip(with_constants(self.models, constants), self.trials, strict=True)
        ]
        return np.array(simulated) / self.times(constants)

    def errors(self, times_s: Floats) -> Floats:
        """Errors [n], log(predicted / measured) of times [n]; zero where a cut-off run is predicted to take longer."""
        errors = np.log(times_s / self.measured)
        return np.where(self.cut_off & (errors > 0), 0.0, errors)


NOISE = 0.03
"""Standard deviation of the logarithm of a measured time that constants this coarse leave, before any were fitted."""

LARGE = 1.2
"""Residual, in standard deviations of `NOISE`, from which the loss grows no longer with its square (soft L1)."""

SIMULATIONS = 2  # how often closed forms are scaled to the simulator: with the constants of the step before
GROUPS_FROM = 3  # step after which constants are good enough to find how far groups differ
STEPS = 12  # steps of a fit at most
LONGEST_STEP = 0.5  # largest change of the logarithm of a constant in one step: beyond, slopes are not valid
HALVINGS = 4  # how often a step is halved, as long as it makes a fit worse
REWEIGHTINGS = 4  # how often a step computes the weights of trials
STANDSTILL = 0.01  # relative reduction of the misfit by a step, below which a fit ends


def soft_l1(scaled: Floats, large: float) -> Floats:
    """Residuals [n] whose square is the soft L1 loss, 2 large^2 (sqrt(1 + z^2) - 1) for z = scaled / large [n]."""
    return np.asarray(np.sign(scaled) * large * np.sqrt(2 * (np.sqrt(1 + (scaled / large) ** 2) - 1)), dtype=np.float64)


def weights_of(scaled: Floats, large: float) -> Floats:
    """Weights [n] with which least squares have the slope of the soft L1 loss: 1 / sqrt(1 + (scaled / large)^2)."""
    return np.asarray(1 / np.sqrt(1 + (scaled / large) ** 2), dtype=np.float64)


def residual_sd_of(errors: Floats, precision: Floats, prior: Prior[Any]) -> float:
    """Standard deviation of the errors that a fit leaves, large ones counted as the fit does, its freedom taken off.

    Args:
        errors: [n] log(predicted / measured).
        precision: [p, p], the inverse of the covariance of the logarithms of the constants.
    """
    # Of every constant the trials determine a part, and the prior the rest.
    determined = len(prior.names) - float(np.sum(np.diag(np.linalg.inv(precision)) / prior.widths**2))
    counted = NOISE * soft_l1(errors / NOISE, LARGE)
    return float(np.sqrt(np.sum(counted**2) / max(len(errors) - determined, 1.0)))


def kind_of(workload: Workload, strategy: Strategy) -> str:
    """Return the kind of a strategy of a model: strategies of one kind run the same kernels."""
    return f"hidden size {max(layer.hidden_size for layer in workload.layers)}, recompute {strategy.recompute}"


class Fitted(NamedTuple):
    """Constants fitted to n trials, and their uncertainty."""

    constants: Any
    """Of the class of the prior."""
    residual_sd: float
    """Standard deviation of log(measured / predicted) over the trials, from `residual_sd_of`."""
    groups: GroupEffects
    kinds: GroupEffects
    """The same for kinds of strategies."""
    errors_before: Floats
    """[n] of the defaults."""


def fit(sample: Sample, prior: Prior[Any]) -> Fitted:
    """Fit constants to trials of one cluster, which may be of several models and layouts.

    A trial without a time counts only with a lower bound of it: then a prediction is wrong only below that.
    """
    groups = sample.groups
    kinds = GroupEffects([kind_of(one.workload, one.strategy) for one in sample.trials])
    if not len(sample):
        return Fitted(prior.start, NOISE, groups, kinds, np.zeros(0))

    def errors_at(logs: Floats) -> Floats:
        return sample.errors(sample.times(prior.at(logs)) * ratio)

    found = np.zeros(len(prior.names))
    for step in range(STEPS):
        if step < SIMULATIONS:
            ratio = sample.simulated_ratio(prior.at(found))
            errors = errors_at(found)
        slopes = sample.slopes(prior.at(found), prior.names)
        if step == 0:
            errors_before = errors
        if step == GROUPS_FROM:
            variances = NOISE**2 / weights_of(errors / NOISE, LARGE)
            groups = groups.most_probable(errors - slopes @ found, slopes, variances, prior.widths)
        after = _step(errors, slopes, found, prior, groups)
        white = groups.whitening(slopes, NOISE**2 / weights_of(errors / NOISE, LARGE), prior.widths)
        before = _misfit(errors, found, white, prior)
        for _ in range(HALVINGS):
            errors_after = errors_at(after)
            now = _misfit(errors_after, after, white, prior)
            if now <= before:
                break
            after = (after + found) / 2
        else:
            errors_after = errors_at(after)
        if step > GROUPS_FROM and now > (1 - STANDSTILL) * before:
            break
        found, errors = after, errors_after
    variances = NOISE**2 / weights_of(errors / NOISE, LARGE)
    kinds = kinds.most_probable(errors - slopes @ found, slopes, variances, prior.widths)
    spread = residual_sd_of(errors, groups.precision(slopes, variances, prior.widths), prior)
    return Fitted(prior.at(found), spread, groups, kinds, errors_before)


def _misfit(errors: Floats, logs: Floats, white: Floats, prior: Prior[Any]) -> float:
    """Objective of a step: squares of the independent errors, and of the distance from the prior, in its widths."""
    return float(np.sum((white @ errors) ** 2) + np.sum((logs / prior.widths) ** 2))


def _step(errors: Floats, slopes: Floats, logs: Floats, prior: Prior[Any], groups: GroupEffects) -> Floats:
    """The most probable logarithms, if times follow their slopes, within one step.

    Large errors count less: weights of the soft L1 loss of the part of an error that its group does not share, computed
    a few times (iteratively reweighted least squares).
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
