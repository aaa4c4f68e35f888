"""Where the time of an iteration goes, on the busiest pipeline rank."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.search.cost.prediction import TimeBreakdown
from megatron_terapipe.search.cost.simulated_time import SimulatedTime
from megatron_terapipe.search.cost.stage_ops import (
    BACKWARD,
    FORWARD,
    HEAD_EXCHANGE,
    INPUT_GRADIENT,
    TENSOR_PARALLEL,
    WEIGHT_GRADIENT,
)
from megatron_terapipe.search.cost.step_costs import CoveringOps, StepCosts, exposed_reduction_s
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.software.description import Software

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePrediction:
    """Time of one iteration, and where it goes."""

    iteration_time_s: float
    """Seconds."""
    bubble_ratio: float
    """Idle time / (pipeline ranks x makespan)."""
    breakdown: TimeBreakdown
    """On the busiest pipeline rank."""
    notes: tuple[str, ...] = ()
    """What is extrapolated, a line each."""


def time_prediction(
    shape: PipelineShape,
    stages: Floats,
    costs: OpCosts,
    simulated: SimulatedTime,
    step: StepCosts,
    *,
    layers: Floats,
    software: Software,
    efficiency: HardwareEfficiency,
) -> TimePrediction:
    """Put a prediction together.

    Args:
        stages: [6 parts of `StageOps`, stages, S] seconds of the ops of one micro-batch, without messages.
        costs: the same with messages that block; with weight gradients apart if the schedule computes them so.
        step: the end of the iteration, arrays of [P] seconds.
        layers: [P] layers of the first stage of each rank, whose gradients are complete last, one after the other.
        efficiency: fixed times, and how much shows of what runs under ops.
    """
    ranks, micro_batches = shape.num_ranks, shape.num_micro_batches
    split = costs.weight_gradient is not None

    def by_rank(seconds: Floats) -> Floats:
        """Sum [stages, S] over the stages of each rank, and over token slices: [P]."""
        return np.asarray(seconds.sum(axis=1).reshape(-1, ranks).sum(axis=0))

    backward = stages[INPUT_GRADIENT] + stages[WEIGHT_GRADIENT] if split else stages[BACKWARD]
    op_s = (2 + split) * efficiency.op_s * shape.num_token_slices * shape.num_model_chunks
    computing = by_rank(stages[FORWARD] + backward) + op_s
    reducing, exchanging = by_rank(stages[TENSOR_PARALLEL]), by_rank(stages[HEAD_EXCHANGE])
    tables = [costs.forward, costs.backward, *([] if costs.weight_gradient is None else [costs.weight_gradient])]
    busy = by_rank(np.sum(tables, axis=0))
    busiest = int(np.argmax(busy))
    covering = CoveringOps(
        completing=np.array(costs.weight_gradient or costs.backward)[:ranks, 0],
        forward=by_rank(stages[FORWARD]),
        backward=by_rank(backward),
        layers=layers,
        num_micro_batches=micro_batches,
    )
    reduction = exposed_reduction_s(step, covering, software.communication, efficiency, drains=not split)
    blocked = max(micro_batches * float(busy[busiest] - computing[busiest]), 0.0)
    waiting = max(simulated.makespan - micro_batches * float(busy[busiest]), 0.0)
    copying = min(simulated.host_copy_s, waiting)
    sending = simulated.makespan - simulated.host_copy_s - simulated.makespan_without_transfers
    exposed = min(max(sending, 0.0), waiting - copying)
    breakdown = TimeBreakdown(
        compute_s=micro_batches * float(computing[busiest] - reducing[busiest] - exchanging[busiest]),
        tensor_parallel_s=micro_batches * float(reducing[busiest]),
        head_exchange_s=micro_batches * float(exchanging[busiest]),
        bubble_s=waiting - exposed - copying,
        host_copy_s=copying,
        transfer_s=blocked + exposed,
        gradient_reduction_s=float(np.max(reduction)),
        shared_weight_s=float(np.max(step.shared_weight)),
        optimizer_s=float(np.max(step.optimizer)),
        fixed_s=efficiency.iteration_s,
    )
    bubble = 1 - micro_batches * float(busy.sum()) / (ranks * simulated.makespan)
    return TimePrediction(
        iteration_time_s=breakdown.total_s,
        bubble_ratio=max(bubble, 0.0),
        breakdown=breakdown,
        notes=simulated.notes,
    )
