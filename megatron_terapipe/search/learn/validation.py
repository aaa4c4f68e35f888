"""Validation: every trial predicted by a calibration that has not seen its group, and the figures of that.

deal_groups, leave_out -> predict_in_folds -> [Predicted] -> validation_document -> print_validation
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from megatron_terapipe.search.learn import scores
from megatron_terapipe.search.learn.calibration import Calibration, count_memory, device_memory_bytes, on_several_nodes
from megatron_terapipe.search.learn.cluster_calibrations import Calibrations, calibrated_slopes
from megatron_terapipe.search.learn.scores import naive_memory_bytes, naive_time_s
from megatron_terapipe.search.learn.trials import Trial
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.memory import default_overheads, total_bytes
from megatron_terapipe.search.price.profile import Profile
from megatron_terapipe.search.price.profile_times import MeasuredProfile, measured_efficiency

Step = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """A trial and its prediction."""

    trial: Trial
    iteration_time_s: float
    interval_s: tuple[float, float]
    """Shortest and longest that the stated share of iterations takes."""
    peak_memory_bytes: float
    """Predicted for the fullest device."""
    fits: bool
    """Whether that fits."""
    calibration: Calibration
    """What the constants were fitted to."""


def predict_trials(
    trials: Sequence[Trial], calibrations: Calibrations, *, profile: Profile | None = None, step: Step = lambda _: None
) -> list[Predicted]:
    """Predict each trial as if nobody had measured it.

    Args:
        profile: measured op times and links of the machine; None = the roofline.
    """
    places: dict[tuple[object, ...], list[int]] = {}
    for index, one in enumerate(trials):
        key = one.source, one.device, id(one.workload), id(one.cluster), one.software, one.precision
        places.setdefault(key, []).append(index)
    found: dict[int, Predicted] = {}
    for rows in places.values():
        alike = [trials[index] for index in rows]
        calibration = calibrations.of_trial(alike[0])
        found.update(zip(rows, _predict_alike(alike, calibration, profile), strict=True))
        step(len(rows))
    return [found[index] for index in range(len(trials))]


def _predict_alike(trials: Sequence[Trial], calibration: Calibration, profile: Profile | None) -> list[Predicted]:
    """Trials of one model on one cluster."""
    first = trials[0]
    efficiency = calibration.efficiency or HardwareEfficiency()
    op_times = None
    if profile is not None:
        op_times = MeasuredProfile(profile)
        efficiency = measured_efficiency(profile, first.cluster, efficiency, first.software)
    model = CostModel(
        first.workload,
        first.cluster,
        software=first.software,
        efficiency=efficiency,
        op_times=op_times,
        precision=first.precision,
    )
    if calibration.factors is not None:
        model = model.with_factors(calibration.factors)
    memory_overheads = calibration.memory_overheads or default_overheads(first.cluster, first.software)
    capacity = device_memory_bytes(first) * memory_overheads.usable_share
    slopes = calibrated_slopes(calibration, model, [one.strategy for one in trials])
    predicted = []
    for one, counted, row in zip(trials, count_memory(trials), slopes, strict=True):
        time_s = model.predict_time(one.strategy, activation_limit=one.activation_limit).iteration_time_s
        peak = float(np.max([total_bytes(rank, memory_overheads) for rank in counted]))
        predicted.append(
            Predicted(
                trial=one,
                iteration_time_s=time_s,
                interval_s=calibration.intervals.interval_s(time_s, row[None, :]),
                peak_memory_bytes=peak,
                fits=peak <= capacity,
                calibration=calibration,
            )
        )
    return predicted


Cluster = tuple[str, str, bool]
"""Source, devices, and whether on several nodes: what is calibrated apart."""

SEED = 2026
"""Which groups fall together; always the same ones."""


def deal_groups(trials: Sequence[Trial], num_folds: int, seed: int = SEED) -> list[int]:
    """Deal the groups of each cluster to folds, whole and as evenly as can be.

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


LEFT_OUT: Mapping[str, Callable[[Trial], int]] = MappingProxyType(
    {
        "hidden_size": lambda one: max(layer.hidden_size for layer in one.workload.layers),
        "layers": lambda one: len(one.workload.layers),
        "devices": lambda one: sum(node.num_devices for node in one.cluster.nodes),
    }
)
"""What may be left out at a time, to see how predictions extrapolate; by name."""


