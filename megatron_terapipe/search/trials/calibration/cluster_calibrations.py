"""One calibration for each cluster that trials are of: what one cluster reaches of its data sheets, another may not.

A cluster is a source and its kinds of devices: links, drivers and libraries differ from site to site. Times on one node
and on several are calibrated apart where there are enough of either, since hundreds of the one would outvote a few of
the other, and say nothing of the network. Trials that name no source are of whichever cluster they are used for. What
nobody calibrated keeps the defaults.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.op_times.profile import Profile
from megatron_terapipe.search.trials.calibration.calibration import (
    Calibration,
    calibrate,
    no_calibration,
    on_several_nodes,
)
from megatron_terapipe.search.trials.calibration.profile_calibration import calibrate_on_profile, factor_slopes
from megatron_terapipe.search.trials.calibration.sample import strategy_sensitivities
from megatron_terapipe.search.trials.trial import Trial
from megatron_terapipe.strategy import Strategy


def calibrated_slopes(
    calibration: Calibration, model: CostModel, strategies: Sequence[Strategy]
) -> NDArray[np.float64]:
    """[n, p] slopes of the logarithm of each time in that of each constant, as `calibration.intervals` counts them.

    Args:
        calibration: fitted constants of the hardware, or factors on a profile.
    """
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
            several_nodes: whether there is more than one node.
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
