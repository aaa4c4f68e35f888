"""Ops of stages: layers of each kind on each stage, seconds of each kind, and a strategy with both looked up.

    kinds of layers [K] x sizes (micro-batch, token slice, ...)  --LayerPrices--> ops of a kind  [parts, K, *sizes]
    layers of each kind on each stage [stages, K]                --stage_ops----> ops of a stage [parts, stages,
    *sizes]

Sizes are arrays of any shape: the token slices of one strategy, a grid of strategies, or all possible token slices.
One strategy is a grid of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.config.flops import BACKWARD_PER_FORWARD
from megatron_terapipe.devices import Device
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.software import Communication
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, reachable_bandwidth
from megatron_terapipe.search.price.layer_times import (
    LayerQuery,
    LayerTimes,
    OpSizes,
    OpTimes,
    ScalarOrArray,
    key_heads,
)
from megatron_terapipe.search.price.links import (
    GroupTopology,
    LayerLinks,
    RankGroups,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    dispatch_s,
    reduce_scatter_s,
)
from megatron_terapipe.search.price.workload import Layer, Workload
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

SPLIT_SCHEDULES = ("zero-bubble", "optimised")
"""Schedules that compute the gradients of input and weights apart."""


@dataclass(frozen=True)
class LayerCounts:
    """Layers and parameters of a stage partition, with its stages assigned to pipeline ranks in turn."""

    per_stage: Floats
    parameters: Floats
    """[P] parameters that a tensor-parallel rank holds, without experts; a weight that two of its layers share counts
    once."""
    shared_parameters: Floats
    """[P] of them in a weight that another pipeline rank holds, too (tied embedding)."""
    last_layers: NDArray[np.int64]
    """[stages - 1] index of the layer before each boundary."""
    expert_parameters: Floats
    """[P] parameters of experts that an expert-parallel rank holds."""

    @property
    def per_rank(self) -> Floats:
        """Layers of each kind on each pipeline rank: [P, K]."""
        ranks = len(self.parameters)
        return np.asarray(self.per_stage.reshape(-1, ranks, self.per_stage.shape[1]).sum(axis=0))

    @property
    def first_stage(self) -> Floats:
        """Layers of each kind on the first stage of each rank, which the first token slice passes: [P, K]."""
        return self.per_stage[: len(self.parameters)]


class LayerCounter:
    """Counts the layers of one model, for many stage partitions."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        # Blocks of a GPT are one object many times.
        kinds = {id(layer): layer for layer in workload.layers}
        self.kinds: tuple[Layer, ...] = tuple(kinds.values())
        place = {key: kind for kind, key in enumerate(kinds)}
        self.kind_of_layer: NDArray[np.int64] = np.array([place[id(layer)] for layer in workload.layers])
        """[layers] number of the kind of each layer."""
        one_hot = np.eye(len(self.kinds))[self.kind_of_layer]
        self._before = np.concatenate([np.zeros((1, len(self.kinds))), np.cumsum(one_hot, axis=0)])
        self._shared: dict[str, list[int]] = {}
        for index, layer in enumerate(workload.layers):
            if layer.shared_weight is not None:
                self._shared.setdefault(layer.shared_weight, []).append(index)
        self._parameters: dict[int, Floats] = {}

    def count(
        self,
        partition: StagePartition,
        num_ranks: int,
        tensor_parallel_size: int,
        expert_parallel_size: int = 1,
        *,
        vocabulary_stages: bool = False,
    ) -> LayerCounts:
        """Return the counts of a stage partition."""
        bounds = np.array(partition.bounds) + self.workload.first_dealt
        bounds[0], bounds[-1] = 0, len(self.workload.layers)
        per_stage = np.diff(self._before[bounds], axis=0)
        if vocabulary_stages:
            per_stage = self._with_vocabulary_stages(per_stage, num_ranks)
            bounds = np.append(bounds[:-1], [bounds[-1] - 1] * num_ranks + [bounds[-1]])
        if tensor_parallel_size not in self._parameters:
            each = [layer.parameters_per_rank(tensor_parallel_size) for layer in self.kinds]
            self._parameters[tensor_parallel_size] = np.array(each)
        per_rank = (per_stage @ self._parameters[tensor_parallel_size]).reshape(-1, num_ranks).sum(axis=0)
        shared = np.zeros(num_ranks)
        for indices in self._shared.values():
            stages = np.searchsorted(bounds, indices, side="right") - 1
            weights = {}
            for rank, index in zip((stages % num_ranks).tolist(), indices, strict=True):
                weight = self.workload.layers[index].shared_parameters / tensor_parallel_size
                if rank in weights:
                    per_rank[rank] -= weight
                weights[rank] = weight
            if len(weights) > 1:
                for rank, weight in weights.items():
                    shared[rank] += weight
        of_experts = per_stage @ np.array([layer.expert_parameters / expert_parallel_size for layer in self.kinds])
        experts = of_experts.reshape(-1, num_ranks).sum(axis=0)
        return LayerCounts(per_stage, per_rank, shared, bounds[1:-1] - 1, experts)

    def _with_vocabulary_stages(self, per_stage: Floats, num_ranks: int) -> Floats:
        """[stages + ranks, K] layers of each kind, the head in equal parts on the last stage of each rank."""
        layers = self.workload.layers
        if layers[-1].kind != "head" or layers[-1].shared_weight is not None:
            raise ConfigError(
                "strategy: vocabulary_stages cuts the head of a model, and the last layer of this one is not a head "
                "with a weight of its own: leave vocabulary_stages false"
            )
        head = self.kind_of_layer[-1]
        parts = np.zeros((num_ranks, per_stage.shape[1]))
        parts[:, head] = 1 / num_ranks
        per_stage = per_stage.copy()
        per_stage[-1, head] -= 1
        return np.concatenate([per_stage, parts])


