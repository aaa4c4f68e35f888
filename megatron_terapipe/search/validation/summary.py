"""Scores of predictions, of ours and of the naive line, for one group, one source, or all."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.trials.trial import Trial
from megatron_terapipe.search.validation import scores
from megatron_terapipe.search.validation.naive import naive_memory_bytes, naive_time_s
from megatron_terapipe.search.validation.predicted import Predicted

Floats = NDArray[np.float64]


def summary(predicted: Sequence[Predicted]) -> dict[str, Any]:
    """All figures of some trials; shares and relative errors are parts of 1, and None is where there is nothing.

    `n` trials with a time, `mape`, `bias`, `spearman` and `top1_regret` (means over groups), `pair_accuracy` (of pairs
    more than 5 % apart) and `pair_accuracy_all`, `interval_coverage`, `memory` {`n`, `mape`, `bias`,
    `out_of_memory`, `out_of_memory_recall`, `false_alarms`}, and `naive` with the same of the naive line.
    """
    ours = _figures(
        predicted, lambda one: one.iteration_time_s, lambda one: one.peak_memory_bytes, lambda one: one.fits
    )
    naive = _figures(
        predicted,
        lambda one: naive_time_s(one.trial),
        lambda one: naive_memory_bytes(one.trial),
        lambda one: naive_memory_bytes(one.trial) <= min(node.device.memory_bytes for node in one.trial.cluster.nodes),
    )
    inside = [
        one.interval_s[0] <= one.trial.iteration_time_s <= one.interval_s[1]
        for one in predicted
        if one.trial.iteration_time_s is not None
    ]
    return {**ours, "interval_coverage": float(np.mean(inside)) if inside else None, "naive": naive}


def _figures(
    predicted: Sequence[Predicted],
    time_s: Callable[[Predicted], float],
    memory_bytes: Callable[[Predicted], float],
    fits: Callable[[Predicted], bool],
) -> dict[str, Any]:
    measured = np.array([_measured_s(one.trial) for one in predicted])
    guessed = np.array([time_s(one) for one in predicted])
    groups = _groups(predicted, measured, guessed)
    pairs, clear = scores.pair_accuracy(groups, scores.CLEAR_GAP)
    _, every = scores.pair_accuracy(groups, 0.0)
    return {
        "n": int(np.isfinite(measured).sum()),
        "groups": len(groups),
        "mape": scores.mape(measured, guessed),
        "bias": scores.bias(measured, guessed),
        "spearman": scores.mean(scores.spearman(group) for group in groups),
        "pairs": pairs,
        "pair_accuracy": clear,
        "pair_accuracy_all": every,
        "top1_regret": scores.mean(scores.top1_regret(group) for group in groups),
        "memory": _memory(predicted, memory_bytes, fits),
    }


def _measured_s(trial: Trial) -> float:
    return np.inf if trial.iteration_time_s is None else trial.iteration_time_s


def _groups(predicted: Sequence[Predicted], measured: Floats, guessed: Floats) -> list[scores.Group]:
    places: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(predicted):
        # What ran out of memory says nothing of time; what failed otherwise was slower than what did not.
        if not one.trial.out_of_memory:
            places.setdefault((one.trial.source, one.trial.group), []).append(index)
    return [(measured[rows], guessed[rows]) for rows in places.values()]


def _memory(
    predicted: Sequence[Predicted], memory_bytes: Callable[[Predicted], float], fits: Callable[[Predicted], bool]
) -> dict[str, Any]:
    with_peak = [one for one in predicted if one.trial.peak_memory_bytes is not None]
    measured = np.array([one.trial.peak_memory_bytes for one in with_peak], dtype=float)
    guessed = np.array([memory_bytes(one) for one in with_peak])
    failed = [one for one in predicted if one.trial.out_of_memory]
    ran = [one for one in predicted if not one.trial.out_of_memory and one.trial.iteration_time_s is not None]
    return {
        "n": len(with_peak),
        "mape": scores.mape(measured, guessed),
        "bias": scores.bias(measured, guessed),
        "out_of_memory": len(failed),
        "out_of_memory_recall": scores.mean(float(not fits(one)) for one in failed),
        "false_alarms": scores.mean(float(not fits(one)) for one in ran),
    }
