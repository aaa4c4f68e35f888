"""The end of an iteration: reductions of gradients and of the tied embedding, and the optimizer step; for arrays."""

from typing import NamedTuple

import numpy as np

from megatron_terapipe.search.machine.software import OPERAND_BYTES, Communication, Software
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.layer_times import ScalarOrArray
from megatron_terapipe.search.price.links import (
    ALONE,
    GroupTopology,
    ShardLinks,
    all_gather_s,
    all_reduce_s,
    reduce_scatter_s,
)
from megatron_terapipe.search.price.makespan import Pipeline


class StepCosts(NamedTuple):
    """Seconds of one pipeline rank outside of its ops, without overlap; numbers or arrays."""

    gradient_reduction: ScalarOrArray
    shared_weight: ScalarOrArray
    """Of the gradient of a weight that both ends of the pipeline hold."""
    optimizer: ScalarOrArray
    late: ScalarOrArray = 0.0
    """Part of the gradient reduction that begins after all backwards: of weights that the ends sum first."""
    weight_gather: ScalarOrArray = 0.0
    """Of all its weights, of which data-parallel ranks have a part each."""


class CoveringOps(NamedTuple):
    """Ops of a rank under which reductions and gathers can run; seconds, numbers or arrays."""

    completing: ScalarOrArray
    """The op that completes the gradients of the rank: its last backward, or its last weight gradient."""
    forward: ScalarOrArray
    backward: ScalarOrArray
    layers: ScalarOrArray
    """Layers of the stage with the last complete gradients, which complete one after the other."""
    pipeline: Pipeline

    def cool_down_s(self, *, drains: bool) -> ScalarOrArray:
        """Seconds for which the ranks before still run after the completing op, from arrays of [P, ...].

        Args:
            drains: whether the completing op passes the ranks in turn, last to first; deferred weight gradients end on
                all ranks together.
        """
        return np.cumsum(self.completing, axis=0) - self.completing if drains else 0.0


class StepTraffic(NamedTuple):
    """Messages of data-parallel ranks for one parameter at the end of an iteration."""

    reduced_bytes: int
    reduces_to_all: bool
    """Whether every rank gets the sum, not only the one that steps the parameter."""
    divides_step: bool
    """Whether each rank steps its part of the parameters, and gathers the others."""
    gathered_bytes: float


def step_traffic(software: Software, precision: str, zero_stage: int) -> StepTraffic:
    """Return the messages of a trainer.

    ZeRO 1 steps a part and gathers it (Rajbhandari et al., arXiv 1910.02054 section 5.1).
    DeepSpeed's pipeline engine uses its BF16_Optimizer for bf16, which divides the step at ZeRO stage 0, too. Gradients
    are reduced to all ranks even at stage 1 (`_do_optimizer_sanity_check` and `buffered_allreduce_fallback`
    of `runtime/engine.py`, `_bf16_reduce_grads` of `runtime/pipe/engine.py`, release 0.19.8). They are added up and
    reduced in fp32 at stage 1, in bf16 at stage 0 (`training/deepspeed_config.py`); see also `price/memory.py`.
    """
    stated = software.communication.reduction_bytes
    if stated is not None:
        reduced = stated
    elif precision == "bf16":
        return StepTraffic(4 if zero_stage else 2, True, True, 2)
    else:
        reduced = 4 if precision == "fp32" else 2
    return StepTraffic(reduced, not zero_stage, bool(zero_stage), OPERAND_BYTES[precision])


