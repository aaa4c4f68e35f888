"""Calibration on trials of one cluster: constants of time and of memory, and intervals of predictions.

    calibrate    fit + conformal intervals + fit_memory -> Calibration; on a measured profile, of few factors

Intervals hold a stated share of measurements. A prediction is uncertain for two reasons. The constants are known only
so well: with slopes J of log(time) and the covariance C of their logarithms that is a variance J C J'. And right
constants leave a residual. Both together are the scale of a strategy, larger the less it resembles the trials.

The width of an interval in scales follows from the trials (conformal prediction: Vovk, Gammerman and Shafer,
Algorithmic Learning in a Random World, 2005, chapter 2; scaled residuals: Lei et al., arXiv 1604.04173 section 5.2):
each group of trials is predicted by a fit without it (`GroupEffects.unseen`), and the multiplier is the
quantile of |error| / scale, with the scale that this fit gives. Trials of one group are alike, so where there are few
groups the quantile is drawn to Student's t-distribution. Fewer than nine groups do not determine nine tenths: they may
widen an interval beyond that distribution, and not narrow it.

Constants are used only if fits without a group predict it better than the defaults: a few trials, or trials with errors
that no constant explains, move constants, which then harm other layouts.

Memory: as with times, constants are fitted as logarithms around their defaults, with a loss that is robust against odd
readings. The memory of the device is a lower bound of the peak of a run out of memory, and an upper bound where no
peak was recorded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from math import ceil, hypot, sqrt
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, model_validator

from megatron_terapipe.config.parsing import short
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.learn.fit import (
    LARGE,
    NOISE,
    GroupEffects,
    Sample,
    cost_model_of,
    fit,
    kind_of,
    log_slopes,
    soft_l1,
    weights_of,
)
from megatron_terapipe.search.learn.priors import Prior
from megatron_terapipe.search.learn.trials import Trial, models_of
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.entries import CountOrNone, NotNegative, Positive, WrittenEntry
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, ProfileFactors, is_guessed
from megatron_terapipe.search.price.layer_times import OpTimes, RememberedTimes
from megatron_terapipe.search.price.memory import Counted, MemoryModel, MemoryOverheads, default_overheads, total_bytes
from megatron_terapipe.search.price.profile import Profile
from megatron_terapipe.search.price.profile_times import MeasuredProfile, measured_cluster, measured_efficiency
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

COVERAGE = 0.9  # share of measurements inside an interval

PRIOR_RESIDUAL_SD = 0.12
"""Standard deviation of log(measured / predicted) before any calibration, in addition to the prior of the constants:
about the errors of the default efficiency on the published trials (docs/benchmarks)."""

USUAL_RESIDUAL_SD = 0.05
"""Standard deviation of log(measured / predicted) that fits usually leave on groups which they have not seen, over
published trials of several clusters."""

USUAL_GROUPS = 4  # groups that it weighs as much as: trials of few groups may agree with a fit by chance
NORMAL = 1.645  # standard deviations of a normal distribution that hold 90 %

PRIOR_GROUPS = 2
"""Groups that the quantile of Student's t-distribution, for as many groups as there are and one, weighs as much as:
trials of few groups may agree with each other by chance."""


EFFICIENCY = Prior.of(HardwareEfficiency())  # constants of time that are fitted, around their defaults
FACTORS = Prior.of(ProfileFactors())  # factors on a profile that are fitted, around 1


def _table(rows: Any) -> Floats:
    try:
        return np.array(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("is not a table of numbers: calibrate again") from None


class Intervals(WrittenEntry):
    """Intervals of predicted times."""

    coverage: Positive
    multiplier: NotNegative
    """Half the width of an interval, in scales."""
    residual_sd: NotNegative
    """Standard deviation of log(measured / predicted) that right constants leave."""
    parameter_names: tuple[Literal[(*EFFICIENCY.names, *FACTORS.names)], ...]  # type: ignore[valid-type]
    covariance: Annotated[Floats, PlainValidator(_table), PlainSerializer(np.ndarray.tolist)]
    """[p, p] of the logarithms of the constants."""

    @model_validator(mode="after")
    def _is_square(self) -> "Intervals":
        size = len(self.parameter_names)
        if self.covariance.shape != (size, size) or not np.isfinite(self.covariance).all():
            raise ValueError(f"has a covariance that is not a table of {size} x {size} numbers: calibrate again")
        return self

    def half_width(self, slopes: Floats) -> Floats:
        """Half the width [n] of log(time) for slopes [n, p]: time / exp(width) to time * exp(width) is the interval."""
        explained = np.einsum("np,pq,nq->n", slopes, self.covariance, slopes)
        return np.asarray(self.multiplier * np.sqrt(self.residual_sd**2 + explained), dtype=np.float64)

    def without(self, names: Sequence[str]) -> "Intervals":
        """Return the intervals where some constants, by their fields, are at least as uncertain as before any trial."""
        covariance = self.covariance.copy()
        for index, name in enumerate(self.parameter_names):
            if name.partition("[")[0] in names:
                variance = max(covariance[index, index], EFFICIENCY.widths[EFFICIENCY.names.index(name)] ** 2)
                covariance[index], covariance[:, index] = 0.0, 0.0
                covariance[index, index] = variance
        return self.model_copy(update={"covariance": covariance})


def uncalibrated(prior: Prior[Any] = EFFICIENCY) -> Intervals:
    """Return intervals without trials: as wide as the prior."""
    return Intervals(
        coverage=COVERAGE,
        multiplier=NORMAL,
        residual_sd=PRIOR_RESIDUAL_SD,
        covariance=np.diag(prior.widths**2),
        parameter_names=prior.names,
    )


def conformal(
    errors: Floats, slopes: Floats, groups: GroupEffects, *, prior: Prior[Any], residual_sd: float
) -> Intervals:
    """Return intervals of a group without trials, from n trials with a time, each predicted without its group.

    Args:
        errors: [n] log(predicted / measured) of the fit.
        slopes: [n, p] of log(time).
        residual_sd: standard deviation of the errors, the fit's freedom taken off.
    """
    count = len(groups)
    spread = sqrt((count * residual_sd**2 + USUAL_GROUPS * USUAL_RESIDUAL_SD**2) / (count + USUAL_GROUPS))
    # Trials count as much as they did in the fit: less where they are far off.
    variances = spread**2 / weights_of(errors / NOISE, LARGE)
    unseen_errors, unseen_variances = groups.unseen(errors, slopes, variances, prior.widths)
    return Intervals(
        coverage=COVERAGE,
        multiplier=multiplier_of(np.abs(unseen_errors) / np.sqrt(spread**2 + unseen_variances), count),
        residual_sd=hypot(spread, groups.offset),
        covariance=groups.covariance(slopes, variances, prior.widths),
        parameter_names=prior.names,
    )


def multiplier_of(scores: Floats, num_groups: int, least: float | None = None) -> float:
    """Return half the width of intervals in scales, from the scores [n] of the trials of so many groups.

    Args:
        least: multiplier that groups which are too few do not go below; None = Student's t-distribution. One
            group leaves constants about as unsure as their prior, which is wide enough.
    """
    from scipy.special import stdtrit

    seen_share = num_groups / (num_groups + PRIOR_GROUPS)
    usual = float(stdtrit(num_groups + USUAL_GROUPS - 1, (1 + COVERAGE) / 2))
    multiplier: float = conformal_quantile(scores, COVERAGE) ** seen_share * usual ** (1 - seen_share)
    determined = ceil((num_groups + 1) * COVERAGE) <= num_groups
    return multiplier if determined else max(multiplier, least or (usual if num_groups > 1 else NORMAL))


def conformal_quantile(scores: Floats, coverage: float) -> float:
    """Quantile of scores [n] that holds a new score with at least this probability, if all are alike.

    Of n scores it is the ceil((n + 1) coverage)-th smallest. Where n is too small, it is extrapolated beyond the
    largest by Student's t-distribution.
    """
    rank = ceil((len(scores) + 1) * coverage)
    if rank <= len(scores):
        return float(np.sort(scores)[rank - 1])
    from scipy.special import stdtrit

    spread = float(np.sqrt(np.mean(scores**2)))
    return max(float(scores.max()), spread * float(stdtrit(len(scores), (1 + coverage) / 2)))


MEMORY_NOISE = 0.05
"""Standard deviation of log(measured / predicted) that is expected of right constants: tables give whole GB."""

MEMORY_LARGE = 1.5  # residual, in standard deviations, from which the loss grows no longer with its square (soft L1)


class MemorySample:
    """Trials that bound their peak of memory, or have it. Bytes are counted once, for any overheads."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials = [one for one in trials if one.peak_memory_bytes or one.out_of_memory or one.least_time_s]
        counted = count_memory(self.trials)
        most = max((len(ranks) for ranks in counted), default=0)
        # Ranks that a trial does not have repeat its last one: the maximum over ranks stays.
        rows = [[*ranks, *[ranks[-1]] * (most - len(ranks))] for ranks in counted]
        self.counted = Counted(*np.moveaxis(np.array(rows, dtype=float).reshape(len(rows), most, 10), -1, 0))
        self.measured = np.array([one.peak_memory_bytes or np.nan for one in self.trials])
        self.failed = np.array([bool(one.out_of_memory) for one in self.trials])
        self.capacity = np.array([device_memory_bytes(one) for one in self.trials])

    def __len__(self) -> int:
        """Number of trials; 0 if they do not determine constants: no peak, and no bounds on both sides."""
        peaks, bounds = ~np.isnan(self.measured), {*self.failed.tolist()}
        return len(self.trials) if peaks.any() or len(bounds) == 2 else 0

    def errors(self, overheads: MemoryOverheads) -> Floats:
        """[n] log(predicted / measured); without a peak log(predicted / capacity) where it contradicts the run."""
        peaks = np.asarray(total_bytes(self.counted, overheads), dtype=np.float64).max(axis=1)
        over = np.log(peaks / (self.capacity * overheads.usable_share))
        bounded = np.where(self.failed, np.minimum(over, 0.0), np.maximum(over, 0.0))
        errors: Floats = np.where(np.isnan(self.measured), bounded, np.log(peaks / self.measured))
        return errors