def leave_out(trials: Sequence[Trial], what: str) -> list[int]:
    """Return the fold of each trial, [n]: trials that agree in something are in one."""
    return [LEFT_OUT[what](one) for one in trials]


def predict_in_folds(
    trials: Sequence[Trial],
    folds: Sequence[int],
    *,
    more: Sequence[Trial] = (),
    profile: Profile | None = None,
    step: Callable[[int], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Predicted]:
    """Predict each trial from those of the other folds.

    A cluster whose trials are all in one fold has no others to be calibrated on: nothing is fitted for it.
    """
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
    predicted: Sequence[Predicted],
    *,
    calibrated_on: Sequence[str],
    in_sample: int,
    num_folds: int | None,
    left_out: str | None = None,
) -> dict[str, Any]:
    """All figures and all predictions.

    Args:
        num_folds: folds of the cross-validation; None without one.
        left_out: what was left out at a time instead; None = nothing.
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
        "left_out": left_out,
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
        "trials": len(rows),
        "nothing_fitted": sum(not number for number in trials),
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


COLUMNS = ("trials", "n", "MAPE", "rho", "pairs", "regret", "inside", "memory", "seen", "false")

LEGEND = (
    "rho: Spearman, mean over groups",
    "pairs: share in order of those more than 5 % apart",
    "regret: how much slower than the best trial the predicted best is, mean over groups",
    "inside: share within the stated interval of 90 %",
    "memory: MAPE of peaks; seen: of runs out of memory; false: of other runs said to be",
    "naive line: 45 % of the peak, recomputation included, 1F1B's bubble; 16 B a parameter",
)


def print_validation(document: dict[str, Any], console: Console, *, show_groups: bool) -> None:
    """Print a line for each source with that of the naive model under it, and one for all together."""
    table = Table(
        title="Predicted beside measured", caption=_caption(document), caption_justify="left", padding=(0, 0, 0, 1)
    )
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for source, figures in document["sources"].items():
        _add(table, source, figures)
        if show_groups:
            for group, of_group in document["groups"][source].items():
                table.add_row(*_row(f"  {group}", of_group), style="dim")
    if len(document["sources"]) > 1:
        table.add_section()
        _add(table, "all", document["overall"])
    console.print(table)


def _add(table: Table, name: str, figures: dict[str, Any]) -> None:
    table.add_row(*_row(name, figures))
    table.add_row(*_row("  naive line", {**figures["naive"], "interval_coverage": None}), style="dim")


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    memory = figures["memory"]
    ranked = figures["spearman"]
    return [
        name,
        str(figures["n"]),
        _percent(figures["mape"]),
        "-" if ranked is None else f"{ranked:.3f}",
        _percent(figures["pair_accuracy"]),
        _percent(figures["top1_regret"]),
        _percent(figures["interval_coverage"]),
        _percent(memory["mape"]),
        _percent(memory["out_of_memory_recall"]),
        _percent(memory["false_alarms"]),
    ]


LEFT_OUT_IN_WORDS = {"hidden_size": "hidden sizes", "layers": "numbers of layers", "devices": "numbers of devices"}


def _caption(document: dict[str, Any]) -> str:
    lines = list(LEGEND)
    if document["folds"]:
        lines.append(f"Calibrated in {document['folds']} folds: each group is predicted from groups of other folds.")
        lines += _nothing_fitted(document)
    elif document["left_out"]:
        what = LEFT_OUT_IN_WORDS[document["left_out"]]
        lines.append(f"Trials are predicted from those of the source with other {what}, if there are any.")
        lines += _nothing_fitted(document)
    elif document["calibrated_on"]:
        lines.append(f"Calibrated on {', '.join(document['calibrated_on'])}.")
    else:
        lines.append("Nothing was calibrated.")
    if document["in_sample"]:
        lines.append(f"IN-SAMPLE: {document['in_sample']} of the trials are among those of the calibration.")
    return "\n".join(lines)


def _nothing_fitted(document: dict[str, Any]) -> list[str]:
    """Return a line that names the sources some of whose trials had no others to be calibrated on; none if all had."""
    alone = {name: of for name, of in document["sources"].items() if of["nothing_fitted"]}
    if not alone:
        return []
    counted = (f"{name} ({of['nothing_fitted']} of {of['trials']} trials)" for name, of in alone.items())
    return [f"NOTHING FITTED for {', '.join(counted)}: there are no others of their cluster to be calibrated on."]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
