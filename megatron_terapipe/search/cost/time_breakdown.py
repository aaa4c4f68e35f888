"""Where the time of an iteration goes, on the busiest pipeline rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.search.cost.prediction import TimeBreakdown
from megatron_terapipe.search.cost.simulated_time import SimulatedTime
from megatron_terapipe.search.cost.stage_ops import StageOps
from megatron_terapipe.search.cost.step_costs import StepCosts, shown_reduction_s
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.software import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePrediction:
    """Time of one iteration, and where it goes.

    Attributes:
        iteration_time_s: seconds.
        bubble_ratio: idle time / (pipeline ranks x makespan).
        breakdown: on the busiest pipeline rank.
        notes: what is extrapolated, a line each.
    """

    iteration_time_s: float
    bubble_ratio: float
    breakdown: TimeBreakdown
    notes: tuple[str, ...] = ()


def time_prediction(
    shape: PipelineShape,
    stages: Sequence[StageOps],
    costs: OpCosts,
    played: SimulatedTime,
    steps: Sequence[StepCosts],
    *,
    layers: Sequence[int],
    software: Software,
    efficiency: HardwareEfficiency,
) -> TimePrediction:
    """Put a prediction together.

    Args:
        shape: of the pipeline.
        stages: per stage the ops of one micro-batch, [S] by token slice, without messages.
        costs: the same with messages that block; with weight gradients apart if the schedule computes them so.
        played: how long all of them take.
        steps: per pipeline rank the end of the iteration.
        layers: of the first stage of each rank, whose gradients are complete one after the other at the very end.
        software: whether reductions travel under the last backward.
        efficiency: fixed times.
    """
    ranks, micro_batches = shape.num_ranks, shape.num_micro_batches
    split = costs.weight_gradient is not None
    busy, reducing, computing = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    for stage, ops in enumerate(stages):
        whole = ops.forward + (ops.input_gradient + ops.weight_gradient if split else ops.backward)
        weight = 0.0 if costs.weight_gradient is None else sum(costs.weight_gradient[stage])
        rank = shape.rank_of(stage)
        busy[rank] += sum(costs.forward[stage]) + sum(costs.backward[stage]) + weight
        reducing[rank] += float(np.sum(ops.tensor_parallel))
        computing[rank] += float(np.sum(whole)) + (2 + split) * efficiency.op_s * shape.num_token_slices
    busiest = int(np.argmax(busy))
    reduction = max(float(step.gradient_reduction) for step in steps)
    if software.overlaps_gradient_reduction:
        completing = costs.weight_gradient or costs.backward
        last_ops = [completing[rank][0] for rank in range(ranks)]
        # The last token slice passes the ranks in turn, last to first; put-off weight gradients end on all together.
        cool_down = [0.0 if split else sum(last_ops[:rank]) for rank in range(ranks)]
        reduction = max(
            float(shown_reduction_s(*each)) for each in zip(steps, last_ops, layers, cool_down, strict=True)
        )
    blocked = max(micro_batches * float(busy[busiest] - computing[busiest]), 0.0)
    waiting = max(played.makespan - micro_batches * float(busy[busiest]), 0.0)
    exposed = min(max(played.makespan - played.makespan_without_transfers, 0.0), waiting)
    breakdown = TimeBreakdown(
        compute_s=micro_batches * float(computing[busiest] - reducing[busiest]),
        tensor_parallel_s=micro_batches * float(reducing[busiest]),
        bubble_s=waiting - exposed,
        transfer_s=blocked + exposed,
        gradient_reduction_s=reduction,
        shared_weight_s=max(float(step.shared_weight) for step in steps),
        optimizer_s=max(float(step.optimizer) for step in steps),
        fixed_s=efficiency.iteration_s,
    )
    bubble = 1 - micro_batches * float(busy.sum()) / (ranks * played.makespan)
    return TimePrediction(
        iteration_time_s=breakdown.total_s,
        bubble_ratio=max(bubble, 0.0),
        breakdown=breakdown,
        notes=played.notes,
    )