def count_memory(trials: Sequence[Trial]) -> list[list[Counted]]:
    """Memory of each pipeline rank of each trial, as the memory model counts it."""

    def make(one: Trial) -> MemoryModel:
        return MemoryModel(workload=one.workload, cluster=one.cluster, software=one.software, precision=one.precision)

    return [
        model.count(one.strategy, activation_limit=one.activation_limit)
        for model, one in zip(models_of(trials, make), trials, strict=True)
    ]


def device_memory_bytes(trial: Trial) -> float:
    """Memory of the smallest device of a trial's cluster."""
    return min(node.device.memory_bytes for node in trial.cluster.nodes)


def fit_memory(trials: Sequence[Trial]) -> tuple[MemoryOverheads | None, int]:
    """Fit memory overheads to trials of one cluster; None and 0 if they do not determine them, else how many did."""
    from scipy.optimize import least_squares

    sample = MemorySample(trials)
    if not len(sample):
        return None, 0
    prior = Prior.of(default_overheads(sample.trials[0].cluster, sample.trials[0].software))

    def residuals(logs: Floats) -> Floats:
        errors = soft_l1(sample.errors(prior.at(logs)) / MEMORY_NOISE, MEMORY_LARGE)
        return np.concatenate([errors, logs / prior.widths])

    start, bounds = np.zeros(len(prior.names)), (-np.inf, prior.most + 1e-9)
    logs = least_squares(residuals, start, x_scale=prior.widths, bounds=bounds, max_nfev=60).x
    return prior.at(logs), len(sample)