class StageOps(NamedTuple):
    """Seconds of the ops of a micro-batch, or of one token slice of it: numbers or arrays that add up over layers."""

    forward: ScalarOrArray
    backward: ScalarOrArray
    """BI and BW in one op."""
    input_gradient: ScalarOrArray
    weight_gradient: ScalarOrArray
    tensor_parallel: ScalarOrArray = 0.0
    """Collectives between tensor-parallel ranks, as a part of F and the whole backward."""
    head_exchange: ScalarOrArray = 0.0
    """Head exchanges between sequence-parallel ranks, as a part of F and the whole backward."""
    expert_exchange: ScalarOrArray = 0.0
    """Exchanges of tokens between expert-parallel ranks, as a part of F and the whole backward."""


FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, TENSOR_PARALLEL, HEAD_EXCHANGE, EXPERT_EXCHANGE = range(7)
"""Rows of the first axis of arrays of ops, in the order of `StageOps`."""


@dataclass(frozen=True, slots=True)
class LayerPrices:
    """Prices the layers of a model, each kind of them once."""

    op_times: OpTimes
    efficiency: HardwareEfficiency
    element_bytes: int
    operand_bytes: float
    """Of a number that tensor-parallel ranks gather for a product."""
    communication: Communication
    kinds: Sequence[Layer] = ()

    def ops(self, device: Device, links: LayerLinks, sizes: OpSizes) -> Floats:
        """Return the seconds of the ops of each kind of layer: [7 parts of `StageOps`, K, *shape of the sizes]."""
        rows = []
        for layer in self.kinds:
            bounds = {"start": sizes.start * layer.tokens, "end": sizes.end * layer.tokens}
            rows.append(self.of_layer(LayerQuery(layer, device, **vars(sizes) | bounds), links))
        # Constants may be arrays, too.
        shape = np.broadcast_shapes(*(np.shape(part) for row in rows for part in row))
        out = np.empty((len(StageOps._fields), len(rows), *shape))
        for kind, parts in enumerate(rows):
            for part, seconds in enumerate(parts):
                out[part, kind] = seconds
        return out

    def of_layer(self, query: LayerQuery, links: LayerLinks) -> StageOps:
        """Return the seconds of the ops of one layer: kernels, launches, and messages of the ranks that share it."""
        efficiency, communication = self.efficiency, self.communication
        kernels = self.op_times(query)
        of_stage = query.again("stage")
        again = np.logical_or(query.again("full"), of_stage)
        numbers, tensor = query.rows * query.layer.hidden_size, links.tensor
        if query.sequence_parallel:
            gather = all_gather_s(self.operand_bytes * numbers, tensor, efficiency)
            one = gather + reduce_scatter_s(self.element_bytes * numbers, tensor, efficiency)
            if communication.copies_parts:  # read, and written
                copied = 2 * numbers * np.greater(tensor.size, 1)
                copied_s = copied / (reachable_bandwidth(query.device) * efficiency.memory_efficiency)
                gather = gather + self.operand_bytes * copied_s
                one = one + (self.operand_bytes + self.element_bytes) * copied_s
            shown = 1 - communication.tensor_parallel_overlap * tensor.is_switched
            one, gather = np.multiply(one, shown), np.multiply(gather, shown)
        else:
            one, gather = all_reduce_s(self.element_bytes * numbers, tensor, efficiency), 0.0
        entering, leaving = reductions(query.layer, sums_at_once=communication.sums_at_once)
        forward_reduction, backward_reduction = leaving * one, (entering + again * leaving) * one
        if communication.gathers_again:
            backward_reduction = backward_reduction + query.again("selective") * entering * gather
        if communication.ring:
            exchange = ring_s(query, links.sequence, efficiency, self.element_bytes, kernels.attention)
            exchange_back = 2 * exchange
        else:
            exchange = exchange_back = head_exchange_s(query, links.sequence, efficiency, self.element_bytes)
        routed_forward, routed_backward, routed_again = self._expert_exchange_s(query, links, kernels)
        if np.any(of_stage):
            # One more forward, in the backward. Layers after the last attention run only there: no later token slice
            # reads their outputs.
            share = np.where(of_stage, float(query.layer.kind not in ("norm", "head")), 1.0)
            kernels = kernels._replace(
                forward=share * kernels.forward,
                launch_forward=share * kernels.launch_forward,
                input_gradient=kernels.input_gradient + of_stage * kernels.forward,
                launch_input_gradient=kernels.launch_input_gradient + of_stage * kernels.launch_forward,
            )
        # Ranks that reduce together wait for the host that is late; the more there are, the later it is.
        jitter = 1 + efficiency.launch_jitter * np.log2(query.tensor_parallel_size * query.sequence_parallel_size)
        launch_forward = kernels.launch_forward * jitter
        launch_input, launch_weight = kernels.launch_input_gradient * jitter, kernels.launch_weight_gradient * jitter
        launch_backward = launch_input + launch_weight
        backward = kernels.input_gradient + kernels.weight_gradient
        exposed = efficiency.launch_exposed

        def both(forward_s: ScalarOrArray, backward_s: ScalarOrArray) -> tuple[ScalarOrArray, ScalarOrArray]:
            """Forward and backward with some seconds of messages."""
            return (
                launched(kernels.forward + forward_s, launch_forward, exposed),
                launched(backward + backward_s, launch_backward, exposed),
            )

        forward_messages = forward_reduction + exchange
        backward_messages = backward_reduction + exchange_back + again * exchange
        without = sum(both(forward_messages, backward_messages))
        if query.layer.experts is not None:
            forward_messages = forward_messages + routed_forward
            backward_messages = backward_messages + routed_backward + again * routed_again
        whole_forward, whole_backward = both(forward_messages, backward_messages)
        reducing, alone = sum(both(forward_reduction, backward_reduction)), sum(both(0.0, 0.0))
        return StageOps(
            whole_forward,
            whole_backward,
            launched(kernels.input_gradient + backward_messages, launch_input, exposed),
            launched(kernels.weight_gradient, launch_weight, exposed),
            np.maximum(reducing - alone, 0.0),
            np.maximum(without - reducing, 0.0),
            np.maximum(whole_forward + whole_backward - without, 0.0),
        )

    def _expert_exchange_s(
        self, query: LayerQuery, links: LayerLinks, kernels: LayerTimes
    ) -> tuple[ScalarOrArray, ScalarOrArray, ScalarOrArray]:
        """Seconds [...] of tokens on their way to their experts and back: in a forward, a backward, a forward again."""
        there_and_back, drain = self._there_and_back_s(query, links)
        there_and_back = (1 - self.communication.hidden_exchange) * there_and_back
        if not self.communication.overlaps_shared_experts:
            return there_and_back + drain, there_and_back, there_and_back
        forward = self.efficiency.exposed_s(there_and_back, kernels.shared_experts)
        backward = self.efficiency.exposed_s(there_and_back, BACKWARD_PER_FORWARD * kernels.shared_experts)
        return forward + drain, backward, forward

    def _there_and_back_s(self, query: LayerQuery, links: LayerLinks) -> tuple[ScalarOrArray, ScalarOrArray]:
        """Seconds [...] of tokens on their way to their experts and back, and of the host's wait in a forward.

        `alltoall` sends each token to the ranks of its experts, as many to the rank with most as `Experts.imbalance`
        has; a forward exchanges the sizes first, and waits on the host for them, after which launches start again.
        `allgather` sends all tokens to all ranks, and adds parts up.
        """
        experts, efficiency, topology = query.layer.experts, self.efficiency, links.expert
        if experts is None or not np.any(np.greater(topology.size, 1)):
            return 0.0, 0.0
        row, drain = self.element_bytes * query.layer.hidden_size, np.zeros(())
        if experts.sends_to_all:
            gathered = row * query.routed_tokens * topology.size
            there_and_back = all_gather_s(gathered, topology, efficiency) + reduce_scatter_s(
                gathered, topology, efficiency
            )
        else:
            there_and_back = 2 * self._all_to_all_s(row * query.expert_rows(experts), experts.chosen, query, links)
            drain = np.where(np.greater(topology.size, 1), efficiency.collective_s + efficiency.launch_s, 0.0)
        return there_and_back, drain

    def _all_to_all_s(
        self, num_bytes: ScalarOrArray, chosen: int, query: LayerQuery, links: LayerLinks
    ) -> ScalarOrArray:
        """Seconds [...] of the rows of tokens on their way to their experts, as many bytes from each rank."""
        if self.communication.sends_once:
            return dispatch_s(num_bytes, chosen, links.expert, self.efficiency)
        if not self.communication.cuts_experts:
            return all_to_all_s(num_bytes, links.expert, self.efficiency)
        cut = query.tensor_parallel_size
        gathered = all_gather_s(cut * num_bytes, links.tensor, self.efficiency)
        return all_to_all_s(num_bytes, links.expert.every(cut), self.efficiency) + gathered


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


