"""Validation: every trial predicted by a calibration without its group, and the scores.

Trials are ranked against each other only within their group.

folds_of -> predict_in_folds -> [PredictedTrial] -> validation_document -> print_validation
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from megatron_terapipe.search.learn.calibration import Calibration, count_memory, device_memory_bytes
from megatron_terapipe.search.learn.cluster_calibrations import Calibrations
from megatron_terapipe.search.learn.costs import Costs
from megatron_terapipe.search.learn.trials import Trial, grouped
from megatron_terapipe.search.price.memory import total_bytes
from megatron_terapipe.search.price.profile import Profile
from megatron_terapipe.search.price.workload import Workload

UTILIZATION = 0.45  # share of the peak, as an experienced user would guess it for A100s

BYTES_PER_PARAMETER = 16
"""Weights, gradients and optimizer state in half precision (ZeRO, arXiv 1910.02054 section 3.1)."""


def naive_time_s(trial: Trial) -> float:
    """Seconds of an iteration: FLOPs of all layers, recomputation included, over 45 % of the peak of all devices.

    The bubble is (P - 1) / (V M) of that (arXiv 2104.04473 section 2.2).
    """
    strategy, workload = trial.strategy, trial.workload
    passes = 4 if strategy.recompute == "full" else 3
    flops = 0.0
    for layer in workload.layers:
        # Tables count full attention.
        flops += layer.model_flops(causal=False) * (passes if layer.is_block and layer.recomputed else 3)
    devices = [node.device for node in trial.cluster.nodes]
    peak = min(device.peak_flops(trial.precision) for device in devices)
    busy = strategy.num_sequences * flops / (strategy.world_size * UTILIZATION * peak)
    waiting = (strategy.pipeline_parallel_size - 1) / (strategy.num_model_chunks * strategy.num_micro_batches)
    return busy * (1 + waiting)


def naive_memory_bytes(trial: Trial) -> float:
    """Bytes of a device: 16 for each of its parameters."""
    shared = trial.strategy.tensor_parallel_size * trial.strategy.pipeline_parallel_size
    return BYTES_PER_PARAMETER * trial.workload.parameters / shared


Floats = NDArray[np.float64]
Group = tuple[Floats, Floats]
"""Measured and predicted seconds of the trials of one group; a measured time is infinite where a run failed or was cut
off, so that all others are faster."""

CLEAR_GAP = 0.05  # relative difference of two measured times from which on their order is more than noise
LEAST_RANKED = 4  # least trials of a group for a rank correlation


def relative_errors(measured: Floats, predicted: Floats) -> Floats:
    """Return predicted / measured - 1 of those [n] that were measured; a measured time that is not finite was not."""
    known = np.isfinite(measured)
    return np.asarray(predicted[known] / measured[known] - 1, dtype=np.float64)


def spearman(group: Group) -> float | None:
    """Rank correlation (Spearman 1904); ties share a rank. None for a small group, or one without any difference."""
    measured, predicted = group
    if len(measured) < LEAST_RANKED:
        return None
    if len(np.unique(measured)) < 2 or len(np.unique(predicted)) < 2:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(measured, predicted).statistic)


def pair_accuracy(groups: Sequence[Group], gap: float) -> tuple[int, float | None]:
    """Number of pairs of trials of a group whose times differ by more than `gap`, and the share predicted in order.

    A tie of predictions is half right; the gap is a share of the shorter time.
    """
    pairs, right = 0, 0.0
    for measured, predicted in groups:
        first, second = np.triu_indices(len(measured), k=1)
        fast, slow = np.minimum(measured[first], measured[second]), np.maximum(measured[first], measured[second])
        clear = np.isfinite(fast) & (slow > fast * (1 + gap))
        first, second = first[clear], second[clear]
        agreement = np.sign(predicted[first] - predicted[second]) * np.where(measured[first] > measured[second], 1, -1)
        pairs += len(first)
        right += float(np.sum((agreement + 1) / 2))
    return pairs, right / pairs if pairs else None


def top1_regret(group: Group) -> float | None:
    """How much slower than the best trial the one is that was predicted to be fastest; None for fewer than two."""
    measured, predicted = group
    known = np.isfinite(measured)
    if known.sum() < 2:
        return None
    best = predicted == predicted.min()
    # A failed run would be noticed, and the next one tried; it counts as the slowest.
    chosen = np.where(np.isfinite(measured), measured, measured[known].max())[best]
    return float(chosen.mean() / measured[known].min() - 1)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known; None for none."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedTrial:
    """A trial and its prediction."""

    trial: Trial
    iteration_time_s: float
    interval_s: tuple[float, float]
    """Shortest and longest that the stated share of iterations takes."""
    peak_memory_bytes: float
    """Of the fullest device."""
    fits: bool
    calibration: Calibration


def predict_trials(
    trials: Sequence[Trial],
    calibrations: Calibrations,
    *,
    profile: Profile | None = None,
    step: Callable[[int], None] = lambda _: None,
) -> list[PredictedTrial]:
    """Predict each trial; `step` is called with the number of trials that are done."""
    found: dict[int, PredictedTrial] = {}
    for alike in grouped(trials, lambda one: (one.site, one.priced_as)).values():
        predicted = _predict_alike(alike, calibrations.of(*alike[0].site), profile)
        found.update(zip(map(id, alike), predicted, strict=True))
        step(len(alike))
    return [found[id(one)] for one in trials]


def _predict_alike(trials: Sequence[Trial], calibration: Calibration, profile: Profile | None) -> list[PredictedTrial]:
    """Trials of one model on one cluster."""
    first = trials[0]
    costs = Costs(
        workload=first.workload,
        precision=first.precision,
        software=first.software,
        calibration=calibration,
        profile=profile,
    )
    pricing = costs.pricing_on(first.cluster)
    model, memory_overheads = pricing.cost_model, pricing.memory_model.overheads
    capacity = device_memory_bytes(first) * memory_overheads.usable_share
    times_s = [
        model.predict_time(one.strategy, activation_limit=one.activation_limit).iteration_time_s for one in trials
    ]
    intervals_s = calibration.intervals_s(model, [one.strategy for one in trials], times_s)
    predicted = []
    for one, counted, time_s, interval_s in zip(trials, count_memory(trials), times_s, intervals_s, strict=True):
        peak = float(np.max([total_bytes(rank, memory_overheads) for rank in counted]))
        predicted.append(
            PredictedTrial(
                trial=one,
                iteration_time_s=time_s,
                interval_s=interval_s,
                peak_memory_bytes=peak,
                fits=peak <= capacity,
                calibration=calibration,
            )
        )
    return predicted


SEED = 2026  # which groups fall together; always the same ones

LEFT_OUT: Mapping[str, tuple[str, Callable[[Trial], Hashable]]] = MappingProxyType(
    {
        "hidden_size": ("hidden sizes", lambda one: max(layer.hidden_size for layer in one.workload.layers)),
        "layers": ("numbers of layers", lambda one: len(one.workload.layers)),
        "model": ("models", lambda one: _shapes_of_layers(one.workload)),
        "devices": ("numbers of devices", lambda one: sum(node.num_devices for node in one.cluster.nodes)),
    }
)
"""Properties of which one value at a time is left out, to test extrapolation: in words, and the value of a trial."""


def _shapes_of_layers(workload: Workload) -> frozenset[tuple[int, int]]:
    """Hidden sizes and parameters of the layers between the ends, however many: tables have models cut short."""
    between = workload.layers[workload.first_dealt : workload.end_dealt]
    return frozenset((layer.hidden_size, layer.parameters) for layer in between)


def folds_of(trials: Sequence[Trial], num_folds: int | None, left_out: str | None) -> Sequence[Hashable] | None:
    """Return the fold [n] of each trial; None without folds.

    With `left_out`, trials with the same value are in one fold; else whole groups of each cluster are dealt to folds.
    """
    if left_out is not None:
        return [LEFT_OUT[left_out][1](one) for one in trials]
    return None if num_folds is None else deal_groups(trials, num_folds)


def deal_groups(trials: Sequence[Trial], num_folds: int) -> list[int]:
    """Return the fold [n] of each trial, with whole groups of each cluster in a fold."""
    fold_of: dict[tuple[tuple[str, str, bool], str], int] = {}
    for site, alike in grouped(trials, lambda one: one.site).items():
        names = sorted({one.group for one in alike})
        for place, index in enumerate(np.random.default_rng(SEED).permutation(len(names))):
            fold_of[site, names[index]] = place % num_folds
    return [fold_of[one.site, one.group] for one in trials]


def predict_in_folds(
    trials: Sequence[Trial],
    folds: Sequence[Hashable],
    *,
    more: Sequence[Trial] = (),
    profile: Profile | None = None,
    step: Callable[[int], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[PredictedTrial]:
    """Predict each trial from the other folds, and from `more`, which every calibration uses.

    A cluster with all its trials in one fold is not calibrated.
    """
    predicted: dict[int, PredictedTrial] = {}
    for fold, rows in grouped(range(len(trials)), folds.__getitem__).items():
        others = [one for one, own in zip(trials, folds, strict=True) if own != fold]
        calibrations = Calibrations([*more, *others], progress=progress, profile=profile)
        found = predict_trials([trials[index] for index in rows], calibrations, profile=profile, step=step)
        predicted.update(zip(rows, found, strict=True))
    return [predicted[index] for index in range(len(trials))]


def summary(predicted: Sequence[PredictedTrial]) -> dict[str, Any]:
    """Return all scores of some trials; shares and relative errors are parts of 1; None = no trials for a score.

    `n` trials with a time, `mape`, `bias`, `spearman` and `top1_regret` (means over groups), `pair_accuracy` (of pairs
    more than 5 % apart) and `pair_accuracy_all`, `interval_coverage`, `memory` {`n`, `mape`, `bias`,
    `out_of_memory`, `out_of_memory_recall`, `false_alarms`}, and `naive` with the same of the naive line.
    """
    trials = [one.trial for one in predicted]
    ours = _figures(
        trials,
        [one.iteration_time_s for one in predicted],
        [one.peak_memory_bytes for one in predicted],
        [one.fits for one in predicted],
    )
    naive_bytes = [naive_memory_bytes(one) for one in trials]
    fits = [held <= device_memory_bytes(one) for held, one in zip(naive_bytes, trials, strict=True)]
    naive = _figures(trials, [naive_time_s(one) for one in trials], naive_bytes, fits)
    inside = [
        float(one.interval_s[0] <= one.trial.iteration_time_s <= one.interval_s[1])
        for one in predicted
        if one.trial.iteration_time_s is not None
    ]
    return {**ours, "interval_coverage": mean(inside), "naive": naive}


def _figures(
    trials: Sequence[Trial], times_s: Sequence[float], peaks: Sequence[float], fits: Sequence[bool]
) -> dict[str, Any]:
    measured = np.array([np.inf if one.iteration_time_s is None else one.iteration_time_s for one in trials])
    guessed = np.array(times_s)
    # A run out of memory has no time; one that failed otherwise was slower than the others.
    timed = [index for index, one in enumerate(trials) if not one.out_of_memory]
    by_group = grouped(timed, lambda index: (trials[index].source, trials[index].group))
    groups = [(measured[rows], guessed[rows]) for rows in by_group.values()]
    pairs, clear = pair_accuracy(groups, CLEAR_GAP)
    held = np.array([np.inf if one.peak_memory_bytes is None else one.peak_memory_bytes for one in trials])
    off, memory_off = relative_errors(measured, guessed), relative_errors(held, np.array(peaks))
    failed = [float(not fit) for one, fit in zip(trials, fits, strict=True) if one.out_of_memory]
    ran = [
        float(not fit)
        for one, fit in zip(trials, fits, strict=True)
        if not one.out_of_memory and one.iteration_time_s is not None
    ]
    return {
        "n": len(off),
        "groups": len(groups),
        "mape": mean(np.abs(off)),
        "bias": mean(off),
        "spearman": mean(map(spearman, groups)),
        "pairs": pairs,
        "pair_accuracy": clear,
        "pair_accuracy_all": pair_accuracy(groups, 0.0)[1],
        "top1_regret": mean(map(top1_regret, groups)),
        "memory": {
            "n": len(memory_off),
            "mape": mean(np.abs(memory_off)),
            "bias": mean(memory_off),
            "out_of_memory": len(failed),
            "out_of_memory_recall": mean(failed),
            "false_alarms": mean(ran),
        },
    }


def validation_document(
    predicted: Sequence[PredictedTrial],
    *,
    calibrated_on: Sequence[str],
    in_sample: int,
    num_folds: int | None,
    left_out: str | None = None,
) -> dict[str, Any]:
    """All figures and all predictions.

    Args:
        in_sample: number of the trials that the calibration used.
        num_folds: folds of the cross-validation; None without one.
        left_out: the property of `LEFT_OUT` that makes the folds; None without one.
    """
    described = grouped({(one.trial.path, one.trial.source) for one in predicted}, lambda each: each[0])

    def data_set(one: PredictedTrial) -> str:
        """The file of a trial, and its source where the file has several."""
        stem, trial = Path(one.trial.path).stem, one.trial
        return stem if len(described[trial.path]) == 1 else f"{stem}: {trial.source or 'no source'}"

    sources = grouped(predicted, data_set)
    groups = {source: grouped(rows, lambda one: one.trial.group) for source, rows in sources.items()}
    return {
        "calibrated_on": list(calibrated_on),
        "folds": num_folds,
        "left_out": left_out,
        "in_sample": in_sample,
        "overall": summary(predicted),
        "sources": {source: _of_source(rows) for source, rows in sources.items()},
        "groups": {source: {group: summary(rows) for group, rows in of.items()} for source, of in groups.items()},
        "predictions": [_prediction(one, data_set(one)) for one in predicted],
    }


def _of_source(rows: Sequence[PredictedTrial]) -> dict[str, Any]:
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


def _prediction(one: PredictedTrial, source: str) -> dict[str, Any]:
    trial = one.trial
    return {
        "source": source,
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
    "memory: MAPE of peaks; seen: of runs out of memory; false: of other runs predicted to be",
    "naive line: 45 % of the peak, recomputation included, 1F1B's bubble; 16 B a parameter",
)


def print_validation(document: dict[str, Any], console: Console, *, show_groups: bool) -> None:
    """Print a line for each source, or each group, with the naive model under it, and one for all together."""
    table = Table(title="Predicted and measured", title_justify="left", padding=(0, 0, 0, 1))
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)

    def add(name: str, figures: dict[str, Any]) -> None:
        table.add_row(*_row(name, figures))
        table.add_row(*_row("  naive line", {**figures["naive"], "interval_coverage": None}), style="dim")

    for source, figures in document["sources"].items():
        add(source, figures)
        if show_groups:
            for group, of_group in document["groups"][source].items():
                table.add_row(*_row(f"  {group}", of_group), style="dim")
    if len(document["sources"]) > 1:
        table.add_section()
        add("all", document["overall"])
    console.print(table)
    console.print(*LEGEND, *_calibration_lines(document), sep="\n", markup=False, highlight=False)


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    memory, ranked = figures["memory"], figures["spearman"]
    shares = [percent(figures[key]) for key in ("pair_accuracy", "top1_regret", "interval_coverage")]
    of_memory = [percent(memory[key]) for key in ("mape", "out_of_memory_recall", "false_alarms")]
    correlation = "-" if ranked is None else f"{ranked:.3f}"
    return [name, str(figures["n"]), percent(figures["mape"]), correlation, *shares, *of_memory]


def _calibration_lines(document: dict[str, Any]) -> list[str]:
    """Return the trials that constants were fitted to, and the sources with trials that had none to fit to."""
    lines = []
    if document["folds"]:
        lines.append(f"Calibrated in {document['folds']} folds: each group is predicted from groups of other folds.")
    elif document["left_out"]:
        what = LEFT_OUT[document["left_out"]][0]
        lines.append(f"Trials are predicted from the trials of the source with other {what}, if there are any.")
    elif document["calibrated_on"]:
        lines.append(f"Calibrated on {', '.join(document['calibrated_on'])}.")
    else:
        lines.append("Nothing was calibrated.")
    alone = {name: of for name, of in document["sources"].items() if of["nothing_fitted"]}
    if alone and (document["folds"] or document["left_out"]):
        counted = (f"{name} ({of['nothing_fitted']} of {of['trials']} trials)" for name, of in alone.items())
        lines.append(
            f"NOTHING FITTED for {', '.join(counted)}: there are no others of their cluster to be calibrated on."
        )
    if document["in_sample"]:
        lines.append(f"IN-SAMPLE: {document['in_sample']} of the trials are among the trials of the calibration.")
    return lines
