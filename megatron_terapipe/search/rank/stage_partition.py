"""Layers of each stage: a quick partition for every layout of a space.

Layers that are alike are dealt one by one, each to the rank that is then the least loaded, so the heaviest rank is as
light as it can be, for any layers at the ends and any speeds of devices. Layers that differ are dealt so that the
slowest stage is as fast as can be, and of all such partitions so that the first micro-batch passes fastest.
"""

from heapq import heapify, heapreplace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import StagePartition
from megatron_terapipe.search.price.links import RankGroups
from megatron_terapipe.search.price.stages import BACKWARD, FORWARD, LayerCounter
from megatron_terapipe.search.rank.grid_times import WHOLE, OpTables
from megatron_terapipe.search.rank.space import SearchProblem, StrategyGrid

Numbers = NDArray[np.float64]


def layer_times(counter: LayerCounter, grid: StrategyGrid, groups: RankGroups, tables: OpTables) -> Numbers:
    """Return the seconds of forward and backward of a micro-batch, of each layer on each pipeline rank: [P, layers]."""
    times = np.empty((len(groups.devices), len(counter.kind_of_layer)))
    for kind in groups.kinds:
        whole = [tables.table(grid, device, kind.links)[WHOLE, ..., 0, 0, 0, 0] for device in kind.devices]
        slowest = np.maximum.reduce([ops[FORWARD] + ops[BACKWARD] for ops in whole])
        times[kind.ranks] = slowest[counter.kind_of_layer]
    return times


def balanced_partition(
    problem: SearchProblem, layer_times_s: Numbers, num_ranks: int, model_chunks: int
) -> StagePartition:
    """Deal the layers of a model to stages.

    Args:
        layer_times_s: [P, all layers] forward and backward of one micro-batch on the device of each pipeline rank.
    """
    workload = problem.workload
    first, end = workload.first_dealt, workload.end_dealt
    dealt = layer_times_s[:, first:end]
    ends = np.zeros(num_ranks)
    ends[0] += layer_times_s[0, :first].sum()
    ends[-1] += layer_times_s[-1, end:].sum()
    if np.ptp(dealt, axis=1).max() <= 1e-9 * dealt.max():
        sizes = _alike(dealt[:, 0], ends, workload.num_dealt_layers, model_chunks)
        return StagePartition(tuple(accumulate(sizes, initial=0)))
    # Not every model has such layers, and this loads compiled code.
    from deepspeed_ext.plan.solve.layer_runs import bounds_of_runs

    stage_rows = np.tile(dealt, (model_chunks, 1))
    stage_rows[0, 0] += ends[0]
    stage_rows[-1, -1] += ends[-1]
    before = np.pad(np.cumsum(stage_rows, axis=1), ((0, 0), (1, 0)))
    return StagePartition(tuple(bounds_of_runs(before).tolist()))


def _alike(each_s: Numbers, ends_s: Numbers, num_layers: int, model_chunks: int) -> list[int]:
    """Layers of each stage, first to last."""
    ranks = len(each_s)
    layers = [model_chunks] * ranks
    loads = [(float(ends_s[rank] + (layers[rank] + 1) * each_s[rank]), rank) for rank in range(ranks)]
    heapify(loads)
    for _ in range(num_layers - ranks * model_chunks):
        rank = loads[0][1]
        layers[rank] += 1
        heapreplace(loads, (float(ends_s[rank] + (layers[rank] + 1) * each_s[rank]), rank))
    # A rank's stages share its layers; the first ones take the remainder.
    return [
        layers[rank] // model_chunks + (model_chunk < layers[rank] % model_chunks)
        for model_chunk in range(model_chunks)
        for rank in range(ranks)
    ]
