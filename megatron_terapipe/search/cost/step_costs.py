"""Seconds at the end of an iteration: reductions of gradients and of the tied embedding, and the optimizer step."""

from typing import NamedTuple

import numpy as np

from megatron_terapipe.search.cost.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from megatron_terapipe.search.cost.rank_groups import GroupTopology
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import ScalarOrArray
from megatron_terapipe.search.software.description import ELEMENT_BYTES, Software


class StepCosts(NamedTuple):
    """Seconds of one pipeline rank after its last backward; numbers or arrays."""

    gradient_reduction: ScalarOrArray
    shared_weight: ScalarOrArray
    optimizer: ScalarOrArray
    late: ScalarOrArray = 0.0
    """Part of the gradient reduction that begins when all backwards are done: of weights that the ends sum first, and
    the gathering of stepped weights."""


class StepTraffic(NamedTuple):
    """Messages of data-parallel ranks for one parameter at the end of an iteration.

    Attributes:
        reduced_bytes: bytes of its gradient.
        reduces_to_all: whether every rank gets the sum, not only the one that steps the parameter.
        divides_step: whether each rank steps its part of the parameters, and gathers the others.
        gathered_bytes: bytes of the parameter then.
    """

    reduced_bytes: int
    reduces_to_all: bool
    divides_step: bool
    gathered_bytes: int


def step_traffic(software: Software, precision: str, zero_stage: int) -> StepTraffic:
    """Return the messages of a trainer.

    ZeRO 1 steps a part and gathers it (Rajbhandari et al., arXiv 1910.02054 section 5.1).
    DeepSpeed's pipeline engine hands bf16 to its BF16_Optimizer, which divides the step at ZeRO stage 0, too, and whose
    gradients are reduced to all ranks even at stage 1 (`_do_optimizer_sanity_check` and `buffered_allreduce_fallback`
    of `runtime/engine.py`, `_bf16_reduce_grads` of `runtime/pipe/engine.py`, release 0.19.8). They are added up and
    reduced in fp32 at stage 1, in bf16 at stage 0 (`training/deepspeed_config.py`); see also `state_memory`.

    Args:
        software: the trainer.
        precision: `fp32`, `fp16` or `bf16`.
        zero_stage: ZeRO stage.
    """
    stated = software.communication.reduction_bytes
    if stated is not None:
        reduced = stated
    elif precision == "bf16":
        return StepTraffic(4 if zero_stage else 2, True, True, 2)
    else:
        reduced = 4 if precision == "fp32" else 2
    weight = ELEMENT_BYTES[precision]
    return StepTraffic(reduced, not zero_stage, bool(zero_stage), weight)


def step_costs(
    parameters: ScalarOrArray,
    shared_parameters: ScalarOrArray,
    data_topology: GroupTopology,
    ends_topology: GroupTopology,
    memory_bandwidth: ScalarOrArray,
    *,
    zero_stage: int,
    precision: str,
    software: Software,
    efficiency: HardwareEfficiency,
) -> StepCosts:
    """Price the end of an iteration; arguments broadcast.

    Args:
        parameters: parameters of a rank.
        shared_parameters: those of a weight that both ends of the pipeline hold; 0 if no two ranks share it.
        data_topology: links between data-parallel ranks.
        ends_topology: links between the first and the last pipeline rank.
        memory_bandwidth: bytes per second of the device.
        zero_stage: 0 or 1.
        precision: `bf16`, `fp16` or `fp32`.
        software: the trainer.
        efficiency: constants of the hardware.
    """
    traffic = step_traffic(software, precision, zero_stage)
    gradients = traffic.reduced_bytes * parameters
    reduce = all_reduce_s if traffic.reduces_to_all else reduce_scatter_s
    reduction = reduce(gradients, data_topology, efficiency)
    late = reduction * shared_parameters / np.maximum(parameters, 1.0)
    stepped = parameters
    if traffic.divides_step:
        gathering = all_gather_s(traffic.gathered_bytes * parameters, data_topology, efficiency)
        reduction, late = reduction + gathering, late + gathering
        stepped = parameters / data_topology.size
    shared = np.where(
        np.greater(shared_parameters, 0),
        all_reduce_s(traffic.reduced_bytes * shared_parameters, ends_topology, efficiency),
        0.0,
    )
    reached = memory_bandwidth * efficiency.memory_efficiency
    return StepCosts(reduction, shared, efficiency.optimizer_passes * software.step_bytes * stepped / reached, late)


def shown_reduction_s(
    step: StepCosts, last_op_s: ScalarOrArray, layers: ScalarOrArray, cool_down_s: ScalarOrArray = 0.0
) -> ScalarOrArray:
    """Seconds of a rank's gradient reduction that no op hides, if it starts as gradients are complete.

    Arguments broadcast. The layers of the rank's stage finish one after the other in its last op, and their reductions
    run one after the other, as `deepspeed_ext.plan.programs.reductions` simulates them.

    Args:
        step: the end of the iteration, of the rank.
        last_op_s: the op that completes its gradients: the last backward, or the last weight gradient.
        layers: of its stage.
        cool_down_s: for which ranks before it still run after that op.
    """
    summed, layers = step.gradient_reduction - step.late, np.maximum(layers, 1.0)
    shown = np.maximum(summed - last_op_s * (layers - 1) / layers, summed / layers)
    return np.maximum(shown - cool_down_s, 0.0) + step.late


def exposed_reduction_s(
    step: StepCosts, last_op_s: ScalarOrArray, layers: ScalarOrArray, *, drains: bool
) -> ScalarOrArray:
    """Return the seconds of each rank's gradient reduction that no op hides: [P, ...].

    Args:
        step: the end of the iteration, of each rank.
        last_op_s: [P, ...] seconds of the op that completes a rank's gradients.
        layers: [P, ...] layers of the stage that it completes.
        drains: whether that op passes the ranks in turn, last to first; deferred weight gradients end on all together.
    """
    cool_down_s = np.cumsum(last_op_s, axis=0) - last_op_s if drains else 0.0
    return shown_reduction_s(step, last_op_s, layers, cool_down_s)