def on_slowest_device(per_device: Sequence[Floats], whole_s: Sequence[Floats] | None = None) -> Floats:
    """Return the ops of stages that are on several kinds of devices: [parts, rows, *sizes].

    All ops of a stage take as long as on the device that needs most for the forward and backward of a whole
    micro-batch: tensor-parallel ranks wait for it in every layer. For replicas it is an upper limit: they wait for each
    other only at the end of the iteration, see `RankGroups.by_replica`.

    Args:
        per_device: [parts, rows, *sizes] of each device.
        whole_s: [rows, ...] seconds of a whole micro-batch on each device, which broadcast; None = seconds of the ops.
    """
    if whole_s is None:
        whole_s = [ops[FORWARD] + ops[BACKWARD] for ops in per_device]
    slowest, most = per_device[0], whole_s[0]
    for ops, seconds in zip(per_device[1:], whole_s[1:], strict=True):
        slowest = np.where(seconds > most, ops, slowest)
        most = np.maximum(seconds, most)
    return slowest


@dataclass(frozen=True)
class KindTables:
    """Ops of the kinds of layers on the kinds of ranks, side by side."""

    by_device: list[Floats]
    """[..., kinds x K, ...]; more than one where the ranks of a stage are on several devices."""
    kind_of_rank: NDArray[np.int64]
    """[P] number of each pipeline rank's kind."""

    @cached_property
    def least(self) -> Floats:
        """[..., kinds x K, ...] of the faster device, op by op: a bound must not count on the slower one."""
        return np.minimum.reduce(self.by_device) if len(self.by_device) > 1 else self.by_device[0]

    @classmethod
    def of(cls, groups: RankGroups, table: Callable[[Device, LayerLinks], Floats], axis: int = 1) -> "KindTables":
        """Return the tables of a kind of rank, with K on this axis, joined."""
        most = max(len(kind.devices) for kind in groups.kinds)
        of_kinds = [[table(device, kind.links) for device in kind.devices] for kind in groups.kinds]
        joined = [
            np.concatenate([each[min(place, len(each) - 1)] for each in of_kinds], axis=axis) for place in range(most)
        ]
        return cls(joined, kind_of_rank(groups))

    def layers(self, counts: Floats, ranks: NDArray[np.int64]) -> Floats:
        """[n, kinds x K] layers in the columns of the kind of each rank [n], from [n, K]."""
        out = np.zeros((len(counts), self.kind_of_rank.max() + 1, counts.shape[1]))
        out[np.arange(len(counts)), self.kind_of_rank[ranks]] = counts
        return out.reshape(len(counts), -1)


