"""The exact stage partition, for any times of stages.

A pipeline of S stages that runs M micro-batches takes about

    (M - 1) x (period of the slowest stage) + sum of the fills of all stages

where the period of a stage is its time for one micro-batch, and its fill its part of the time in which the first
micro-batch goes through all stages (Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
Operators", NeurIPS 2020, use the first term; Li et al., "AMP", NeurIPS 2022, both). Both may depend on the layers of a
stage in any way: devices differ, transfers at a cut block both its sides.

`solve`: for one threshold on the period, the least sum of fills is a shortest path over cuts. It falls as the
threshold rises, in steps, so that the best of all thresholds is found by halving the range between two thresholds
wherever the sum differs at its ends and a threshold inside could win. The result is exact.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import StagePartition
from megatron_terapipe.errors import ConfigError

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """Seconds by stage, first layer and end (exclusive); infinite where that is not possible."""

    period_s: Numbers
    """[num_stages, L + 1, L + 1] time of one micro-batch."""
    fill_s: Numbers
    """[num_stages, L + 1, L + 1] part of the time in which one micro-batch passes all stages."""

    @property
    def num_stages(self) -> int:
        """Stages."""
        return int(self.period_s.shape[0])

    @property
    def num_layers(self) -> int:
        """Layers that they hold."""
        return int(self.period_s.shape[1]) - 1


def stage_times(layer_times_s: Numbers, num_stages: int) -> StageTimes:
    """Return the times of stages whose layers add up.

    Args:
        layer_times_s: [L], or [num_stages, L] where devices differ: forward and backward of one micro-batch.
    """
    layers = np.atleast_2d(np.asarray(layer_times_s, dtype=np.float64))
    num_layers = layers.shape[1]
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"stage_partition: {num_layers} layers on {num_stages} stages: give between 1 and {num_layers} stages"
        )
    before = np.zeros((layers.shape[0], num_layers + 1))
    np.cumsum(layers, axis=1, out=before[:, 1:])
    possible = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=bool), k=1)
    fill = np.where(possible, before[:, None, :] - before[:, :, None], np.inf)
    fill = np.array(np.broadcast_to(fill, (num_stages, *fill.shape[1:])))
    period = fill.copy()
    # The first stage begins with the first layer, the last one ends with the last.
    period[0, 1:] = period[-1, :, :-1] = np.inf
    return StageTimes(period, fill)


ROUNDING = 1e-12
"""Relative difference below which two sums of the same numbers in another order count as equal."""


def solve(times: StageTimes, num_micro_batches: int) -> tuple[StagePartition, float]:
    """Deal layers to stages so that the pipeline is as fast as can be, for any times of stages.

    The second value is (M - 1) x period of the slowest stage + sum of fills, in seconds.
    """
    weight = num_micro_batches - 1
    thresholds = np.unique(times.period_s[np.isfinite(times.period_s)]).tolist()
    loosest = len(thresholds) - 1
    lowest_sum = _sum_of_fills(times, thresholds[loosest]) if thresholds else np.inf
    if not np.isfinite(lowest_sum):
        raise ConfigError(
            f"stage_partition: no way to deal {times.num_layers} layers to {times.num_stages} stages stays within "
            "memory: use more stages, more tensor-parallel ranks, smaller micro-batches or recomputation"
        )
    tightest = _tightest(times, thresholds)
    sums = {loosest: lowest_sum, tightest: _sum_of_fills(times, thresholds[tightest])}

    def objective(index: int) -> float:
        return float(weight * thresholds[index] + sums[index])

    best = min(sums, key=objective)
    # Thresholds between two indices that may still win, and a sum that none of them is below.
    ranges = [(tightest, loosest, lowest_sum)]
    while ranges:
        low, high, least = ranges.pop()
        if weight:
            high = bisect_left(thresholds, (objective(best) - least) / weight, low, high)
        if high - low < 2 or sums[low] - least <= ROUNDING * least:
            continue
        middle = (low + high) // 2
        sums[middle] = _sum_of_fills(times, thresholds[middle])
        best = min(best, middle, key=objective)
        ranges += [(middle, high, least), (low, middle, sums[middle])]
    bounds = _path(times, thresholds[best])
    period = max(float(times.period_s[stage, bounds[stage], bounds[stage + 1]]) for stage in range(times.num_stages))
    fills = sum(float(times.fill_s[stage, bounds[stage], bounds[stage + 1]]) for stage in range(times.num_stages))
    return StagePartition(bounds), weight * period + fills


def _tightest(times: StageTimes, thresholds: list[float]) -> int:
    """Index of the smallest threshold that some partition keeps."""
    reach = np.full(times.num_layers + 1, np.inf)
    reach[0] = -np.inf
    for stage in range(times.num_stages):
        reach = np.maximum(reach[:, None], times.period_s[stage]).min(axis=0)
    return int(np.searchsorted(thresholds, reach[-1]))


def _sum_of_fills(times: StageTimes, threshold: float) -> float:
    """The least sum of fills if no period is above the threshold; infinite if there is no such partition."""
    return float(_reach(times, threshold)[-1][-1])


def _reach(times: StageTimes, threshold: float) -> list[Numbers]:
    """[num_stages + 1][L + 1]: the least sum of fills of the first stages, if they hold the first layers."""
    start = np.full(times.num_layers + 1, np.inf)
    start[0] = 0.0
    reach = [start]
    within = np.where(times.period_s <= threshold, times.fill_s, np.inf)
    for stage in range(times.num_stages):
        reach.append((reach[-1][:, None] + within[stage]).min(axis=0))
    return reach


def _path(times: StageTimes, threshold: float) -> tuple[int, ...]:
    """Bounds of a partition with the least sum of fills."""
    reach = _reach(times, threshold)
    bounds = [times.num_layers]
    for stage in reversed(range(times.num_stages)):
        end = bounds[-1]
        within = np.where(times.period_s[stage, :, end] <= threshold, times.fill_s[stage, :, end], np.inf)
        bounds.append(int(np.argmin(reach[stage] + within)))
    return tuple(reversed(bounds))
