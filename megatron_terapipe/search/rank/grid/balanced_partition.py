"""The stage partition that balances predicted times, cheaply enough for every layout of a space.

Layers that are alike are dealt one by one, each to the rank that is then the least loaded: the heaviest rank is as
light as it can be, whatever stands at the ends and however fast devices are. Layers that differ need the exact program
of `stage_partition`.
"""

from heapq import heapify, heapreplace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.partition import StagePartition
from megatron_terapipe.search.cost.layer_counts import LayerCounter
from megatron_terapipe.search.cost.links.rank_groups import RankGroups
from megatron_terapipe.search.cost.stage_ops import BACKWARD, FORWARD
from megatron_terapipe.search.rank.grid.op_tables import OpTables
from megatron_terapipe.search.rank.grid.stage_partition import best_partition
from megatron_terapipe.search.space.problem import SearchProblem
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]


def layer_times(counter: LayerCounter, grid: StrategyGrid, groups: RankGroups, tables: OpTables) -> Floats:
    """Return the seconds of forward and backward of one micro-batch of each layer on each pipeline rank: [P, layers].

    Args:
        counter: knows the kind of each layer.
        grid: the grid; the first value of each axis counts.
    """
    times = np.empty((len(groups.devices), len(counter.kind_of_layer)))
    for kind in groups.kinds:
        whole = [tables.table(grid, device, kind.links).whole[..., 0, 0, 0, 0] for device in kind.devices]
        slowest = np.maximum.reduce([ops[FORWARD] + ops[BACKWARD] for ops in whole])
        times[kind.ranks] = slowest[counter.kind_of_layer]
    return times


def balanced_partition(
    problem: SearchProblem, layer_times_s: Floats, num_ranks: int, model_chunks: int, num_micro_batches: int
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
    num_stages = num_ranks * model_chunks
    stage_rows = np.tile(dealt, (model_chunks, 1))
    stage_rows[0, 0] += ends[0]
    stage_rows[-1, -1] += ends[-1]
    return best_partition(stage_rows, num_stages, num_micro_batches).partition


def _alike(each_s: Floats, ends_s: Floats, num_layers: int, model_chunks: int) -> list[int]:
    """Layers of each stage, first to last."""
    ranks = len(each_s)
    layers = [model_chunks] * ranks
    loads = [(float(ends_s[rank] + (layers[rank] + 1) * each_s[rank]), rank) for rank in range(ranks)]
    heapify(loads)
    for _ in range(num_layers - ranks * model_chunks):
        rank = loads[0][1]
        layers[rank] += 1
        heapreplace(loads, (float(ends_s[rank] + (layers[rank] + 1) * each_s[rank]), rank))
    # A rank's stages share its layers; the first ones take what is left over.
    return [
        layers[rank] // model_chunks + (model_chunk < layers[rank] % model_chunks)
        for model_chunk in range(model_chunks)
        for rank in range(ranks)
    ]
