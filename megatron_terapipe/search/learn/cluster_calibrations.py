"""One calibration for each cluster that trials are of: fitted, or read from a file.

    Calibrations           a calibration for each (source, devices, one node or several), fitted at its first use
    calibrated             the calibration of a cluster, from a calibration file or a trials file
    propose_strategies     the few trials that reduce uncertainty most

A cluster is a source and its kinds of devices: links, drivers and libraries differ from site to site. Times on one node
and on several are calibrated apart: constants of one node predict several nodes worse than the defaults, and the
reverse. Memory is calibrated on all of them. Trials without a source are of any cluster. Clusters without trials keep
the defaults.

Choice of trials: with slopes J of log(time), a trial of strategy i changes the covariance C of the constants'
logarithms to

    C - C j_i j_i' C / (s^2 + j_i' C j_i)

for any measured time, so the reduction is known before the trial runs (Chaloner and Verdinelli, Bayesian experimental
design, Statistical Science 10(3), 1995, sections 2 and 4). Trials are chosen one after the other, each to leave the
least mean variance of log(time) over all candidates (Bayesian A-optimality for the predictions, also called
V-optimality).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.learn.calibration import Calibration, calibrate, no_calibration
from megatron_terapipe.search.learn.trials import Trial, read_trials
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.documents import read_document
from megatron_terapipe.search.machine.entries import WrittenEntry, fixed, read_entry
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.profile import Profile
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

Progress = Callable[[str], None]


class Calibrations:
    """Calibrations of several clusters, each fitted at its first use.

    Args:
        profile: on which factors are fitted instead of constants of the roofline; None = there is none.
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
        """Return the calibration of a cluster; `source`: of its trials; empty = unknown."""
        key = source, device, several_nodes
        if key not in self._found:
            self._found[key] = self._fit(*key)
        return self._found[key]

    def fitted(self) -> list[Calibration]:
        """Return one for each cluster of the trials, and those that were read."""
        sites = dict.fromkeys(one.site for one in self._trials)
        return [*self._ready, *(self.of(*site) for site in sites)]

    def _fit(self, source: str, device: str, several_nodes: bool) -> Calibration:
        def matches(one: Trial | Calibration) -> bool:
            return one.device == device and (not one.source or not source or one.source == source)

        trials = list(filter(matches, self._trials))
        if not trials:
            # The only one that was read from a file for such a cluster.
            ready = list(filter(matches, self._ready))
            alike_ready = [one for one in ready if one.several_nodes in (several_nodes, None)]
            of_others = alike_ready or [one.of_memory() for one in ready]
            return of_others[0] if len(of_others) == 1 else self._none
        alike = [one for one in trials if one.site[2] == several_nodes]
        if not alike:
            return Calibration.of(trials, trials, intervals=self._none.intervals).of_memory()
        self._progress(f"calibrating on {len(alike)} trials of {alike[0].source or alike[0].path} ({device})")
        return calibrate(alike, self._profile, trials)


FORMAT, VERSION = "terapipe calibration", 3


class CalibrationsFile(WrittenEntry):
    """A calibration file."""

    format: Annotated[str, fixed(FORMAT, "give a file that --save-calibration wrote")] = FORMAT
    version: Annotated[int, fixed(VERSION, "calibrate again with this version")] = VERSION
    calibrations: tuple[Calibration, ...] = Field(min_length=1)


def write_calibrations(path: str, calibrations: Sequence[Calibration]) -> None:
    """Write a calibration file."""
    file = CalibrationsFile(calibrations=tuple(calibrations))
    write_text(path, file.model_dump_json(indent=1, by_alias=True) + "\n")


def read_calibrations(path: str) -> tuple[Calibration, ...]:
    """Read a calibration file."""
    return read_entry(CalibrationsFile, read_document(path), path).calibrations


def calibrated(cluster: Cluster, path: str, profile: Profile | None = None) -> Calibration:
    """Return the calibration of a cluster from a calibration file or from trials, on a profile if there is one."""
    several_nodes = len(cluster.nodes) > 1
    device = "+".join(sorted({node.device.name for node in cluster.nodes}))
    alike: list[Trial] = []
    if path.endswith(".jsonl"):
        trials = read_trials(path)
        known = sorted({one.device for one in trials})
        # All trials on such devices count: the user names the file for this cluster.
        alike = [one for one in trials if one.device == device]
        found = Calibrations(alike, profile=profile).of("", device, several_nodes)
    else:
        entries = read_calibrations(path)
        known = sorted({one.device for one in entries})
        found = Calibrations(ready=entries).of("", device, several_nodes)
    if not found.num_trials and not found.num_memory_trials and not found.notes:
        if path.endswith(".jsonl") and alike:
            raise ConfigError(
                f"{path}: none of its {len(alike)} trials on {device} has a time or a peak: give some that ran"
            )
        several = ", or of several sources" if device in known else ""
        raise ConfigError(
            f"{path} holds no calibration of {device}{several}; it is of {', '.join(known)}: give trials that ran on "
            "these devices, of one source"
        )
    return found.on(cluster)


MISFIT_SHARE = 0.1
"""Part of a strategy's variance that right constants would leave: where they matter most, formulas are least exact, and
a design that trusts them there chooses only extremes."""


def propose(
    slopes: Floats, covariance: Floats, residual_sd: float, num_trials: int, misfit_share: float = MISFIT_SHARE
) -> list[int]:
    """Choose trials one after the other; the first reduce uncertainty most.

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
        # Row i: reduction of the variance of each candidate by a trial of i.
        taken = ((moved @ slopes.T) ** 2 / (noise + variances)[:, None]).mean(axis=1)
        taken[chosen] = -1.0
        best = int(np.argmax(taken))
        chosen.append(best)
        covariance -= np.outer(moved[best], moved[best]) / (noise[best] + variances[best])
    return chosen


def propose_strategies(
    model: CostModel, candidates: Sequence[Strategy], calibration: Calibration, num_trials: int
) -> list[Strategy]:
    """Return the candidates whose trials would make predictions of all of them surest, best first."""
    intervals = calibration.intervals
    slopes = calibration.slopes(model, candidates)
    indices = propose(slopes, intervals.covariance, intervals.residual_sd, num_trials)
    return [candidates[index] for index in indices]