NETWORK = ("network_efficiency", "transfer_network_efficiency")  # constants of network cards
INSIDE = ("inside_efficiency", "transfer_inside_efficiency", "reductions")  # of links inside nodes
ALIKE = 1.1  # ratio of two bandwidths up to which constants of one link hold for the other


def bandwidths(clusters: Iterable[Cluster]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes per second inside nodes with several devices, and of all cards of a node that is one of several."""
    found: tuple[set[float], set[float]] = (set(), set())
    for cluster in clusters:
        for node in cluster.nodes:
            if node.num_devices > 1:
                found[0].add(node.inside.bandwidth)
            if len(cluster.nodes) > 1:
                found[1].add(node.num_network_cards * node.network.bandwidth)
    return tuple(sorted(found[0])), tuple(sorted(found[1]))


def _usable(constants: Any) -> Any:
    """Raise if constants of a file are not the numbers that their class declares, from 0."""
    for each in fields(constants):
        value: Floats = np.array(getattr(constants, each.name))
        if value.shape != np.array(each.default).shape or (value < 0).any():
            raise ValueError(f"has {each.name} {short(value.tolist())}, not numbers from 0: calibrate again")
    return constants


class Calibration(WrittenEntry, validate_by_name=True):
    """Constants of one cluster, as a calibration file has them."""

    source: str = ""
    """Source of the trials; empty = these are the defaults."""
    device: str
    """Kinds of devices that they ran on."""
    interleaves_token_slices: bool = False
    """Whether a trial has an interleaved schedule with token slices."""
    several_nodes: bool | None = None
    """Whether on several nodes; None = some on one and some on several."""
    efficiency: Annotated[HardwareEfficiency, AfterValidator(_usable)] | None = Field(
        default=None, validation_alias="physics", serialization_alias="physics"
    )
    """Of time; None = the defaults of the devices."""
    factors: ProfileFactors | None = Field(default=None, exclude=True)
    """On a measured profile; None = trials were priced without one."""
    memory_overheads: Annotated[MemoryOverheads, AfterValidator(_usable)] | None = Field(
        default=None, validation_alias="memory_physics", serialization_alias="memory_physics"
    )
    """Of memory; None = the defaults of the devices."""
    inside_bandwidths: tuple[Positive, ...] | None = None
    network_bandwidths: tuple[Positive, ...] | None = None
    """As `bandwidths` has them of the clusters of the trials; None = not recorded."""
    intervals: Intervals
    """Of strategies of the kinds that trials are of; of all, without `other_kinds`."""
    other_kinds: Intervals | None = None
    """Of strategies of other kinds."""
    kinds: tuple[str, ...] = ()
    """`kind_of` the trials with a time."""
    num_trials: CountOrNone = 0
    num_memory_trials: CountOrNone = 0
    """Trials that memory was fitted to."""
    notes: tuple[str, ...] = ()
    """Trials that were left out, and constants that are not used, a line for each reason."""

    @property
    def knows_network(self) -> bool:
        """Whether trials on several nodes determine the bandwidth between nodes."""
        return self.efficiency is not None and self.several_nodes is not False

    @classmethod
    def of(cls, trials: Sequence[Trial], memory_trials: Sequence[Trial], **found: Any) -> "Calibration":
        """Return the calibration of time in `found`, with one of memory."""
        overheads, num_memory_trials = fit_memory(memory_trials)
        spreads = {len(one.cluster.nodes) > 1 for one in trials}
        inside, network = bandwidths(one.cluster for one in trials)
        return cls(
            interleaves_token_slices=any(
                one.strategy.num_model_chunks > 1 < one.strategy.num_token_slices for one in trials
            ),
            several_nodes=spreads.pop() if len(spreads) == 1 else None,
            source=", ".join(sorted({one.source for one in trials})),
            device=", ".join(sorted({one.device for one in trials})),
            inside_bandwidths=inside,
            network_bandwidths=network,
            memory_overheads=overheads,
            num_memory_trials=num_memory_trials,
            **found,
        )

    def of_memory(self) -> "Calibration":
        """Return only the constants of memory: for several nodes if trials ran on one, and the reverse."""
        ran, asked = ("several nodes", "one") if self.several_nodes else ("one node", "several")
        note = f"the trials ran on {ran}, so constants of times on {asked} are the defaults: give trials of both"
        times = {"efficiency": None, "factors": None, "other_kinds": None, "kinds": (), "num_trials": 0}
        return self.model_copy(update={**times, "intervals": uncalibrated(), "notes": (*self.notes, note)})

    def on(self, cluster: Cluster) -> "Calibration":
        """Return this calibration on a cluster: constants of links that the trials did not run on are the defaults."""
        if self.efficiency is None:
            return self
        if self.inside_bandwidths is None:
            note = (
                "the links that the trials ran on are not recorded: calibrate again to compare them with this cluster's"
            )
            return self.model_copy(update={"notes": (*self.notes, note)})
        found, efficiency, defaults = self, self.efficiency, HardwareEfficiency()
        inside, network = bandwidths([cluster])
        for where, names, trials, wanted in (
            ("inside nodes", INSIDE, self.inside_bandwidths, inside),
            ("of nodes to the network", NETWORK, self.network_bandwidths, network),
        ):
            if not trials or all(any(1 / ALIKE <= one / rate <= ALIKE for one in trials) for rate in wanted):
                continue
            had, has = (" and ".join(f"{rate / 1e9:.3g} GB/s" for rate in rates) for rates in (trials, wanted))
            note = (
                f"the trials ran on {had} {where}, and this cluster has {has}: constants of these links are the "
                "defaults, and intervals are wider"
            )
            efficiency = replace(efficiency, **{name: getattr(defaults, name) for name in names})
            changes = {
                "efficiency": efficiency,
                "intervals": found.intervals.without(names),
                "other_kinds": found.other_kinds and found.other_kinds.without(names),
                "notes": (*found.notes, note),
            }
            found = found.model_copy(update=changes)
        return found

    def intervals_s(
        self, model: CostModel, strategies: Sequence[Strategy], times_s: Sequence[float]
    ) -> list[tuple[float, float]]:
        """Shortest and longest seconds of each strategy."""
        slopes = self.slopes(model, strategies)
        known = [kind_of(model.workload, strategy) in self.kinds for strategy in strategies]
        widths = (each.half_width(slopes) for each in (self.intervals, self.other_kinds or self.intervals))
        return [
            (time_s / factor, time_s * factor)
            for time_s, factor in zip(times_s, np.exp(np.where(known, *widths)).tolist(), strict=True)
        ]

    def slopes(self, model: CostModel, strategies: Sequence[Strategy]) -> Floats:
        """[n, p] slopes of the logarithm of each time in the logarithm of each constant, as `intervals` counts them."""
        constants = model.efficiency if self.factors is None else ProfileFactors()
        return log_slopes([model] * len(strategies), strategies, constants, self.intervals.parameter_names)


KERNELS = frozenset({"gemm_efficiency", "gemm_area", "attention_efficiency", "fused_attention", "memory_efficiency"})
"""Constants of kernels."""

GUESSED = 2.0  # how much wider their priors are on devices of whose generation there is no table


def no_calibration(cluster: Cluster | None = None) -> Calibration:
    """Return the defaults, and their uncertainty on the devices of a cluster; None = A100s."""
    prior = EFFICIENCY
    if cluster is not None and any(is_guessed(node.device) for node in cluster.nodes):
        wider = np.array([GUESSED if name in KERNELS else 1.0 for name in prior.names])
        prior = replace(prior, widths=prior.widths * wider)
    return Calibration(device="", intervals=uncalibrated(prior))


def calibrate(
    trials: Sequence[Trial], profile: Profile | None = None, memory_trials: Sequence[Trial] | None = None
) -> Calibration:
    """Fit the constants of time and memory to trials of one cluster; on a profile, factors on its times.

    Trials of models that the profile has not measured are left out.

    Args:
        trials: at least one; they may be of several models, layouts and groups.
        memory_trials: trials that memory is fitted to; None = the same.

    Raises:
        ConfigError: if no trial is of a model that the profile covers.
    """
    known = trials if profile is None else _covered(trials, profile)
    if profile is None:
        sample = Sample(known)
        found = _fitted(sample, EFFICIENCY, no_calibration(trials[0].cluster).intervals)
    else:
        op_times = RememberedTimes(MeasuredProfile(profile))
        sample = Sample(known, lambda one: _cost_model_on(profile, one, op_times))
        found = _fitted(sample, FACTORS, uncalibrated(FACTORS))
    if left_out := len(trials) - len(known):
        note = f"{left_out} trials are of models that the profile does not cover, and are left out"
        found["notes"] = (note, *found.get("notes", ()))
    return Calibration.of(known, memory_trials or trials, num_trials=len(sample), **found)


def _covered(trials: Sequence[Trial], profile: Profile) -> list[Trial]:
    """Return the trials of models that a profile has measured."""
    measured = MeasuredProfile(profile)
    covered = [one for one in trials if one.precision == profile.precision and measured.covers(one.workload)]
    if not covered:
        raise ConfigError(
            f"--profile {profile.source or 'just measured'} covers no trial of {trials[0].path or 'the given'}: it has "
            f"other layers than their models, or is not {trials[0].precision}: measure one of these models, or drop "
            "one of the flags"
        )
    return covered


def _cost_model_on(profile: Profile, trial: Trial, op_times: OpTimes) -> CostModel:
    """Return the cost model of a trial with the op times and links of a profile."""
    efficiency = measured_efficiency(profile, trial.cluster, software=trial.software)
    on_links = replace(trial, cluster=measured_cluster(profile, trial.cluster))
    return cost_model_of(on_links, efficiency=efficiency, op_times=op_times)


def _fitted(sample: Sample, prior: Prior[Any], before: Intervals) -> dict[str, Any]:
    """Return constants and their intervals; `before` and a note where fits without a group do not predict it better.

    Where there are few groups, fits without a trial predict it.
    """
    fitted, seen = fit(sample, prior), ~sample.cut_off
    name = "factors" if isinstance(prior.start, ProfileFactors) else "efficiency"
    found = {name: fitted.constants}
    if not seen.any():
        return {**found, "intervals": uncalibrated(prior)}
    groups = fitted.groups.some(seen)
    errors = sample.errors(sample.times(fitted.constants) * sample.simulated_ratio(fitted.constants))[seen]
    slopes = sample.slopes(fitted.constants, prior.names)[seen]
    variances = max(fitted.residual_sd, NOISE) ** 2 / weights_of(errors / NOISE, LARGE)
    left_out, what = (groups, "group") if len(groups) >= USUAL_GROUPS else (groups.apart(), "trial")
    unseen_errors, _ = left_out.unseen(errors, slopes, variances, prior.widths)
    after, defaults = (left_out.means(np.abs(each)) for each in (unseen_errors, fitted.errors_before[seen]))
    better = defaults - after
    if len(better) > 1 and np.mean(better) <= np.std(better) / sqrt(len(better)):
        first, means = sample.trials[0], [f"{100 * each.mean():.1f}%" for each in (after, defaults)]
        note = (
            f"constants fitted to {len(sample)} trials of {first.source or first.path} are not used: fits without a "
            f"{what} predict it no better than the defaults (mean error {means[0]}, not {means[1]})"
        )
        scores = np.abs(fitted.errors_before[seen]) / (before.half_width(slopes) / before.multiplier)
        multiplier = multiplier_of(scores, len(groups), before.multiplier)
        return {"intervals": before.model_copy(update={"multiplier": multiplier}), "notes": (note,)}
    intervals, other_kinds = (
        conformal(errors, slopes, each, prior=prior, residual_sd=fitted.residual_sd)
        for each in (groups, fitted.kinds.some(seen))
    )
    kinds = sorted({kind_of(one.workload, one.strategy) for one in sample.trials})
    return {**found, "intervals": intervals, "other_kinds": other_kinds, "kinds": tuple(kinds)}
