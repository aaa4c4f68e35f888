"""One calibration for each cluster that trials are of: fitted, fitted on a measured profile, or read from a file.

    calibrate_on_profile   few factors on a measured profile, by Gauss-Newton on real schedules
    Calibrations           a calibration for each (source, devices, one node or several), fitted when asked for
    calibrated             that of a cluster, from a calibration file or a trials file
    propose_strategies     which few trials would teach most

A cluster is a source and its kinds of devices: links, drivers and libraries differ from site to site. Times on one node
and on several are calibrated apart where there are enough of either, since hundreds of the one would outvote a few of
the other, and say nothing of the network. Trials that name no source are of whichever cluster they are used for. What
nobody calibrated keeps the defaults.

Trials that teach most: with slopes J of log(time), a trial of strategy i changes the covariance C of the constants'
logarithms to

    C - C j_i j_i' C / (s^2 + j_i' C j_i)

whatever time it takes, so what it teaches is known before it runs (Chaloner and Verdinelli, Bayesian experimental
design, Statistical Science 10(3), 1995, sections 2 and 4). Trials are chosen one after the other, each to leave the
least mean variance of log(time) over all candidates (Bayesian A-optimality for the predictions, also called
V-optimality).
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, create_model, model_validator

from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.learn.calibration import (
    Calibration,
    Intervals,
    calibrate,
    calibration_of,
    conformal,
    no_calibration,
    on_several_nodes,
    uncalibrated,
)
from megatron_terapipe.search.learn.fit import (
    NOISE,
    GroupEffects,
    fit_constants,
    residual_sd_of,
    strategy_sensitivities,
)
from megatron_terapipe.search.learn.trials import Trial, models_of, read_trials
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.documents import read_document
from megatron_terapipe.search.machine.entries import CountOrNone, Entry, NotNegative, Positive, Text, fixed, read_entry
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, Prior, ProfileFactors, moved
from megatron_terapipe.search.price.layer_times import RememberedTimes
from megatron_terapipe.search.price.memory import MemoryOverheads
from megatron_terapipe.search.price.profile import Profile
from megatron_terapipe.search.price.profile_times import MeasuredProfile, measured_cluster, measured_efficiency
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


def calibrated_slopes(
    calibration: Calibration, model: CostModel, strategies: Sequence[Strategy]
) -> NDArray[np.float64]:
    """[n, p] slopes of the logarithm of each time in that of each constant, as `calibration.intervals` counts them."""
    if calibration.factors is None:
        return strategy_sensitivities(model, strategies, model.efficiency, calibration.intervals.parameter_names)
    return factor_slopes(model, strategies)


ENOUGH = 8
"""Trials on one node, or on several, from which on they are calibrated apart."""

Progress = Callable[[str], None]


class Calibrations:
    """Calibrations of several clusters, fitted when they are first asked for.

    Args:
        trials: what was measured; none = nothing is calibrated.
        profile: measured, on which factors are fitted instead of constants of the roofline; None = there is none.
    """

    def __init__(
        self,
        trials: Sequence[Trial] = (),
        ready: Iterable[Calibration] = (),
        progress: Progress = lambda _: None,
        *,
        profile: Profile | None = None,
    ) -> None:
        self._profile = profile
        self._trials = list(trials)
        self._ready = list(ready)
        self._found: dict[tuple[str, str, bool], Calibration] = {}
        self._progress = progress
        self._none = no_calibration()

    def of(self, source: str, device: str, several_nodes: bool) -> Calibration:
        """The calibration of a cluster.

        Args:
            source: who measures; empty where nobody is known.
        """
        key = source, device, several_nodes
        if key not in self._found:
            self._found[key] = self._fit(*key)
        return self._found[key]

    def of_trial(self, trial: Trial) -> Calibration:
        """The calibration of the cluster of a trial."""
        return self.of(trial.source, trial.device, on_several_nodes(trial.cluster))

    def fitted(self) -> list[Calibration]:
        """One for each cluster that the trials are of, and those that were read."""
        clusters = dict.fromkeys((one.source, one.device, on_several_nodes(one.cluster)) for one in self._trials)
        return [*self._ready, *(self.of(*cluster) for cluster in clusters)]

    def _fit(self, source: str, device: str, several_nodes: bool) -> Calibration:
        trials = [one for one in self._trials if one.device == device and _same(one.source, source)]
        if not trials:
            return self._choose(source, device, several_nodes)
        alike = [one for one in trials if on_several_nodes(one.cluster) == several_nodes]
        chosen = alike if len(alike) >= ENOUGH else trials
        self._progress(f"calibrating on {len(chosen)} trials of {chosen[0].source or chosen[0].path} ({device})")
        if self._profile is None:
            return calibrate(chosen, trials)
        return calibrate_on_profile(chosen, self._profile, trials)

    def _choose(self, source: str, device: str, several_nodes: bool) -> Calibration:
        """The one that was read from a file for such a cluster, if there is one and no other."""
        ready = [one for one in self._ready if one.device == device and _same(one.source, source)]
        alike = [one for one in ready if one.several_nodes in (several_nodes, None)] or ready
        return alike[0] if len(alike) == 1 else self._none


def _same(source: str, wanted: str) -> bool:
    return not source or not wanted or source == wanted


FORMAT, VERSION = "terapipe calibration", 2


def write_calibrations(path: str, calibrations: Sequence[Calibration]) -> None:
    """Write a calibration file."""
    document = {"format": FORMAT, "version": VERSION, "calibrations": [_to_json(one) for one in calibrations]}
    write_text(path, json.dumps(document, indent=1) + "\n")


def _row_of(number: int) -> Any:
    return Annotated[list[Positive], Field(min_length=number, max_length=number)]


def _constants(declaring: type) -> Any:
    """An entry with the constants that a dataclass declares, and rows of factors."""
    constants: dict[str, Any] = {
        each.name: (_row_of(len(each.default)) if isinstance(each.default, tuple) else NotNegative, ...)
        for each in fields(declaring)
    }
    return create_model(declaring.__name__, __base__=Entry, **constants)


class IntervalsEntry(Entry):
    """Intervals of predicted times."""

    coverage: Positive
    multiplier: Positive
    residual_sd: Positive
    parameter_names: list[Literal[Prior.of(HardwareEfficiency()).names]]  # type: ignore[valid-type]
    covariance: list[list[float]]

    @model_validator(mode="after")
    def _is_square(self) -> "IntervalsEntry":
        size = len(self.parameter_names)
        if len(self.covariance) != size or any(len(row) != size for row in self.covariance):
            raise ValueError(f"has a covariance that is not a table of {size} x {size} numbers: calibrate again")
        return self


class CalibrationEntry(Entry):
    """Constants of one cluster."""

    source: str = ""
    device: Text
    several_nodes: bool | None = None
    num_trials: CountOrNone
    num_memory_trials: CountOrNone
    physics: _constants(HardwareEfficiency)  # type: ignore[valid-type]
    memory_physics: _constants(MemoryOverheads) | None = None  # type: ignore[valid-type]
    memory_sd: NotNegative
    intervals: IntervalsEntry


class CalibrationsEntry(Entry):
    """A calibration file."""

    format: Annotated[str, fixed(FORMAT, "give a file that --save-calibration wrote")]
    version: Annotated[int, fixed(VERSION, "calibrate again with this version")]
    calibrations: list[CalibrationEntry] = Field(min_length=1)


def read_calibrations(path: str) -> list[Calibration]:
    """Read a calibration file."""
    return [
        Calibration(
            source=one.source,
            device=one.device,
            several_nodes=one.several_nodes,
            num_trials=one.num_trials,
            num_memory_trials=one.num_memory_trials,
            efficiency=_efficiency(one),
            memory_overheads=one.memory_physics and MemoryOverheads(**one.memory_physics.model_dump()),
            memory_sd=one.memory_sd,
            intervals=Intervals(
                coverage=one.intervals.coverage,
                multiplier=one.intervals.multiplier,
                residual_sd=one.intervals.residual_sd,
                covariance=np.array(one.intervals.covariance),
                parameter_names=tuple(one.intervals.parameter_names),
            ),
        )
        for one in read_entry(CalibrationsEntry, read_document(path), path).calibrations
    ]


def _efficiency(one: CalibrationEntry) -> HardwareEfficiency:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in one.physics}
    return HardwareEfficiency(**values)


def calibrated(cluster: Cluster, path: str, profile: Profile | None = None) -> Calibration:
    """Return the calibration of a cluster, from a calibration file, or from trials.

    Args:
        profile: measured profile that trials are fitted on; None = there is none.
    """
    device = "+".join(sorted({node.device.name for node in cluster.nodes}))
    alike: list[Trial] = []
    if path.endswith(".jsonl"):
        trials = read_trials(path)
        known = sorted({one.device for one in trials})
        # All trials on such devices count: whoever names a file says that it is of this cluster.
        alike = [one for one in trials if one.device == device]
        found = Calibrations(alike, profile=profile).of("", device, on_several_nodes(cluster))
    else:
        entries = read_calibrations(path)
        known = sorted({one.device for one in entries})
        found = Calibrations(ready=entries).of("", device, on_several_nodes(cluster))
    if not found.num_trials and not found.num_memory_trials:
        if path.endswith(".jsonl") and alike:
            raise ConfigError(
                f"{path}: none of its {len(alike)} trials on {device} has a time or a peak: give some that ran"
            )
        several = ", or of several sources" if device in known else ""
        raise ConfigError(
            f"{path} holds no calibration of {device}{several}; it is of {', '.join(known)}: give trials that ran on "
            "these devices, of one source"
        )
    return found


def _to_json(one: Calibration) -> dict[str, Any]:
    assert one.efficiency is not None
    return {
        "source": one.source,
        "device": one.device,
        "several_nodes": one.several_nodes,
        "num_trials": one.num_trials,
        "num_memory_trials": one.num_memory_trials,
        "physics": asdict(one.efficiency),
        "memory_physics": None if one.memory_overheads is None else asdict(one.memory_overheads),
        "memory_sd": one.memory_sd,
        "intervals": {
            "coverage": one.intervals.coverage,
            "multiplier": one.intervals.multiplier,
            "residual_sd": one.intervals.residual_sd,
            "parameter_names": list(one.intervals.parameter_names),
            "covariance": one.intervals.covariance.tolist(),
        },
    }


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
    """The candidates whose measurement would make predictions of all of them surest, most telling first."""
    intervals = calibration.intervals
    slopes = calibrated_slopes(calibration, model, candidates)
    indices = propose(slopes, intervals.covariance, intervals.residual_sd, num_trials)
    return [candidates[index] for index in indices]
