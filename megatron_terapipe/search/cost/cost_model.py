"""The time of one iteration: ops of each stage, played in the schedule's order, then the optimizer step."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.search.cost.collectives import GroupTopology, all_gather_s, transfer_bandwidth, transfer_s
from megatron_terapipe.search.cost.rank_groups import GroupLinks, RankGroups
from megatron_terapipe.search.cost.simulated_time import Orders, closed_form_of
from megatron_terapipe.search.cost.stage_ops import StageOps, layer_ops
from megatron_terapipe.search.cost.step_costs import StepCosts, step_costs
from megatron_terapipe.search.cost.time_breakdown import TimePrediction, time_prediction
from megatron_terapipe.search.inputs.cluster import Cluster, Device
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.inputs.workload import Workload, parameters_per_rank
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import OpTimes
from megatron_terapipe.search.op_times.profile_factors import ProfileFactors, ScaledTimes
from megatron_terapipe.search.op_times.roofline import Roofline
from megatron_terapipe.search.op_times.software import TERAPIPE, Software
from megatron_terapipe.strategy import Strategy

__all__ = [
    "SPLIT_SCHEDULES",
    "CostModel",
    "Messages",
    "TimePrediction",
    "pipeline_shape",
    "topology_at",
]

Floats = NDArray[np.float64]

SPLIT_SCHEDULES = ("zero-bubble", "optimised")
"""Schedules that compute the gradients of input and weights apart."""


class Messages(NamedTuple):
    """Messages between neighbouring stages; B boundaries, S token slices.

    Attributes:
        num_bytes: [B, S] of the activation of one token slice.
        bandwidth: [B] bytes per second of the link, by the data sheet.
        latency_s: [B].
        crosses_nodes: [B] whether it is the network.
    """

    num_bytes: Floats
    bandwidth: Floats
    latency_s: Floats
    crosses_nodes: NDArray[np.bool_]


def topology_at(links: GroupLinks, rank: int) -> GroupTopology:
    """Links of the groups of one pipeline rank."""
    return GroupTopology(
        links.size,
        float(links.num_nodes[rank]),
        float(links.inside_bandwidth[rank]),
        float(links.inside_latency_s[rank]),
        float(links.network_bandwidth[rank]),
        float(links.network_latency_s[rank]),
    )


class CostModel:
    """Prices strategies of one model on one cluster. It keeps what strategies have in common."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        software: Software = TERAPIPE,
        efficiency: HardwareEfficiency | None = None,
        op_times: OpTimes | None = None,
        precision: str = "bf16",
        orders: Orders | None = None,
    ) -> None:
        """Prepare.

        Args:
            workload: what is trained.
            cluster: where.
            software: what trains it.
            efficiency: what is reached of data sheets; None = the defaults.
            op_times: times of layers; None = the roofline.
            precision: `bf16`, `fp16` or `fp32`.
            orders: orders of schedules that other models have met; None = none.
        """
        self.workload = workload
        self.cluster = cluster
        self.software = software
        self.efficiency = efficiency or HardwareEfficiency()
        self.op_times = op_times or Roofline(self.efficiency, software, precision)
        self.precision = precision
        self.element_bytes = 4 if precision == "fp32" else 2
        self._layer_ops: dict[tuple[object, ...], StageOps] = {}
        self._orders = orders or Orders()

    def with_efficiency(self, efficiency: HardwareEfficiency, op_times: OpTimes | None = None) -> "CostModel":
        """The same model and cluster under other efficiency; orders of schedules are shared.

        Args:
            efficiency: the other ones.
            op_times: other times of layers, too; None = the same, a roofline under the other efficiency.
        """
        if op_times is None:
            same = self.op_times
            op_times = replace(same, efficiency=efficiency) if isinstance(same, Roofline) else same
        return CostModel(
            self.workload,
            self.cluster,
            software=self.software,
            efficiency=efficiency,
            op_times=op_times,
            precision=self.precision,
            orders=self._orders,
        )

    def with_factors(self, factors: ProfileFactors) -> "CostModel":
        """Return the cost model of training, where this one prices ops, links and the rest as a profile measured them.

        Args:
            factors: seconds in training per second of the profile.
        """
        return self.with_efficiency(factors.efficiency(self.efficiency), ScaledTimes(self.op_times, factors.ops))

    def predict_time(self, strategy: Strategy, *, activation_limit: float | None = None) -> TimePrediction:
        """Price one strategy on its real schedule.

        Args:
            strategy: what to price.
            activation_limit: activations that a rank may hold, as a multiple of 1F1B's peak, if it is a zero-bubble
                order as Qi et al. (arXiv 2401.10241) find for such a limit, ZB-1p and ZB-2p; it is priced in closed
                form. None = the schedule's own order, played.

        Raises:
            ConfigError: if it does not fit the cluster or the model.
            PlanError: if its schedule does not take its shape.
        """
        groups = self.groups(strategy)
        stages = self.stage_ops(strategy, groups)
        shape = pipeline_shape(strategy)
        costs = self._costs(strategy, groups, stages)
        if activation_limit is None or strategy.schedule != "zero-bubble":
            played = self._orders.play(strategy.schedule, shape, costs)
        else:
            played = closed_form_of(shape, costs, activation_limit)
        return time_prediction(
            shape,
            stages,
            costs,
            played,
            self._step(strategy, groups),
            layers=[len(layers) for layers in self.stage_layers(strategy)[: shape.num_ranks]],
            software=self.software,
            efficiency=self.efficiency,
        )

    def pipeline_costs(self, strategy: Strategy) -> OpCosts:
        """Times of ops per stage and token slice, and of messages, in seconds, as the plan reads them."""
        groups = self.groups(strategy)
        return self._costs(strategy, groups, self.stage_ops(strategy, groups))

    def groups(self, strategy: Strategy) -> RankGroups:
        """Links of the groups of a strategy."""
        layout = ParallelLayout(
            data_parallel_size=strategy.data_parallel_size,
            tensor_parallel_size=strategy.tensor_parallel_size,
            pipeline_parallel_size=strategy.pipeline_parallel_size,
        )
        return RankGroups(self.cluster, layout, strategy.placement)

    def stage_layers(self, strategy: Strategy) -> list[range]:
        """Indices of the layers of each stage."""
        num_stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
        return self.workload.stages(self.workload.partition(strategy.stage_partition, num_stages))

    def stage_ops(self, strategy: Strategy, groups: RankGroups) -> list[StageOps]:
        """Per stage the ops of one micro-batch, arrays of [S] seconds by token slice; without messages."""
        lengths = strategy.cut(self.workload.seq_length).lengths
        bounds = np.array([*accumulate(lengths, initial=0)], dtype=float) / self.workload.seq_length
        ranks = strategy.pipeline_parallel_size
        stages = []
        for stage, layers in enumerate(self.stage_layers(strategy)):
            rank = stage % ranks
            topology = topology_at(groups.tensor, rank)
            counts = Counter(id(self.workload.layers[index]) for index in layers)
            unique = {id(self.workload.layers[index]): self.workload.layers[index] for index in layers}
            per_device = []
            for device in groups.devices[rank]:
                zero = np.zeros(len(lengths))
                ops = StageOps(zero, zero, zero, zero, zero)
                for key, layer in unique.items():
                    ops = ops + self._ops_of(layer, device, topology, strategy, bounds).times(counts[key])
                per_device.append(ops)
            # Replicas wait for each other once per iteration, and tensor-parallel ranks all the time.
            stages.append(max(per_device, key=lambda ops: float(np.sum(ops.forward + ops.backward))))
        return stages

    def _ops_of(
        self, layer: Layer, device: Device, topology: GroupTopology, strategy: Strategy, bounds: Floats
    ) -> StageOps:
        key = (
            id(layer),
            device,
            topology,
            strategy.micro_batch_size,
            strategy.recompute,
            strategy.sequence_parallel,
            bounds.tobytes(),
        )
        known = self._layer_ops.get(key)
        if known is None:
            known = layer_ops(
                layer,
                device,
                self.op_times,
                self.efficiency,
                topology,
                tensor_parallel_size=float(strategy.tensor_parallel_size),
                micro_batch_size=float(strategy.micro_batch_size),
                start=bounds[:-1] * layer.tokens,
                end=bounds[1:] * layer.tokens,
                recompute=strategy.recompute,
                sequence_parallel=strategy.sequence_parallel,
                element_bytes=self.element_bytes,
            )
            self._layer_ops[key] = known
        return known

    def messages(self, strategy: Strategy, groups: RankGroups) -> "Messages":
        """What one rank sends to the next in one micro-batch, by boundary between stages."""
        lengths = np.array(strategy.cut(self.workload.seq_length).lengths, dtype=float)
        shares = lengths / self.workload.seq_length
        last = [self.workload.layers[layers[-1]] for layers in self.stage_layers(strategy)[:-1]]
        outputs = np.array([layer.output_elements for layer in last])[:, None] * shares * strategy.micro_batch_size
        extra = np.array([layer.extra_output_elements for layer in last], dtype=float)[:, None]
        links = groups.pipe
        index = np.arange(len(last)) % strategy.pipeline_parallel_size
        if strategy.sequence_parallel:
            # Between layers each tensor-parallel rank has its part of the tokens alone, and sends no more.
            outputs = outputs / strategy.tensor_parallel_size
        return Messages(
            self.element_bytes * (outputs + extra),
            links.bandwidth[index],
            links.latency_s[index],
            links.crosses_nodes[index],
        )

    def _sending_s(self, strategy: Strategy, groups: RankGroups) -> Floats:
        """[boundaries, S] seconds of one message."""
        num_bytes, bandwidth, latency, crosses = self.messages(strategy, groups)
        tensor = strategy.tensor_parallel_size
        shared = self.software.shares_transfers and tensor > 1 and not strategy.sequence_parallel
        part = num_bytes / tensor if shared else num_bytes
        sending = np.asarray(
            transfer_s(part, bandwidth[:, None], latency[:, None], crosses[:, None], self.efficiency), dtype=float
        )
        if shared:
            ranks = np.arange(len(num_bytes)) % strategy.pipeline_parallel_size
            gathers = [
                all_gather_s(row, topology_at(groups.tensor, rank), self.efficiency)
                for row, rank in zip(num_bytes, ranks.tolist(), strict=True)
            ]
            sending = sending + np.array(gathers).reshape(sending.shape)
        return sending

    def _costs(self, strategy: Strategy, groups: RankGroups, stages: list[StageOps]) -> OpCosts:
        split = strategy.schedule in SPLIT_SCHEDULES
        op_s = self.efficiency.op_s
        forward = np.array([ops.forward for ops in stages]) + op_s
        backward = np.array([ops.input_gradient if split else ops.backward for ops in stages]) + op_s
        weight = np.array([ops.weight_gradient for ops in stages]) + op_s
        transfer: float | TransferCosts = 0.0
        if len(stages) > 1 and strategy.pipeline_parallel_size > 1:
            if self.software.overlaps_transfers:
                transfer = self._transfers(strategy, groups)
            else:
                sending = self._sending_s(strategy, groups)
                # Both ends wait for a message: the sender's next op does not start before it has left.
                forward[:-1] += sending
                backward[1:] += sending
        return OpCosts(_table(forward), _table(backward), _table(weight) if split else None, transfer)

    def _transfers(self, strategy: Strategy, groups: RankGroups) -> TransferCosts:
        num_bytes, bandwidth, latency, crosses = self.messages(strategy, groups)
        reached = transfer_bandwidth(bandwidth, crosses, self.efficiency)
        # Messages of other sizes (uneven models) are written as other bandwidths: the plan has one size for all.
        sizes = np.maximum(num_bytes[0], 1.0)
        scale = num_bytes.sum(axis=1) / sizes.sum()
        return TransferCosts(
            latency=tuple((latency + self.efficiency.transfer_s).tolist()),
            bandwidth=tuple((reached / np.maximum(scale, 1e-12)).tolist()),
            message_bytes=tuple(sizes.tolist()),
        )

    def parameters(self, strategy: Strategy) -> tuple[Floats, Floats]:
        """[P] parameters that a rank holds, and of them those of a weight that two pipeline ranks hold."""
        ranks, tensor = strategy.pipeline_parallel_size, strategy.tensor_parallel_size
        held = parameters_per_rank(self.workload, self.stage_layers(strategy), ranks, tensor)
        return np.array(held.total), np.array(held.shared)

    def _step(self, strategy: Strategy, groups: RankGroups) -> list[StepCosts]:
        """Per pipeline rank, the end of the iteration."""
        parameters, shared = self.parameters(strategy)
        ends = topology_at(groups.ends, 0)
        return [
            step_costs(
                float(parameters[rank]),
                float(shared[rank]),
                topology_at(groups.data, rank),
                ends,
                min(device.memory_bandwidth for device in groups.devices[rank]),
                zero_stage=strategy.zero_stage,
                precision=self.precision,
                software=self.software,
                efficiency=self.efficiency,
            )
            for rank in range(strategy.pipeline_parallel_size)
        ]


def pipeline_shape(strategy: Strategy) -> PipelineShape:
    """Extent of a strategy's pipeline."""
    return PipelineShape(
        strategy.pipeline_parallel_size * strategy.num_model_chunks,
        strategy.num_micro_batches,
        strategy.num_token_slices,
        strategy.num_model_chunks,
    )


def _table(times: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, times.tolist()))
