"""Stage partitions: the best one of our solver, and AMP's, which has its own idea of what a stage costs."""

from itertools import pairwise

import numpy as np

from deepspeed_ext.plan.partition import StagePartition
from examples.amp.deepspeed_costs import DeepSpeedCosts
from megatron_terapipe.search.rank.grid.stage_partition import (
    Numbers,
    SolvedPartition,
    StageTimes,
    best_partition,
    solve,
    stage_times,
)
from megatron_terapipe.strategy import Strategy

CAPS = 4
"""Limits on the parameters of a stage that are tried: what a stage computes and what it reduces pull in two ways."""


def candidate_partitions(costs: DeepSpeedCosts, strategy: Strategy) -> list[StagePartition]:
    """Partitions of which one is the best: each is exact, for another view of what lies outside stages.

    Messages hide under other micro-batches in part: they are counted once as if all did, and once as if none. Gradients
    are reduced when the pipeline is empty, by the stage with most parameters, which is no sum over stages: limits on
    it, from none to the tightest there is, turn it into one.
    """
    num_stages, num_layers = strategy.pipeline_parallel_size, len(costs.workload.layers)
    if num_stages == 1:
        return [StagePartition((0, num_layers))]
    messages = costs.messages_s(strategy)
    cuts = np.zeros((num_stages - 1, num_layers + 1))
    cuts[:, 1:] = messages.there + messages.back
    layers = np.add(*costs.layer_times_s(strategy))
    hidden, exposed = (stage_times(layers, num_stages, cut_times_s=cuts, blocking=each) for each in (False, True))
    found = [solve(times, strategy.num_micro_batches).partition for times in (hidden, exposed)]
    if strategy.data_parallel_size > 1:
        sizes = np.array([float(layer.parameters) for layer in costs.workload.layers])
        before = np.concatenate([[0.0], np.cumsum(sizes)])
        of_run = before[None, :] - before[:, None]
        tightest = _most(of_run, StagePartition.balanced(sizes.tolist(), num_stages))
        for cap in np.linspace(tightest, _most(of_run, found[0]), CAPS, endpoint=False):
            within = of_run[None] <= cap * (1 + 1e-9)
            limited = StageTimes(np.where(within, hidden.period_s, np.inf), np.where(within, hidden.fill_s, np.inf))
            found.append(solve(limited, strategy.num_micro_batches).partition)
    return list(dict.fromkeys(found))


def _most(of_run: Numbers, partition: StagePartition) -> float:
    """Parameters of the stage with most of them."""
    return float(max(of_run[first, end] for first, end in pairwise(partition.bounds)))


def amp_partition(
    layer_times_s: Numbers, cut_times_s: Numbers, num_stages: int, num_micro_batches: int
) -> SolvedPartition:
    """The best partition under AMP's objective: (M - 1) x slowest stage + all stages + each cut once.

    Args:
        layer_times_s: [L] forward and backward of one micro-batch.
        cut_times_s: [num_stages - 1, L + 1] one activation, by boundary and first layer behind it.
        num_micro_batches: M; with one AMP deals layers evenly, which is what M = 2 comes to.
    """
    return best_partition(layer_times_s, num_stages, max(num_micro_batches, 2), cut_times_s=cut_times_s)


def partition_of_amp(costs: DeepSpeedCosts, strategy: Strategy) -> StagePartition:
    """The partition that AMP chooses, but for those that its solver misses (`src/pipe.py`, `src/cost_*.py`).

    AMP takes the mean of the profiles over all devices, three forwards for both passes, and as much for a cut wherever
    it is, so that cuts play no part. It deals the layers that compute; the others go with the one before them. With one
    micro-batch it deals transformer layers evenly.
    """
    num_stages, workload = strategy.pipeline_parallel_size, costs.workload
    blocks = [index for index, layer in enumerate(workload.layers) if layer.kind == "block"]
    uneven = any(workload.layers[index].tokens != workload.layers[blocks[0]].tokens for index in blocks)
    work = [0, *blocks] if uneven else list(range(len(workload.layers)))
    if strategy.num_micro_batches == 1:
        even = StagePartition.uniform(len(blocks), num_stages).bounds
        inner = [blocks[bound] for bound in even[1:-1]]
    else:
        names = [node.device.name for node in costs.cluster.nodes for _ in range(node.num_devices)]
        size = strategy.tensor_parallel_size
        times = np.array([[costs.published[name][index][size] for index in work] for name in names])
        solved = amp_partition(times.mean(axis=0), np.zeros(len(work) + 1), num_stages, strategy.num_micro_batches)
        inner = [work[bound - 1] + 1 for bound in solved.partition.bounds[1:-1]]
    return StagePartition((0, *inner, len(workload.layers)))
