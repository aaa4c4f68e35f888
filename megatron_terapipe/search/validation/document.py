"""The JSON of a validation."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_terapipe.search.trials.trial import Trial
from megatron_terapipe.search.validation.predicted import Predicted
from megatron_terapipe.search.validation.summary import summary


def data_sets(trials: Sequence[Trial]) -> Callable[[Trial], str]:
    """How to name the data set of a trial: its file, and its source where a file holds several."""
    sources: dict[str, set[str]] = {}
    for one in trials:
        sources.setdefault(one.path, set()).add(one.source)

    def name(trial: Trial) -> str:
        stem = Path(trial.path).stem
        return stem if len(sources[trial.path]) == 1 else f"{stem}: {trial.source or 'no source'}"

    return name


def validation_document(
    predicted: Sequence[Predicted], *, calibrated_on: Sequence[str], in_sample: int, num_folds: int | None
) -> dict[str, Any]:
    """All figures and all predictions.

    Args:
        predicted: trials and predictions.
        calibrated_on: files of trials that constants were fitted to.
        in_sample: how many of the trials are among those.
        num_folds: folds of the cross-validation; None without one.
    """
    name = data_sets([one.trial for one in predicted])
    sources: dict[str, list[Predicted]] = {}
    groups: dict[str, dict[str, list[Predicted]]] = {}
    for one in predicted:
        source = name(one.trial)
        sources.setdefault(source, []).append(one)
        groups.setdefault(source, {}).setdefault(one.trial.group, []).append(one)
    return {
        "calibrated_on": list(calibrated_on),
        "folds": num_folds,
        "in_sample": in_sample,
        "overall": summary(predicted),
        "sources": {source: _of_source(rows) for source, rows in sources.items()},
        "groups": {source: {group: summary(rows) for group, rows in of.items()} for source, of in groups.items()},
        "predictions": [_prediction(one, name) for one in predicted],
    }


def _of_source(rows: Sequence[Predicted]) -> dict[str, Any]:
    trials = [one.calibration.num_trials for one in rows]
    first = rows[0].trial
    return {
        "described": first.source,
        "device": first.device,
        "software": first.software.name,
        "calibration_trials": max(trials),
        "calibration_source": rows[0].calibration.source or None,
        **summary(rows),
    }


def _prediction(one: Predicted, name: Callable[[Trial], str]) -> dict[str, Any]:
    trial = one.trial
    return {
        "source": name(trial),
        "id": trial.id,
        "line": trial.line,
        "group": trial.group,
        "measured": {
            "iteration_time_s": trial.iteration_time_s,
            "peak_memory_bytes": trial.peak_memory_bytes,
            "out_of_memory": trial.out_of_memory,
        },
        "predicted": {
            "iteration_time_s": one.iteration_time_s,
            "interval_s": list(one.interval_s),
            "peak_memory_bytes": one.peak_memory_bytes,
            "fits": one.fits,
        },
    }
