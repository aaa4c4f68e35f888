"""The time of a pipeline in closed form, and a bound that no order of its ops can beat; both for arrays.

P pipeline ranks, M micro-batches, S token slices, V model chunks. A rank's *total* is the time of all its ops of one
micro-batch. The slowest rank works all the time but for the ops of one token slice on one stage of every other rank,
which it waits for while the pipeline fills and drains:

    time = M * total of the slowest + (sum of the totals of the others) / (S V)

With equal ranks that is SC'21's bubble (arXiv 2104.04473 section 2.2), (P - 1)/(V M S + P - 1). `zero-bubble` fills
its drain with weight gradients: of each other rank F + BI - BW remain (arXiv 2401.10241 section 3, ZB-H1).

The end of the iteration follows (`step_costs`): reductions of gradients and of the tied embedding, and the optimizer
step.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.machine.software import ELEMENT_BYTES, Communication, Software
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.layer_times import ScalarOrArray
from megatron_terapipe.search.price.links import GroupTopology, all_gather_s, all_reduce_s, reduce_scatter_s
from megatron_terapipe.search.price.stages import StageOps

Floats = NDArray[np.float64]


def pipeline_time(
    schedule: str,
    *,
    num_micro_batches: ScalarOrArray,
    num_token_slices: ScalarOrArray,
    num_model_chunks: ScalarOrArray,
    slowest: StageOps,
    others: StageOps,
    latency_s: ScalarOrArray = 0.0,
    activation_limit: ScalarOrArray = 1.0,
) -> ScalarOrArray:
    """Seconds of one iteration's ops, in closed form; arguments broadcast.

    Args:
        slowest: ops of one micro-batch on the slowest rank, all its stages and token slices.
        others: the same, added up over all other ranks.
        activation_limit: of `zero-bubble`: activations that a rank may hold, as a multiple of 1F1B's peak. With twice
            as many, weight gradients of two ranks' worth fill the drain (the same paper, ZB-H2: F + BI - 2 BW); then
            ranks start the next iteration one after the other, as they end this one.
    """
    total = total_s(schedule, slowest)
    waits = others.forward + others.backward
    if schedule == "zero-bubble":
        filling = activation_limit * others.weight_gradient
        waits = np.maximum(others.forward + others.input_gradient - filling, 0.0)
    return num_micro_batches * total + waits / (num_token_slices * num_model_chunks) + latency_s


def of_slowest_and_others(schedule: str, ops: Floats, multiplicity: Floats | None = None) -> tuple[StageOps, StageOps]:
    """Return the ops of the slowest rank, and those of all others added up.

    Args:
        ops: [parts of `StageOps`, rows, ...] seconds of one micro-batch on each rank.
        multiplicity: [rows] ranks that a row stands for; None = one each.
    """
    totals = np.asarray(total_s(schedule, StageOps(*ops)))
    slowest = np.take_along_axis(ops, np.argmax(totals, axis=0)[None, None], axis=1)[:, 0]
    everything = ops.sum(axis=1) if multiplicity is None else np.tensordot(ops, multiplicity, axes=([1], [0]))
    return StageOps(*slowest), StageOps(*(everything - slowest))


def total_s(schedule: str, ops: StageOps) -> ScalarOrArray:
    """Seconds of all ops of a rank as a schedule runs them: the backward in one op or in two.

    Args:
        ops: seconds of the ops, which broadcast.
    """
    backward = ops.input_gradient + ops.weight_gradient if schedule == "zero-bubble" else ops.backward
    return ops.forward + backward


def lower_bound(
    schedule: str,
    *,
    num_micro_batches: ScalarOrArray,
    ops: StageOps,
    before: StageOps,
    put_off_s: ScalarOrArray = 0.0,
) -> ScalarOrArray:
    """Seconds of an iteration that no costs of the other ranks' ops make shorter; arguments broadcast.

    A rank runs all its ops. Its first one starts when the first token slice has passed the stages before it, and when
    its last backward is done, that token slice must go back through them. The same holds for a single stage of a rank.

    Args:
        before: of the first token slice on the stages that it passes before the rank, messages included.
        put_off_s: of `zero-bubble`: weight gradients of the rank that are still to do after its last input gradient,
            at most.
    """
    if schedule != "zero-bubble":
        return before.forward + num_micro_batches * total_s(schedule, ops) + before.backward
    ahead = np.maximum(num_micro_batches * ops.weight_gradient - put_off_s, 0.0)
    turning = num_micro_batches * (ops.forward + ops.input_gradient) + ahead + before.input_gradient
    return before.forward + np.maximum(turning, num_micro_batches * total_s(schedule, ops))


def round_trip_bound(
    schedule: str,
    *,
    num_ranks: int,
    num_micro_batches: Floats,
    num_token_slices: Floats,
    filling_s: ScalarOrArray,
    there: ScalarOrArray,
    back: ScalarOrArray,
    last: StageOps,
    draining_s: ScalarOrArray,
    put_off_s: ScalarOrArray = 0.0,
) -> ScalarOrArray:
    """Seconds that `1f1b` and `zero-bubble` take because the first rank waits for token slices to come back.

    The first rank runs P - 2 + S forwards ahead; from there on forward u + P follows the backward that answers forward
    u, the last one of its micro-batch (`plan.schedules`: `one_f_one_b`, `zero_bubble`). So every ceil(P / S)
    micro-batches a token slice goes there and back, one after the other. When the last of these turns, the last rank
    still has the rest to do.

    Args:
        num_micro_batches: M, an array [...].
        num_token_slices: S, an array [...] that broadcasts, as all that follow.
        filling_s: forwards of all token slices of a micro-batch but the last on the first rank.
        there: forwards of the last token slice on all ranks, messages included.
        back: its backwards, or input gradients, on all ranks, messages included.
        last: ops of one micro-batch on the last rank.
        draining_s: backwards, or input gradients, of the first token slice on all ranks but the last, with messages.
        put_off_s: as `lower_bound` has it, of the last rank.
    """
    waited = (num_micro_batches - 1) // np.ceil(num_ranks / num_token_slices)
    passed = waited * np.ceil(num_ranks / num_token_slices)
    turning = last.input_gradient if schedule == "zero-bubble" else last.backward
    rest = (num_micro_batches - passed) * turning + (num_micro_batches - passed - 1) * last.forward
    if schedule == "zero-bubble":
        rest = rest + np.maximum((num_micro_batches - passed) * last.weight_gradient - put_off_s, 0.0)
    return filling_s + waited * (there + back) + there + rest + draining_s


class StepCosts(NamedTuple):
    """Seconds of one pipeline rank beside its ops, as if nothing ran under them; numbers or arrays."""

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
    """Layers of the stage whose gradients are complete last, one after the other."""
    num_micro_batches: ScalarOrArray


class StepTraffic(NamedTuple):
    """Messages of data-parallel ranks for one parameter at the end of an iteration."""

    reduced_bytes: int
    reduces_to_all: bool
    """Whether every rank gets the sum, not only the one that steps the parameter."""
    divides_step: bool
    """Whether each rank steps its part of the parameters, and gathers the others."""
    gathered_bytes: int


def step_traffic(software: Software, precision: str, zero_stage: int) -> StepTraffic:
    """Return the messages of a trainer.

    ZeRO 1 steps a part and gathers it (Rajbhandari et al., arXiv 1910.02054 section 5.1).
    DeepSpeed's pipeline engine hands bf16 to its BF16_Optimizer, which divides the step at ZeRO stage 0, too, and whose
    gradients are reduced to all ranks even at stage 1 (`_do_optimizer_sanity_check` and `buffered_allreduce_fallback`
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
        shared_parameters: those of a weight that both ends of the pipeline hold; 0 if no two ranks share it.
        ends_topology: links between the first and the last pipeline rank.
        memory_bandwidth: bytes per second of the device.
    """
    traffic = step_traffic(software, precision, zero_stage)
    gradients = traffic.reduced_bytes * parameters
    reduce = all_reduce_s if traffic.reduces_to_all else reduce_scatter_s
    reduction = reduce(gradients, data_topology, efficiency)
    late = reduction * shared_parameters / np.maximum(parameters, 1.0)
    stepped, gather = parameters, 0.0 * reduction
    if traffic.divides_step:
        gather = all_gather_s(traffic.gathered_bytes * parameters, data_topology, efficiency)
        stepped = parameters / data_topology.size
    shared = np.where(
        np.greater(shared_parameters, 0),
        all_reduce_s(traffic.reduced_bytes * shared_parameters, ends_topology, efficiency),
        0.0,
    )
    reached = memory_bandwidth * efficiency.memory_efficiency
    step_s = efficiency.optimizer_passes * software.step_bytes * stepped / reached
    step_s = step_s + software.state(precision, zero_stage).whole_step_bytes * parameters / reached
    return StepCosts(reduction, shared, step_s, late, gather)


def shown_reduction_s(
    step: StepCosts,
    ops: CoveringOps,
    communication: Communication,
    efficiency: HardwareEfficiency,
    cool_down_s: ScalarOrArray = 0.0,
) -> ScalarOrArray:
    """Seconds of a rank's gradient reduction and weight gathering that no op hides; arguments broadcast.

    Reductions that overlap start as gradients are complete: the layers of the rank's stage finish one after the other
    in its last op, and their reductions run one after the other, as `deepspeed_ext.plan.programs.program` simulates
    them. Gathers that overlap run layer by layer before the next forward of each.

    Args:
        cool_down_s: for which ranks before it still run after the op that completes its gradients.
    """
    layers = np.maximum(ops.layers, 1.0)
    if communication.shards_weights:
        there = _beside(step.weight_gather, ops.forward, efficiency)
        back = _beside(step.weight_gather + step.gradient_reduction, ops.backward, efficiency)
        ends = (step.weight_gather + step.gradient_reduction) / layers
        return ops.num_micro_batches * (there + back) + ends
    shown, gather = step.gradient_reduction, step.weight_gather
    if communication.overlaps_gradient_reduction:
        summed = step.gradient_reduction - step.late
        after = np.maximum(summed - ops.completing * (layers - 1) / layers, summed / layers)
        after = np.maximum(after - cool_down_s, 0.0)
        shown = after + efficiency.overlap_exposed * (summed - after) + step.late
    if communication.overlaps_weight_gather:
        gather = gather / layers + _beside(gather * (layers - 1) / layers, ops.forward, efficiency)
    return shown + gather


def exposed_reduction_s(
    step: StepCosts,
    ops: CoveringOps,
    communication: Communication,
    efficiency: HardwareEfficiency,
    *,
    drains: bool,
) -> ScalarOrArray:
    """Return the seconds of each rank's gradient reduction and weight gathering that no op hides: [P, ...].

    Args:
        ops: arrays of [P, ...].
        drains: whether the op that completes gradients passes the ranks in turn, last to first; deferred weight
            gradients end on all together.
    """
    cool_down_s = np.cumsum(ops.completing, axis=0) - ops.completing if drains else 0.0
    return shown_reduction_s(step, ops, communication, efficiency, cool_down_s)


def _beside(messages_s: ScalarOrArray, ops_s: ScalarOrArray, efficiency: HardwareEfficiency) -> ScalarOrArray:
    """Seconds that messages add to ops which they run under."""
    hidden = np.minimum(messages_s, ops_s)
    return messages_s - hidden + efficiency.overlap_exposed * hidden
