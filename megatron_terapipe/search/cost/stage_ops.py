"""Seconds of the ops of a stage: what each kind of layer takes, times how many of it there are.

    kinds of layers [K] x sizes (micro-batch, token slice, ...)  --LayerPrices--> ops of a kind  [parts, K, *sizes]
    how many of each kind a stage has [stages, K]                --stage_ops----> ops of a stage [parts, stages, *sizes]

Sizes are arrays of any shape: the token slices of one strategy, a grid of strategies, all token slices that there can
be. One strategy is a grid of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from megatron_terapipe.search.cost.rank_groups import GroupTopology
from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import LayerQuery, OpTimes, ScalarOrArray

Floats = NDArray[np.float64]


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
    tensor_parallel: ScalarOrArray = 0.0


FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, TENSOR_PARALLEL = range(5)
"""Rows of the first axis of arrays of ops, in the order of `StageOps`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OpSizes:
    """Sizes that op times depend on, besides layer, device and links; the arrays broadcast against each other.

    Attributes:
        tensor_parallel_size: ranks that share each layer.
        micro_batch_size: sequences.
        start: begin of the token slice, as a share of the sequence.
        end: end of the token slice, as a share of the sequence.
        recompute: `none`, `selective` or `full`.
        sequence_parallel: whether tensor-parallel ranks share the tokens between the matrices, too.
    """

    tensor_parallel_size: ScalarOrArray
    micro_batch_size: ScalarOrArray
    start: ScalarOrArray
    end: ScalarOrArray
    recompute: str
    sequence_parallel: bool


class LayerPrices:
    """Prices the layers of a model, each kind of them once."""

    def __init__(
        self,
        kinds: Sequence[Layer],
        op_times: OpTimes,
        efficiency: HardwareEfficiency,
        element_bytes: int,
        tensor_parallel_overlap: float = 0.0,
    ) -> None:
        """Prepare.

        Args:
            kinds: the K different layers of a model.
            op_times: times of layers.
            efficiency: constants of collectives and launches.
            element_bytes: bytes of an activation.
            tensor_parallel_overlap: share of the collectives between tensor-parallel ranks that products hide.
        """
        self._kinds, self._op_times = kinds, op_times
        self._efficiency, self._element_bytes = efficiency, element_bytes
        self._shown = 1 - tensor_parallel_overlap

    def ops(self, device: Device, topology: GroupTopology, sizes: OpSizes) -> Floats:
        """Return the seconds of the ops of each kind of layer: [5 parts of `StageOps`, K, *shape of the sizes].

        Args:
            device: the device that computes.
            topology: links between its tensor-parallel ranks.
            sizes: what the ops are computed for.
        """
        rows = []
        for layer in self._kinds:
            query = LayerQuery(
                layer,
                device,
                tensor_parallel_size=sizes.tensor_parallel_size,
                micro_batch_size=sizes.micro_batch_size,
                start=sizes.start * layer.tokens,
                end=sizes.end * layer.tokens,
                recompute=sizes.recompute,
                sequence_parallel=sizes.sequence_parallel,
            )
            ops = layer_ops(query, self._op_times, self._efficiency, topology, self._element_bytes, self._shown)
            rows.append(ops)
        each = (sizes.tensor_parallel_size, sizes.micro_batch_size, sizes.start, sizes.end)
        shape = np.broadcast_shapes(*map(np.shape, each))
        out = np.empty((len(StageOps._fields), len(rows), *shape))
        for kind, parts in enumerate(rows):
            for part, seconds in enumerate(parts):
                out[part, kind] = seconds
        return out


def stage_ops(counts: Floats, ops: Floats) -> Floats:
    """Return the seconds of the ops of stages, or of ranks with all their stages: [parts, rows, *sizes].

    Args:
        counts: [rows, K] layers of each kind; or [rows, K, *sizes], where each strategy has stages of its own.
        ops: [parts, K, *sizes] seconds of each kind.
    """
    if counts.ndim > 2:
        return np.asarray(np.einsum("rk...,pk...->pr...", counts, ops))
    parts, kinds = ops.shape[:2]
    product = counts @ ops.reshape(parts, kinds, -1)
    return np.asarray(product.reshape(parts, len(counts), *ops.shape[2:]))


