"""Times of many strategies of one kind at once, in closed form: their numbers are arrays, and constants may change.

Strategies of a batch have one workload, one kind of device, and all that is no number (recompute, software, ...) in
common. What their layouts make of the cluster is looked up once; other constants then cost a few array operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.closed_form import pipeline_time, total_s
from megatron_terapipe.search.cost.collectives import GroupTopology, all_gather_s, transfer_s
from megatron_terapipe.search.cost.cost_model import SPLIT_SCHEDULES, CostModel, topology_at
from megatron_terapipe.search.cost.stage_ops import StageOps, layer_ops
from megatron_terapipe.search.cost.step_costs import shown_reduction_s, step_costs
from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.roofline import Roofline
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

NUMBERS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "micro_batch_size",
    "num_micro_batches",
    "num_token_slices",
    "num_model_chunks",
)
"""Numbers of a strategy that the formulas read; the data-parallel size is in the links of its groups."""


def batch_key(model: CostModel, strategy: Strategy) -> tuple[object, ...]:
    """What strategies of one batch have in common."""
    return (
        id(model.workload),
        model.groups(strategy).devices[0],
        model.software,
        model.precision,
        strategy.schedule,
        strategy.recompute,
        strategy.sequence_parallel,
        strategy.zero_stage,
        strategy.cut(model.workload.seq_length).lengths,
    )


@dataclass(frozen=True)
class Batch:
    """n strategies, ready to be priced. Make it with `of`.

    Attributes:
        model: of one of them; for what they have in common.
        strategy: one of them, likewise.
        device: of all of them; of a mixed cluster the first.
        layers: the U different layers.
        counts: [n, stages, U] of each in each stage; stages that a strategy does not have hold none.
        rank_of_stage: [n, stages] pipeline rank.
        numbers: [n] by name.
        tensor_topology: links of tensor-parallel ranks, of arrays [n].
        data_topology: of data-parallel ranks.
        ends_topology: of the first and the last pipeline rank.
        parameters: [n, ranks] that a rank holds.
        shared: [n, ranks] of them those of a weight that two ranks hold.
        message: [n, stages] bytes that a stage sends to the next in one micro-batch; 0 = nothing to send.
        bandwidth: [n, stages] of that link.
        latency: [n, stages].
        crosses_nodes: [n, stages] whether it is the network.
    """

    model: CostModel
    strategy: Strategy
    device: Device
    layers: tuple[Layer, ...]
    counts: Floats
    rank_of_stage: NDArray[np.int64]
    numbers: dict[str, Floats]
    tensor_topology: GroupTopology
    data_topology: GroupTopology
    ends_topology: GroupTopology
    parameters: Floats
    shared: Floats
    message: Floats
    bandwidth: Floats
    latency: Floats
    crosses_nodes: NDArray[np.bool_]

    @classmethod
    def of(cls, models: Sequence[CostModel], strategies: Sequence[Strategy]) -> "Batch":
        """Look up what layouts make of clusters.

        Args:
            models: of each strategy; they share the workload.
            strategies: with one `batch_key`.
        """
        workload = models[0].workload
        unique = list({id(layer): layer for layer in workload.layers}.values())
        place = {id(layer): index for index, layer in enumerate(unique)}
        num = len(strategies)
        ranks = max(one.pipeline_parallel_size for one in strategies)
        stages = max(one.pipeline_parallel_size * one.num_model_chunks for one in strategies)
        counts = np.zeros((num, stages, len(unique)))
        rank_of_stage = np.zeros((num, stages), np.int64)
        parameters, shared = np.zeros((num, ranks)), np.zeros((num, ranks))
        message, latency = np.zeros((num, stages)), np.zeros((num, stages))
        bandwidth, crosses = np.ones((num, stages)), np.zeros((num, stages), dtype=bool)
        topologies: dict[str, list[GroupTopology]] = {"tensor": [], "data": [], "ends": []}
        for row, (model, one) in enumerate(zip(models, strategies, strict=True)):
            groups = model.groups(one)
            for stage, layers in enumerate(model.stage_layers(one)):
                rank_of_stage[row, stage] = stage % one.pipeline_parallel_size
                for index in layers:
                    counts[row, stage, place[id(workload.layers[index])]] += 1
            parameters[row, : one.pipeline_parallel_size], shared[row, : one.pipeline_parallel_size] = model.parameters(
                one
            )
            if one.pipeline_parallel_size > 1:
                sent = model.messages(one, groups)
                boundaries = len(sent.num_bytes)
                message[row, :boundaries] = sent.num_bytes.sum(axis=1)
                bandwidth[row, :boundaries], latency[row, :boundaries] = sent.bandwidth, sent.latency_s
                crosses[row, :boundaries] = sent.crosses_nodes
            topologies["tensor"].append(topology_at(groups.tensor, 0))
            topologies["data"].append(topology_at(groups.data, 0))
            topologies["ends"].append(topology_at(groups.ends, 0))
        numbers = {name: np.array([getattr(one, name) for one in strategies], dtype=float) for name in NUMBERS}
        joined = {name: GroupTopology(*map(np.array, zip(*rows, strict=True))) for name, rows in topologies.items()}
        return cls(
            models[0],
            strategies[0],
            models[0].groups(strategies[0]).devices[0][0],
            tuple(unique),
            counts,
            rank_of_stage,
            numbers,
            joined["tensor"],
            joined["data"],
            joined["ends"],
            parameters,
            shared,
            message,
            bandwidth,
            latency,
            crosses,
        )

    def times(self, efficiency: HardwareEfficiency) -> Floats:
        """[n] seconds of one iteration of each strategy, in closed form."""
        numbers = self.numbers
        per_stage, first = self._stage_ops(efficiency)
        ranks = self.parameters.shape[1]
        per_rank = [self._by_rank(np.asarray(part), ranks) for part in per_stage]
        schedule = self.strategy.schedule
        rows = np.arange(len(self.counts))
        slowest_rank = np.argmax(total_s(schedule, StageOps(*per_rank)), axis=1)
        slowest = StageOps(*(part[rows, slowest_rank] for part in per_rank))
        others = StageOps(*(part.sum(axis=1) - part[rows, slowest_rank] for part in per_rank))
        makespan = pipeline_time(
            schedule,
            num_micro_batches=numbers["num_micro_batches"],
            num_token_slices=numbers["num_token_slices"],
            num_model_chunks=numbers["num_model_chunks"],
            slowest=slowest,
            others=others,
        )
        last_op_s = first.weight_gradient if schedule in SPLIT_SCHEDULES else first.backward
        return np.asarray(
            makespan + self._step_s(efficiency, last_op_s[:, :ranks]) + efficiency.iteration_s, dtype=float
        )

    def _by_rank(self, per_stage: Floats, ranks: int) -> Floats:
        out = np.zeros((len(per_stage), ranks))
        np.add.at(out, (np.arange(len(per_stage))[:, None], self.rank_of_stage), per_stage)
        return out

    def _stage_ops(self, efficiency: HardwareEfficiency) -> tuple[StageOps, StageOps]:
        """[n, stages] seconds of the ops of a whole micro-batch, messages in them where they block.

        Then those of its first token slice, whose backward is the last, without messages.
        """
        model, numbers = self.model, self.numbers
        op_times = model.op_times
        if isinstance(op_times, Roofline):
            op_times = replace(op_times, efficiency=efficiency)
        lengths = self.strategy.cut(model.workload.seq_length).lengths
        bounds = np.cumsum([0, *lengths]) / model.workload.seq_length
        num, stages = self.counts.shape[:2]
        total = first = StageOps(*np.zeros((5, num, stages)))
        for index, layer in enumerate(self.layers):
            for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                ops = layer_ops(
                    layer,
                    self.device,
                    op_times,
                    efficiency,
                    self.tensor_topology,
                    tensor_parallel_size=numbers["tensor_parallel_size"],
                    micro_batch_size=numbers["micro_batch_size"],
                    start=start * layer.tokens,
                    end=end * layer.tokens,
                    recompute=self.strategy.recompute,
                    sequence_parallel=self.strategy.sequence_parallel,
                    element_bytes=model.element_bytes,
                )
                of_layers = StageOps(*(np.reshape(part, (-1, 1)) * self.counts[:, :, index] for part in ops))
                total += of_layers
                first = first if start else first + of_layers
        if model.software.overlaps_transfers:
            return total, first
        sending = self._sending_s(efficiency)
        arriving = np.roll(sending, 1, axis=1)
        blocked = total._replace(
            forward=total.forward + sending,
            backward=total.backward + arriving,
            input_gradient=total.input_gradient + arriving,
        )
        return blocked, first

    def _sending_s(self, efficiency: HardwareEfficiency) -> Floats:
        tensor = self.numbers["tensor_parallel_size"][:, None]
        shared = self.model.software.shares_transfers and not self.strategy.sequence_parallel
        part = self.message / tensor if shared else self.message
        sending = transfer_s(part, self.bandwidth, self.latency, self.crosses_nodes, efficiency)
        if shared:
            topology = GroupTopology(*(np.reshape(part, (-1, 1)) for part in self.tensor_topology))
            sending = sending + all_gather_s(self.message, topology, efficiency)
        return np.where(self.message > 0, sending, 0.0)

    def _step_s(self, efficiency: HardwareEfficiency, last_op_s: Floats) -> Floats:
        """[n] seconds behind the last op, of [n, ranks] the op that completes each rank's gradients."""
        column = [
            GroupTopology(*(np.reshape(part, (-1, 1)) for part in topology))
            for topology in (self.data_topology, self.ends_topology)
        ]
        step = step_costs(
            self.parameters,
            self.shared,
            column[0],
            column[1],
            self.device.memory_bandwidth,
            zero_stage=self.strategy.zero_stage,
            precision=self.model.precision,
            software=self.model.software,
            efficiency=efficiency,
        )
        reduction = step.gradient_reduction
        if self.model.software.overlaps_gradient_reduction:
            layers = self.counts[:, : last_op_s.shape[1]].sum(axis=2)
            drains = self.strategy.schedule not in SPLIT_SCHEDULES
            cool_down = drains * (np.cumsum(last_op_s, axis=1) - last_op_s)
            reduction = shown_reduction_s(step, last_op_s, layers, cool_down)
        parts = (reduction, step.shared_weight, step.optimizer)
        return np.asarray(sum(np.max(part, axis=1) for part in parts), dtype=float)
