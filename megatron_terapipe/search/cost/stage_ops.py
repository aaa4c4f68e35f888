"""Seconds of the ops of one layer as a stage runs it: kernels, launches, and reductions of tensor-parallel ranks."""

from typing import NamedTuple

import numpy as np

from megatron_terapipe.search.cost.collectives import GroupTopology, all_gather_s, all_reduce_s, reduce_scatter_s
from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import OpTimes, ScalarOrArray


class StageOps(NamedTuple):
    """Seconds of the ops of one micro-batch, or of one token slice of it; numbers or arrays. They add up over layers.

    Attributes:
        forward: F.
        backward: BI and BW as one op.
        input_gradient: BI alone.
        weight_gradient: BW alone.
        tensor_parallel: how much of F and the whole backward is collectives between tensor-parallel ranks.
    """

    forward: ScalarOrArray
    backward: ScalarOrArray
    input_gradient: ScalarOrArray
    weight_gradient: ScalarOrArray
    tensor_parallel: ScalarOrArray

    def __add__(self, other: object) -> "StageOps":
        """Both, one after the other."""
        assert isinstance(other, StageOps)
        return StageOps(*map(np.add, self, other))

    def times(self, count: ScalarOrArray) -> "StageOps":
        """As many of the same."""
        return StageOps(*(part * count for part in self))


def layer_ops(
    layer: Layer,
    device: Device,
    op_times: OpTimes,
    efficiency: HardwareEfficiency,
    tensor_topology: GroupTopology,
    *,
    tensor_parallel_size: ScalarOrArray,
    micro_batch_size: ScalarOrArray,
    start: ScalarOrArray,
    end: ScalarOrArray,
    recompute: str,
    sequence_parallel: bool,
    element_bytes: int = 2,
) -> StageOps:
    """Price one layer. All grids broadcast against each other.

    Args:
        layer: which.
        device: what computes.
        op_times: times of its kernels.
        efficiency: of collectives.
        tensor_topology: links between its tensor-parallel ranks.
        tensor_parallel_size: how many those are.
        micro_batch_size: sequences.
        start: first token of the token slice.
        end: token behind its last.
        recompute: `none`, `selective` or `full`.
        sequence_parallel: whether they share the tokens between the matrices, too.
        element_bytes: of an activation.
    """
    kernels = op_times(
        layer,
        device,
        tensor_parallel_size=tensor_parallel_size,
        micro_batch_size=micro_batch_size,
        start=start,
        end=end,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    forward_reduction: ScalarOrArray = 0.0
    backward_reduction: ScalarOrArray = 0.0
    if not op_times.includes_collectives:
        num_bytes = element_bytes * micro_batch_size * (end - start) * layer.hidden_size
        one = _reduction_s(num_bytes, tensor_topology, efficiency, sequence_parallel)
        entering, leaving = reductions(layer)
        forward_reduction = leaving * one
        repeated = leaving if recompute == "full" and layer.kind in ("block", "other") else 0
        backward_reduction = (entering + repeated) * one
    # Ranks that reduce together wait for the host that is late; the more there are, the later it is.
    jitter = 1 + efficiency.launch_jitter * np.log2(tensor_parallel_size)
    launch_forward = kernels.launch_forward * jitter
    launch_input, launch_weight = kernels.launch_input_gradient * jitter, kernels.launch_weight_gradient * jitter
    launch_backward = launch_input + launch_weight
    backward = kernels.input_gradient + kernels.weight_gradient
    whole_forward = hidden(kernels.forward + forward_reduction, launch_forward, efficiency.launch_exposed)
    whole_backward = hidden(backward + backward_reduction, launch_backward, efficiency.launch_exposed)
    alone = hidden(kernels.forward, launch_forward, efficiency.launch_exposed) + hidden(
        backward, launch_backward, efficiency.launch_exposed
    )
    return StageOps(
        whole_forward,
        whole_backward,
        hidden(kernels.input_gradient + backward_reduction, launch_input, efficiency.launch_exposed),
        hidden(kernels.weight_gradient, launch_weight, efficiency.launch_exposed),
        np.maximum(whole_forward + whole_backward - alone, 0.0),
    )


def reductions(layer: Layer) -> tuple[int, int]:
    """Reductions of tensor-parallel ranks: in the backward, where tokens enter, and in the forward, where they leave.

    A matrix shared by its outputs reads the same tokens on every rank, whose gradients add up; one shared by its inputs
    gives each rank a part of the sum (Shoeybi et al., arXiv 1909.08053 section 3: the operators f and g). A shared
    embedding gives each rank the rows that it holds.
    """
    entering = sum(product.parallel == "column" for product in layer.products)
    leaving = sum(product.parallel == "row" for product in layer.products)
    return entering, leaving + (layer.kind == "embedding")


def hidden(device_s: ScalarOrArray, launch_s: ScalarOrArray, exposed: float) -> ScalarOrArray:
    """Seconds of work of a device that a host launches ahead of it.

    Args:
        device_s: what the device needs.
        launch_s: what the host needs.
        exposed: share of the shorter that the longer does not hide; 1 = the host waits for each kernel.
    """
    return np.maximum(device_s, launch_s) + exposed * np.minimum(device_s, launch_s)


def _reduction_s(
    num_bytes: ScalarOrArray, topology: GroupTopology, efficiency: HardwareEfficiency, sequence_parallel: bool
) -> ScalarOrArray:
    if sequence_parallel:
        return reduce_scatter_s(num_bytes, topology, efficiency) + all_gather_s(num_bytes, topology, efficiency)
    return all_reduce_s(num_bytes, topology, efficiency)