def kind_of_rank(groups: RankGroups) -> NDArray[np.int64]:
    """[P] number of the kind of each pipeline rank."""
    found = np.empty(groups.layout.pipeline_parallel_size, np.int64)
    for number, kind in enumerate(groups.kinds):
        found[kind.ranks] = number
    return found


def different_rows(rows: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first of each of the different rows of [n, K] numbers, and [n] which of them each row is."""
    numbers: dict[bytes, int] = {}
    places = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], dtype=np.int64)
    return np.unique(places, return_index=True)[1], places


def head_exchange_s(
    query: LayerQuery, topology: GroupTopology, efficiency: HardwareEfficiency, element_bytes: int
) -> ScalarOrArray:
    """Seconds [...] of the two head exchanges of a forward, as many as of a backward (arXiv 2309.14509, section 3).

    Before attention each rank has all heads of its part of the tokens, and sends queries, keys and values in one
    message to each other rank; after it each rank has some heads of all tokens, and sends its output back. A head of
    key and value is sent to every rank that needs it.
    """
    attention = query.layer.attention
    if attention is None or not np.any(np.greater(topology.size, 1)):
        return 0.0
    of_keys = key_heads(attention, query.tensor_parallel_size * query.sequence_parallel_size)
    row_bytes = element_bytes * query.rows
    head_bytes = row_bytes * attention.head_size / query.tensor_parallel_size
    if attention.latent is not None:
        # Latents go to every rank, which computes the keys and values of its heads from them.
        latents = all_gather_s(row_bytes * attention.latent.kept_size * topology.size, topology, efficiency)
        back = head_bytes * attention.query_heads * attention.value_size / attention.head_size
        there = all_to_all_s(head_bytes * attention.query_heads, topology, efficiency)
        return latents + there + all_to_all_s(back, topology, efficiency)
    there = all_to_all_s(head_bytes * (attention.query_heads + 2 * of_keys), topology, efficiency)
    return there + all_to_all_s(head_bytes * attention.query_heads, topology, efficiency)


def ring_s(
    query: LayerQuery,
    topology: GroupTopology,
    efficiency: HardwareEfficiency,
    element_bytes: int,
    attention_s: ScalarOrArray,
) -> ScalarOrArray:
    """Seconds [...] by which keys and values on their way around a ring make a forward longer; a backward by twice it.

    They travel under the `attention_s` seconds of attention (arXiv 2310.01889 section 3). In a backward their gradients
    travel, too, under attention of about twice as long.
    """
    attention = query.layer.attention
    if attention is None or not np.any(np.greater(topology.size, 1)):
        return 0.0
    of_keys = 2 * key_heads(attention, query.tensor_parallel_size) * attention.head_size / query.tensor_parallel_size
    gathered = element_bytes * of_keys * query.rows * topology.size
    return efficiency.exposed_s(all_gather_s(gathered, topology, efficiency), attention_s)


def reductions(layer: Layer, *, sums_at_once: bool = False) -> tuple[float, int]:
    """Reductions of tensor-parallel ranks: in the backward, where tokens enter, and in the forward, where they leave.

    Each of the hidden size; of latents, which are narrower, a part of one.

    A matrix shared by its outputs reads the same tokens on every rank, and their gradients add up; one shared by its
    inputs gives each rank a part of the sum (Shoeybi et al., arXiv 1909.08053 section 3: the operators f and g). Ranks
    that share an embedding have a part of its rows each. `sums_at_once`: whether the trainer sums the parts of parallel
    attention and MLP in one reduction.
    """
    latent = None if layer.attention is None else layer.attention.latent
    entering: float = sum(product.parallel == "column" for product in layer.products)
    if latent is not None:
        inputs = sum(product.inputs for product in layer.products if product.parallel == "column")
        entering = (inputs + latent.rotated_size) / layer.hidden_size
    leaving = sum(product.parallel == "row" for product in layer.products)
    if sums_at_once and layer.sums_at_once:
        leaving = min(leaving, 1)
    return entering, leaving + (layer.kind == "embedding")


def launched(device_s: ScalarOrArray, launch_s: ScalarOrArray, exposed: float) -> ScalarOrArray:
    """Return the seconds of a device's work that its host launches ahead of it; arguments broadcast.

    `exposed`: share of the shorter that the longer does not hide; 1 = the host waits for each kernel.
    """
    return np.maximum(device_s, launch_s) + exposed * np.minimum(device_s, launch_s)


@dataclass(frozen=True, kw_only=True)
class PlacedStrategy:
    """A strategy with its groups on the cluster and its layer counts, looked up once."""

    strategy: Strategy
    groups: RankGroups
    counts: LayerCounts
    shares: Floats
    """[S + 1] bounds of its token slices, as shares of the sequence."""

    @property
    def zero(self) -> tuple[int, int | None]:
        """ZeRO stage, and the ranks that divide states."""
        return self.strategy.zero_stage, self.strategy.zero_shard_size

    @property
    def key(self) -> tuple[object, ...]:
        """The values that the times of layers depend on, except token slices, devices and links."""
        one = self.strategy
        sizes = one.micro_batch_size, one.sequence_parallel_size, one.expert_parallel_size
        return *sizes, one.recompute, one.sequence_parallel, one.kept_keys


def op_sizes(strategy: Strategy, start: Floats, end: Floats) -> OpSizes:
    """Return the sizes of ops of token slices, from their bounds [token slices] as shares of the sequence."""
    return OpSizes(
        tensor_parallel_size=float(strategy.tensor_parallel_size),
        sequence_parallel_size=float(strategy.sequence_parallel_size),
        expert_parallel_size=float(strategy.expert_parallel_size),
        micro_batch_size=float(strategy.micro_batch_size),
        start=start,
        end=end,
        recompute=strategy.recompute,
        sequence_parallel=strategy.sequence_parallel,
        kept_keys=strategy.kept_keys,
    )


def pipeline_shape(strategy: Strategy) -> PipelineShape:
    """Extent of a strategy's pipeline."""
    return PipelineShape(
        strategy.pipeline_parallel_size * strategy.stages_of_a_rank,
        strategy.num_micro_batches,
        strategy.num_token_slices,
        strategy.stages_of_a_rank,
    )
