"""Stage partitions: the best one of our solver, and AMP's, which has its own idea of what a stage costs."""

import numpy as np

from deepspeed_ext.plan.partition import StagePartition
from examples.amp.deepspeed_costs import DeepSpeedCosts
from megatron_terapipe.search.solve.stages import SolvedPartition, best_partition, solve
from megatron_terapipe.search.solve.stages_times import Numbers, StageTimes, stage_times
from megatron_terapipe.strategy import Strategy

CAPS = 4
"""Limits on the parameters of a stage that are tried: what a stage computes and what it reduces pull in two ways."""


def candidate_partitions(costs: DeepSpeedCosts, strategy: Strategy) -> list[StagePartition]:
    """Partitions of which one is the best: exact for the pipeline, under several limits on parameters of a stage.

    Gradients are reduced when the pipeline is empty, by the stage with most parameters, which is no sum over stages:
    limits on it, from none to the tightest there is, turn it into one.
    """
    num_stages, num_layers = strategy.pipeline_parallel_size, len(costs.workload.layers)
    if num_stages == 1:
        return [StagePartition((0, num_layers))]
    messages = costs.messages_s(strategy)
    cuts = np.zeros((num_stages - 1, num_layers + 1))
    cuts[:, 1:] = messages.there + messages.back
    forward, backward = costs.layer_times_s(strategy)
    times = stage_times(forward + backward, num_stages, cut_times_s=cuts, blocking=True)
    sizes = [float(layer.parameters) for layer in costs.workload.layers]
    found = [solve(times, strategy.num_micro_batches).partition]
    if strategy.data_parallel_size > 1:
        held = np.array([sum(sizes[i] for i in found[0].layers(stage)) for stage in range(num_stages)])
        balanced = StagePartition.balanced(sizes, num_stages)
        tightest = max(sum(sizes[i] for i in balanced.layers(stage)) for stage in range(num_stages))
        before = np.concatenate([[0.0], np.cumsum(sizes)])
        of_run = before[None, :] - before[:, None]
        for cap in np.linspace(tightest, held.max(), CAPS, endpoint=False):
            allowed = of_run[None] <= cap * (1 + 1e-9)
            limited = StageTimes(np.where(allowed, times.period_s, np.inf), np.where(allowed, times.fill_s, np.inf))
            found.append(solve(limited, strategy.num_micro_batches).partition)
    return list(dict.fromkeys(found))


def amp_partition(
    layer_times_s: Numbers, cut_times_s: Numbers, num_stages: int, num_micro_batches: int
) -> SolvedPartition:
    """The best partition under AMP's objective: (M - 1) x slowest stage + all stages + each cut once.

    Args:
        layer_times_s: [L] forward and backward of one micro-batch.
        cut_times_s: [num_stages - 1, L + 1] one activation, by boundary and first layer behind it.
        num_stages: of the pipeline.
        num_micro_batches: M; with one AMP deals layers evenly, which is what M = 2 comes to.
    """
    return best_partition(layer_times_s, num_stages, max(num_micro_batches, 2), cut_times_s=cut_times_s)