def on_slowest_device(per_device: Sequence[Floats], whole_s: Sequence[Floats]) -> Floats:
    """Return the ops of stages that stand on several kinds of devices: [parts, rows, *sizes].

    All ops of a stage take as long as on the device that needs most for the forward and backward of a whole
    micro-batch: tensor-parallel ranks wait for it in every layer. Of replicas it is an upper limit: they wait for each
    other at the end of the iteration alone, see `RankGroups.by_replica`.

    Args:
        per_device: [parts, rows, *sizes] of each device.
        whole_s: [rows, ...] seconds of a whole micro-batch on each device; broadcasts against the ops.
    """
    slowest, most = per_device[0], whole_s[0]
    for ops, seconds in zip(per_device[1:], whole_s[1:], strict=True):
        slowest = np.where(seconds > most, ops, slowest)
        most = np.maximum(seconds, most)
    return slowest


def layer_ops(
    query: LayerQuery,
    op_times: OpTimes,
    efficiency: HardwareEfficiency,
    topology: GroupTopology,
    element_bytes: int = 2,
    shown: float = 1.0,
) -> StageOps:
    """Return the seconds of the ops of one layer: kernels, launches, and reductions of tensor-parallel ranks.

    Args:
        query: the layer, and what its times depend on.
        op_times: times of its kernels.
        efficiency: constants of collectives and launches.
        topology: links between its tensor-parallel ranks.
        element_bytes: bytes of an activation.
        shown: share of those reductions that products do not hide.
    """
    layer = query.layer
    kernels = op_times(query)
    forward_reduction: ScalarOrArray = 0.0
    backward_reduction: ScalarOrArray = 0.0
    if not op_times.includes_collectives:
        one = shown * _reduction_s(
            element_bytes * query.rows * layer.hidden_size, topology, efficiency, query.sequence_parallel
        )
        entering, leaving = reductions(layer)
        forward_reduction = leaving * one
        repeated = leaving if query.recompute == "full" and layer.kind in ("block", "other") else 0
        backward_reduction = (entering + repeated) * one
    # Ranks that reduce together wait for the host that is late; the more there are, the later it is.
    jitter = 1 + efficiency.launch_jitter * np.log2(query.tensor_parallel_size)
    launch_forward = kernels.launch_forward * jitter
    launch_input, launch_weight = kernels.launch_input_gradient * jitter, kernels.launch_weight_gradient * jitter
    launch_backward = launch_input + launch_weight
    backward = kernels.input_gradient + kernels.weight_gradient
    exposed = efficiency.launch_exposed
    whole_forward = launched(kernels.forward + forward_reduction, launch_forward, exposed)
    whole_backward = launched(backward + backward_reduction, launch_backward, exposed)
    alone = launched(kernels.forward, launch_forward, exposed) + launched(backward, launch_backward, exposed)
    return StageOps(
        whole_forward,
        whole_backward,
        launched(kernels.input_gradient + backward_reduction, launch_input, exposed),
        launched(kernels.weight_gradient, launch_weight, exposed),
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


def launched(device_s: ScalarOrArray, launch_s: ScalarOrArray, exposed: float) -> ScalarOrArray:
    """Return the seconds of a device's work that its host launches ahead of it; arguments broadcast.

    Args:
        device_s: seconds that the device needs.
        launch_s: seconds that the host needs.
        exposed: share of the shorter that the longer does not hide; 1 = the host waits for each kernel.
    """
    return np.maximum(device_s, launch_s) + exposed * np.minimum(device_s, launch_s)


def _reduction_s(
    num_bytes: ScalarOrArray, topology: GroupTopology, efficiency: HardwareEfficiency, sequence_parallel: bool
) -> ScalarOrArray:
    if sequence_parallel:
        return reduce_scatter_s(num_bytes, topology, efficiency) + all_gather_s(num_bytes, topology, efficiency)
    return all_reduce_s(num_bytes, topology, efficiency)
