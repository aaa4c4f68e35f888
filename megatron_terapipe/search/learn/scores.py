"""Scores of predictions. Trials are ranked against each other only within their group."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.learn.trials import Trial

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