def step_costs(
    parameters: ScalarOrArray,
    shared_parameters: ScalarOrArray,
    shards: ShardLinks,
    ends_topology: GroupTopology,
    memory_bandwidth: ScalarOrArray,
    *,
    zero_stage: int,
    precision: str,
    software: Software,
    efficiency: HardwareEfficiency,
    expert_parameters: ScalarOrArray = 0.0,
    expert_topology: GroupTopology = ALONE,
) -> StepCosts:
    """Price the end of an iteration; arguments broadcast.

    Args:
        parameters: of a rank, without experts.
        shared_parameters: of a weight that both ends of the pipeline hold; 0 if no two ranks share it.
        ends_topology: links between the first and the last pipeline rank.
        memory_bandwidth: bytes per second of the device.
        expert_parameters: of experts on a rank.
        expert_topology: links between the ranks with the same experts.
    """
    traffic = step_traffic(software, precision, zero_stage)
    reduce = all_reduce_s if traffic.reduces_to_all else reduce_scatter_s
    has_experts = np.greater(expert_parameters, 0)
    bucket = np.maximum(software.bucket_elements, software.bucket_elements_per_rank * shards.group.size)
    messages = np.maximum(parameters / bucket, 1.0) if software.bucket_elements else 1.0
    reduction = reduce(traffic.reduced_bytes * parameters, shards.group, efficiency, messages)
    of_part = traffic.reduced_bytes * parameters / shards.group.size
    reduction = reduction + all_reduce_s(of_part, shards.copies, efficiency, messages)
    late = reduction * shared_parameters / np.maximum(parameters, 1.0)
    of_experts = reduce(traffic.reduced_bytes * expert_parameters, expert_topology, efficiency)
    reduction = reduction + np.where(has_experts, of_experts, 0.0)
    stepped: ScalarOrArray = parameters + expert_parameters
    gather: ScalarOrArray = 0.0 * reduction
    if traffic.divides_step:
        parts = shards.group.size if software.communication.broadcasts_parts else messages
        gather = all_gather_s(traffic.gathered_bytes * parameters, shards.group, efficiency, parts)
        of_experts = all_gather_s(traffic.gathered_bytes * expert_parameters, expert_topology, efficiency)
        gather = gather + np.where(has_experts, of_experts, 0.0)
        stepped = parameters / shards.group.size + expert_parameters / expert_topology.size
    shared = np.where(
        np.greater(shared_parameters, 0),
        all_reduce_s(traffic.reduced_bytes * shared_parameters, ends_topology, efficiency),
        0.0,
    )
    reached = memory_bandwidth * efficiency.memory_efficiency
    step_s = efficiency.optimizer_passes * software.step_bytes * stepped / reached
    step_s = step_s + software.state(precision, zero_stage).whole_step * (parameters + expert_parameters) / reached
    return StepCosts(reduction, shared, step_s, late, gather)


def exposed_reduction_s(
    step: StepCosts,
    ops: CoveringOps,
    communication: Communication,
    efficiency: HardwareEfficiency,
    cool_down_s: ScalarOrArray = 0.0,
    *,
    zero_stage: int,
) -> ScalarOrArray:
    """Seconds of a rank's gradient reduction and weight gathering that no op hides; arguments broadcast.

    Reductions that overlap start as gradients are complete: stage by stage of the rank, and the layers of its last one
    after the other in the last op; they run one after the other, as `deepspeed_ext.plan.programs.program` simulates
    them. Gathers that overlap run layer by layer before the next forward of each. Stage 3 gathers weights for the
    forward and again for the backward of each micro-batch, and reduces gradients in each (ZeRO, arXiv 1910.02054
    section 5.3; FSDP, arXiv 2304.11277 section 3).

    Args:
        cool_down_s: see `CoveringOps.cool_down_s`; 0 for one rank.
    """
    layers = np.maximum(ops.layers, 1.0)
    stages, turns = ops.pipeline.completed, ops.pipeline.turns
    parts = layers * stages
    if zero_stage == 3:
        in_forward = efficiency.exposed_s(step.weight_gather, ops.forward)
        in_backward = efficiency.exposed_s(step.weight_gather + step.gradient_reduction, ops.backward)
        ends = (step.weight_gather + step.gradient_reduction) / layers
        return ops.pipeline.num_micro_batches * (in_forward + in_backward) + ends
    shown, gather = step.gradient_reduction, step.weight_gather
    if communication.overlaps_gradient_reduction:
        summed = step.gradient_reduction - step.late
        # The last stage's own, and those of all stages, which wait for each other.
        after = np.maximum(summed / stages - ops.completing, summed - ops.completing * turns)
        after = np.maximum(after + ops.completing / layers, summed / parts)
        after = np.maximum(after - cool_down_s, 0.0)
        shown = after + efficiency.overlap_exposed * (summed - after) + step.late
    if communication.overlaps_weight_gather:
        under = ops.forward * turns / stages
        gather = gather / parts + efficiency.exposed_s(gather * (parts - 1) / parts, under)
    return shown + gather
