"""Cross-validation: every trial is predicted by a calibration that has not seen its group."""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_terapipe.search.calibrate.calibration import on_several_nodes
from megatron_terapipe.search.calibrate.clusters import Calibrations
from megatron_terapipe.search.profile import Profile
from megatron_terapipe.search.trials.trial import Trial
from megatron_terapipe.search.validation.predicted import Predicted, predict_trials

Cluster = tuple[str, str, bool]
"""Source, devices, and whether on several nodes: what is calibrated apart."""

SEED = 2026
"""Which groups fall together; always the same ones."""


def deal_groups(trials: Sequence[Trial], num_folds: int, seed: int = SEED) -> list[int]:
    """Deal the groups of each cluster to folds, whole and as evenly as can be.

    Args:
        trials: n trials.
        num_folds: how many.
        seed: of the shuffle.

    Returns:
        [n] the fold of each trial.
    """
    groups: dict[Cluster, list[str]] = {}
    for one in trials:
        of_cluster = groups.setdefault(_cluster(one), [])
        if one.group not in of_cluster:
            of_cluster.append(one.group)
    fold_of: dict[tuple[Cluster, str], int] = {}
    for cluster, names in groups.items():
        order = np.random.default_rng(seed).permutation(len(names))
        for place, index in enumerate(order):
            fold_of[cluster, sorted(names)[index]] = place % num_folds
    return [fold_of[_cluster(one), one.group] for one in trials]


def _cluster(trial: Trial) -> Cluster:
    return trial.source, trial.device, on_several_nodes(trial.cluster)


def predict_in_folds(
    trials: Sequence[Trial],
    num_folds: int,
    *,
    more: Sequence[Trial] = (),
    profile: Profile | None = None,
    step: Callable[[int], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Predicted]:
    """Predict each trial from the groups of the other folds.

    A cluster with one group alone has no others to be calibrated on: nothing is fitted for it.

    Args:
        trials: measured runs.
        num_folds: calibrations of each cluster.
        more: trials that every calibration sees.
        profile: measured op times and links of the machine.
        step: told how many trials are done.
        progress: told what is being fitted.
    """
    folds = deal_groups(trials, num_folds)
    places: dict[tuple[str, str, int], list[int]] = {}
    for index, (one, fold) in enumerate(zip(trials, folds, strict=True)):
        places.setdefault((one.source, one.device, fold), []).append(index)
    predicted: dict[int, Predicted] = {}
    for (*site, fold), rows in places.items():
        others = [
            one for one, own in zip(trials, folds, strict=True) if [one.source, one.device] == site and own != fold
        ]
        calibrations = Calibrations([*more, *others], progress=progress, profile=profile)
        found = predict_trials([trials[index] for index in rows], calibrations, profile=profile, step=step)
        predicted.update(zip(rows, found, strict=True))
    return [predicted[index] for index in range(len(trials))]
