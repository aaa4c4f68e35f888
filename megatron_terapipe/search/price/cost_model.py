"""The exact price of one strategy: its time, simulated in the schedule's order, and its memory.

Pricing.predict -> CostModel.predict_time: placed -> stage_ops -> ScheduleSimulator -> step -> _prediction
-> MemoryModel.predict: states + peak of activations
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from itertools import accumulate
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.simulate.host_copies import HostCopyPlan
from megatron_terapipe.devices import Device
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.software import ELEMENT_BYTES, OPERAND_BYTES, Software
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.efficiency import (
    HardwareEfficiency,
    ProfileFactors,
    reachable_bandwidth,
)
from megatron_terapipe.search.price.layer_times import OpSizes, OpTimes, ScalarOrArray, ScaledTimes
from megatron_terapipe.search.price.links import (
    BoundaryLinks,
    ClusterTable,
    LayerLinks,
    RankGroups,
    ShardLinks,
    sending_s,
    transfer_bandwidth,
    transfer_s,
)
from megatron_terapipe.search.price.makespan import (
    Pipeline,
    ScheduleSimulator,
    SimulatedTime,
)
from megatron_terapipe.search.price.memory import (
    MemoryModel,
    MemoryOverheads,
    RankMemory,
    default_overheads,
    host_copy_settings,
)
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.stages import (
    BACKWARD,
    EXPERT_EXCHANGE,
    FORWARD,
    HEAD_EXCHANGE,
    INPUT_GRADIENT,
    SPLIT_SCHEDULES,
    TENSOR_PARALLEL,
    WEIGHT_GRADIENT,
    KindTables,
    LayerCounter,
    LayerCounts,
    LayerPrices,
    PlacedStrategy,
    on_slowest_device,
    op_sizes,
    pipeline_shape,
    stage_ops,
)
from megatron_terapipe.search.price.step import CoveringOps, StepCosts, exposed_reduction_s, step_costs
from megatron_terapipe.search.price.workload import DISPATCHERS, Workload
from megatron_terapipe.strategy import Strategy

__all__ = ["CostModel", "Prediction", "Pricing"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBreakdown:
    """Seconds of one iteration on the busiest pipeline rank; they add up to the iteration."""

    compute_s: float
    """Its ops, without collectives between ranks that share its layers."""
    tensor_parallel_s: float
    """Collectives between tensor-parallel ranks, inside its ops."""
    head_exchange_s: float = 0.0
    """Head exchanges between sequence-parallel ranks, inside its ops."""
    expert_exchange_s: float = 0.0
    """Exchanges of tokens between expert-parallel ranks, inside its ops; left out of JSON objects where it is 0."""
    host_copy_s: float = 0.0
    """Waiting for copies from hosts."""
    bubble_s: float
    """Waiting for other pipeline ranks; transfers that no op hides are in `transfer_s`."""
    transfer_s: float
    """Messages between stages that no op hides."""
    gradient_reduction_s: float
    """Data-parallel reductions (ZeRO: reduce-scatter and all-gather) that no op hides."""
    shared_weight_s: float
    """Reductions of the tied embedding between its stages."""
    optimizer_s: float
    """Norm of the gradient and optimizer step."""
    fixed_s: float
    """Fixed time of an iteration, whatever its size."""

    @property
    def total_s(self) -> float:
        """The iteration."""
        return float(sum(getattr(self, each.name) for each in fields(self)))


OPTIONAL_PARTS = ("expert_exchange_s",)
"""Parts of an iteration that JSON objects leave out where they are 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One strategy, priced."""

    iteration_time_s: float
    bubble_ratio: float
    """Idle time / (pipeline ranks x makespan)."""
    breakdown: TimeBreakdown
    memory: tuple[RankMemory, ...]
    interval_s: tuple[float, float] | None = None
    """Shortest and longest that `interval_coverage` of iterations take; None = no interval is known."""
    interval_coverage: float = 0.9
    """Share of measurements that shall be inside, such as 0.9."""
    simulated: bool = True
    """Whether the real schedule was simulated; else priced in closed form."""
    notes: tuple[str, ...] = ()
    """Extrapolations and other warnings, a line each."""

    @property
    def peak_memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return max((rank.total for rank in self.memory), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a prediction."""
        found = asdict(self) | {"peak_memory_bytes": self.peak_memory_bytes}
        del found["memory"]
        found["memory_per_rank"] = [{**asdict(rank), "total": rank.total} for rank in self.memory]
        parts = found["breakdown"].items()
        return found | {"breakdown": {name: part for name, part in parts if part or name not in OPTIONAL_PARTS}}


@dataclass(eq=False)
class CostModel:
    """Prices strategies of one model on one cluster, and caches the times that strategies share."""

    workload: Workload
    cluster: Cluster
    _: KW_ONLY
    software: Software = TERAPIPE
    efficiency: HardwareEfficiency = None  # type: ignore[assignment]
    op_times: OpTimes = None  # type: ignore[assignment]
    """None = a roofline."""
    precision: str = "bf16"
    simulator: ScheduleSimulator = field(default_factory=ScheduleSimulator)

    def __post_init__(self) -> None:
        self.efficiency = self.efficiency or HardwareEfficiency()
        self.op_times = self.op_times or Roofline(self.efficiency, self.software, self.precision)
        self.element_bytes = ELEMENT_BYTES[self.precision]
        self.counter = LayerCounter(self.workload)
        self.prices = LayerPrices(
            self.op_times,
            self.efficiency,
            self.element_bytes,
            OPERAND_BYTES[self.precision],
            self.software.communication,
            self.counter.kinds,
        )
        self._known_ops: dict[tuple[object, ...], Floats] = {}
        self._table = ClusterTable.of(self.cluster)
        self._known_groups: dict[ParallelLayout, RankGroups] = {}
        self._dispatched: list[CostModel] = []

    @property
    def constants(self) -> HardwareEfficiency | ProfileFactors:
        """The constants that its times depend on: of the roofline, or factors on the profile."""
        return self.efficiency if isinstance(self.op_times, Roofline) else ProfileFactors()

    def with_constants(self, constants: HardwareEfficiency | ProfileFactors) -> "CostModel":
        """Return this cost model with other constants, or with factors on the times of its profile.

        Orders, groups and counts are shared. Constants that are `side_by_side` are for `closed_form_s`.
        """
        op_times = self.op_times
        if isinstance(constants, ProfileFactors):
            op_times, constants = ScaledTimes(op_times, constants.ops), constants.efficiency(self.efficiency)
        elif isinstance(op_times, Roofline):
            op_times = replace(op_times, efficiency=constants)
        model = copy(self)
        model.efficiency, model.op_times = constants, op_times
        model._known_ops, model._dispatched = {}, []
        model.prices = replace(self.prices, op_times=op_times, efficiency=constants)
        return model

    def by_dispatcher(self, layout: ParallelLayout) -> Sequence["CostModel"]:
        """Return the same with each dispatcher in place of `auto`; this one where there is nothing to choose."""
        experts = self.workload.experts
        if experts is None or experts.dispatcher != "auto" or layout.expert_parallel_size == 1:
            return (self,)
        for each in DISPATCHERS if not self._dispatched else ():
            model = copy(self)
            model.workload, model._known_ops = self.workload.dispatched_by(each), {}
            model.prices = replace(self.prices, kinds=[kind.dispatched_by(each) for kind in self.counter.kinds])
            self._dispatched.append(model)
        return self._dispatched

    def dispatched(self, strategy: Strategy) -> "CostModel":
        """Return the same with the dispatcher of a run in place of `auto`: with the shorter ops, on all stages."""
        models = self.by_dispatcher(strategy.layout)
        if len(models) == 1:
            return self
        placed = self.placed(strategy)
        return min(models, key=lambda model: float(model.stage_ops(placed)[[FORWARD, BACKWARD]].sum()))

    def predict_time(
        self,
        strategy: Strategy,
        *,
        activation_limit: float | None = None,
        memory_limit: float | None = None,
        model_chunk_placement: Placement = Placement.LOOPED,
        of_interest_s: float = inf,
    ) -> Prediction:
        """Price one strategy on its real schedule.

        Args:
            activation_limit: activations that a rank may hold, as a multiple of 1F1B's peak, if it is a zero-bubble
                order as Qi et al. (arXiv 2401.10241) find for such a limit, ZB-1p and ZB-2p; it is priced in closed
                form. None = the schedule's own order, simulated.
            memory_limit: activations of one micro-batch that a rank may keep under an `optimised` order; None = as
                many as 1f1b.
            model_chunk_placement: which stages a rank owns. Ops and messages are priced as with `looped` stages;
                a V differs only where ranks do.
            of_interest_s: seconds beyond which host copies are not planned: the prediction is then a lower bound.
        """
        placed = self.placed(strategy)
        shape = replace(pipeline_shape(strategy), placement=model_chunk_placement)
        found, closed_limit = [], activation_limit if strategy.schedule == "zero-bubble" else None
        for replicas, stages, ops in self._by_replica(placed):
            costs = self._costs(replicas, ops)
            if closed_limit is not None:
                (makespan,) = self._makespan_s(replicas, ops, closed_limit).tolist()
                simulated = SimulatedTime(makespan, makespan, notes=("the order of ops is priced in closed form",))
            else:
                simulated = self.simulator.simulate(
                    strategy.schedule,
                    shape,
                    costs,
                    token_slices=strategy.cut(self.workload.seq_length),
                    memory_limit=memory_limit,
                )
            priced = self._prediction(placed, shape, stages, ops, simulated)
            if closed_limit is None and _plans_copies(strategy) and priced.iteration_time_s <= of_interest_s:
                late_s = self.simulator.copying_s(strategy.schedule, shape, costs, self.host_copy_settings(placed))
                simulated = replace(simulated, makespan=simulated.makespan + late_s, host_copy_s=late_s)
                priced = self._prediction(placed, shape, stages, ops, simulated)
            found.append(priced)
        return max(found, key=lambda time: time.iteration_time_s)

    def _by_replica(self, placed: PlacedStrategy) -> Iterator[tuple[PlacedStrategy, Floats, Floats]]:
        """Yield each kind of replica with its ops [7, stages, S, m], and the same with messages (`_with_messages`).

        A replica is a pipeline of its own until gradients are reduced, which waits for the slowest.
        """
        for groups in placed.groups.by_replica:
            replicas = replace(placed, groups=groups)
            stages = self.stage_ops(replicas)
            yield replicas, stages, self._with_messages(replicas, stages)

    def closed_form_s(self, strategy: Strategy) -> Floats:
        """Return the seconds of an iteration in closed form, with each of m sets of constants: [m].

        The real schedule takes a few per cent longer or shorter, with all of them alike.
        """
        placed, found = self.placed(strategy), []
        step = self.step([placed.counts], placed.groups, *placed.zero)
        for replicas, stages, ops in self._by_replica(placed):
            reduction = self._shown_reduction_s(placed, step, stages, ops)
            ends = sum(np.max(each, axis=0) for each in (reduction, step.shared_weight, step.optimizer))
            found.append(self._makespan_s(replicas, ops) + ends + self.efficiency.iteration_s)
        return np.asarray(np.maximum.reduce(found))

    def _makespan_s(self, placed: PlacedStrategy, ops: Floats, activation_limit: float = 1.0) -> Floats:
        """[m] seconds of the ops [4, stages, S, m] of an iteration, in closed form."""
        ranks = placed.strategy.pipeline_parallel_size
        travelling: ScalarOrArray = 0.0
        if self._sends_under_ops(placed.strategy):
            num_bytes, links = self.messages(placed)
            there = transfer_s(num_bytes[: ranks - 1, :1], links.at(np.s_[: ranks - 1]), self.efficiency)
            travelling = 2 * np.sum(there, axis=0)
        return Pipeline.of(placed.strategy).makespan_s(
            _by_rank(ops, ranks), travelling_s=travelling, activation_limit=activation_limit
        )

    def _shown_reduction_s(self, placed: PlacedStrategy, step: StepCosts, stages: Floats, ops: Floats) -> Floats:
        """[P, m] seconds of reductions and gathers that no op hides; ops as `_prediction` has them."""
        ranks, schedule = placed.strategy.pipeline_parallel_size, placed.strategy.schedule
        alone, split = _by_rank(stages, ranks), schedule in SPLIT_SCHEDULES
        covering = CoveringOps(
            completing=ops[WEIGHT_GRADIENT if split else BACKWARD, :ranks, 0],
            forward=alone[FORWARD],
            backward=alone[INPUT_GRADIENT] + alone[WEIGHT_GRADIENT] if split else alone[BACKWARD],
            layers=placed.counts.first_stage.sum(axis=1)[:, None],
            pipeline=Pipeline.of(placed.strategy),
        )
        communication, cool_down_s = self.software.communication, covering.cool_down_s(drains=not split)
        return np.asarray(
            exposed_reduction_s(
                step, covering, communication, self.efficiency, cool_down_s, zero_stage=placed.strategy.zero_stage
            )
        )

    def _prediction(
        self, placed: PlacedStrategy, shape: PipelineShape, stages: Floats, ops: Floats, simulated: SimulatedTime
    ) -> Prediction:
        """Put the times of a prediction together, with the breakdown of the busiest pipeline rank.

        Args:
            stages: [7 parts of `StageOps`, stages, S, 1] seconds of the ops of one micro-batch, without messages.
            ops: [4, stages, S, 1] the same with messages that block and the gaps of the executor.
        """
        ranks, micro_batches = shape.num_ranks, shape.num_micro_batches
        split = placed.strategy.schedule in SPLIT_SCHEDULES
        running = [FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT] if split else [FORWARD, BACKWARD]
        alone = _by_rank(stages, ranks)[..., 0]
        op_s = len(running) * self.efficiency.op_s * shape.num_token_slices * shape.num_model_chunks
        computing = alone[running].sum(axis=0) + op_s
        reducing, exchanging, routing = alone[[TENSOR_PARALLEL, HEAD_EXCHANGE, EXPERT_EXCHANGE]]
        busy = _by_rank(ops[running].sum(axis=0, keepdims=True), ranks)[0, :, 0]
        busiest = int(np.argmax(busy))
        step = self.step([placed.counts], placed.groups, *placed.zero)
        reduction = self._shown_reduction_s(placed, step, stages, ops)
        blocked = max(micro_batches * float(busy[busiest] - computing[busiest]), 0.0)
        waiting = max(simulated.makespan - micro_batches * float(busy[busiest]), 0.0)
        copying = min(simulated.host_copy_s, waiting)
        sending = simulated.makespan - simulated.host_copy_s - simulated.makespan_without_transfers
        exposed = min(max(sending, 0.0), waiting - copying)
        breakdown = TimeBreakdown(
            compute_s=micro_batches
            * float(computing[busiest] - reducing[busiest] - exchanging[busiest] - routing[busiest]),
            tensor_parallel_s=micro_batches * float(reducing[busiest]),
            head_exchange_s=micro_batches * float(exchanging[busiest]),
            expert_exchange_s=micro_batches * float(routing[busiest]),
            bubble_s=waiting - exposed - copying,
            host_copy_s=copying,
            transfer_s=blocked + exposed,
            gradient_reduction_s=float(np.max(reduction)),
            shared_weight_s=float(np.max(step.shared_weight)),
            optimizer_s=float(np.max(step.optimizer)),
            fixed_s=self.efficiency.iteration_s,
        )
        bubble = 1 - micro_batches * float(busy.sum()) / (ranks * simulated.makespan)
        return Prediction(
            iteration_time_s=breakdown.total_s,
            bubble_ratio=max(bubble, 0.0),
            breakdown=breakdown,
            memory=(),
            notes=(*simulated.notes, *self._notes_of_experts(placed.strategy)),
        )

    def _notes_of_experts(self, strategy: Strategy) -> Iterator[str]:
        """Yield the assumption about expert-parallel ranks, and a warning if experts have few tokens."""
        if strategy.expert_parallel_size > 1 and (experts := self.workload.experts) is not None:
            yield (
                f"the expert-parallel rank with most tokens is assumed to have {experts.imbalance:g} times the mean "
                "(--expert-imbalance)"
            )
        if self.workload.config is not None and (line := strategy.few_tokens(self.workload.config)) is not None:
            yield line

    def pipeline_costs(self, strategy: Strategy) -> OpCosts:
        """Return the seconds of ops per stage and token slice, and of messages, as the plan reads them."""
        placed = self.placed(strategy)
        return self._costs(placed, self._with_messages(placed, self.stage_ops(placed)))

    def host_copy_settings(self, placed: PlacedStrategy) -> HostCopySettings:
        """Return the bytes of a strategy that may wait on hosts, and the bandwidth, for timelines in seconds."""
        return host_copy_settings(placed, self.counter, self.cluster, self.element_bytes, self.efficiency)

    def host_copies(self, strategy: Strategy, num_micro_batches: int) -> HostCopyPlan:
        """Return the host copies of all ranks, planned as the trainer plans them: on the timeline without copies."""
        placed = self.placed(strategy)
        shape = replace(pipeline_shape(strategy), num_micro_batches=num_micro_batches)
        costs, settings = self.pipeline_costs(strategy), self.host_copy_settings(placed)
        return self.simulator.with_host_copies(strategy.schedule, shape, costs, settings)[1]

    def placed(self, strategy: Strategy) -> PlacedStrategy:
        """Look up the groups, layer counts and token slices of a strategy."""
        lengths = strategy.cut(self.workload.seq_length).lengths
        return PlacedStrategy(
            strategy=strategy,
            groups=self.groups(strategy),
            counts=self.counter.count(
                self.workload.partition(strategy.stage_partition, strategy.num_stages),
                strategy.pipeline_parallel_size,
                strategy.tensor_parallel_size,
                strategy.expert_parallel_size,
                vocabulary_stages=strategy.vocabulary_stages,
            ),
            shares=np.array([*accumulate(lengths, initial=0)], dtype=float) / self.workload.seq_length,
        )

    def groups(self, strategy: Strategy) -> RankGroups:
        """Links of the groups of a strategy."""
        return self.groups_of(strategy.layout, strategy.placement)

    def groups_of(self, layout: ParallelLayout, placement: tuple[int, ...] | None = None) -> RankGroups:
        """Links of the groups of a layout; those without a placement are cached."""
        if placement is not None:
            return RankGroups(self._table, layout, placement)
        if layout not in self._known_groups:
            self._known_groups[layout] = RankGroups(self._table, layout)
        return self._known_groups[layout]

    def stage_ops(self, placed: PlacedStrategy) -> Floats:
        """Return the seconds of the ops of one micro-batch, without messages: [7 parts of `StageOps`, stages, S, m]."""
        shares = placed.shares[:, None]
        sizes = op_sizes(placed.strategy, shares[:-1], shares[1:])
        return self.priced_stages(placed, sizes, (*placed.key, shares.tobytes()))

    def priced_stages(
        self,
        placed: PlacedStrategy,
        sizes: OpSizes,
        key: tuple[object, ...],
        *,
        stages: Sequence[int] | None = None,
        whole: int | None = None,
    ) -> Floats:
        """Return the seconds of the ops of stages for T token slices: [7 parts of `StageOps`, stages, T], or [..., m].

        Args:
            sizes: arrays of [T], or [T, 1] for m sets of constants.
            key: identity of the sizes, to cache the times of layers.
            stages: the stages to price; None = all.
            whole: the token slice that is the whole sequence; None = all T together are.
        """
        model = self.dispatched(placed.strategy)
        if model is not self:
            return model.priced_stages(placed, sizes, key, stages=stages, whole=whole)
        counts = placed.counts.per_stage if stages is None else placed.counts.per_stage[stages]
        ranks = np.arange(len(counts)) if stages is None else np.array(stages)

        def table(device: Device, links: LayerLinks) -> Floats:
            of_kind = device, links, *key
            if of_kind not in self._known_ops:
                self._known_ops[of_kind] = self.prices.ops(device, links, sizes)
            return self._known_ops[of_kind]

        tables = KindTables.of(placed.groups, table)
        layers = tables.layers(counts, ranks % placed.strategy.pipeline_parallel_size)
        per_device = [stage_ops(layers, table) for table in tables.by_device]
        forward_backward = [ops[FORWARD] + ops[BACKWARD] for ops in per_device]
        whole_s = [each.sum(axis=1) if whole is None else each[:, whole] for each in forward_backward]
        return on_slowest_device(per_device, [each[:, None] for each in whole_s])

    def messages(self, placed: PlacedStrategy) -> tuple[Floats, BoundaryLinks]:
        """Return bytes [boundaries, S] that a rank sends to the next in one micro-batch, and links [boundaries, 1]."""
        strategy = placed.strategy
        last = [self.workload.layers[index] for index in placed.counts.last_layers]
        outputs = np.array([layer.output_elements for layer in last], dtype=float)[:, None] * np.diff(placed.shares)
        outputs *= strategy.micro_batch_size / strategy.sequence_parallel_size
        extra = np.array([layer.extra_output_elements for layer in last], dtype=float)[:, None]
        if strategy.sequence_parallel:
            # Between layers each tensor-parallel rank has only its part of the tokens, and sends no more.
            outputs /= strategy.tensor_parallel_size
        ranks = np.arange(len(last))[:, None] % strategy.pipeline_parallel_size
        return self.element_bytes * (outputs + extra), placed.groups.pipe.at(ranks)

    def _sends_under_ops(self, strategy: Strategy) -> bool:
        return strategy.pipeline_parallel_size > 1 and self.software.communication.overlaps_transfers

    def _with_messages(self, placed: PlacedStrategy, stages: Floats) -> Floats:
        """[4, stages, S, m] seconds of ops [7, stages, S, m], with the executor's gaps and messages that block."""
        strategy, ops = placed.strategy, stages[: WEIGHT_GRADIENT + 1] + self.efficiency.op_s
        if strategy.pipeline_parallel_size > 1 and not self._sends_under_ops(strategy):
            num_bytes, links = self.messages(placed)
            ranks = np.arange(len(num_bytes)) % strategy.pipeline_parallel_size
            sending = sending_s(
                num_bytes[:, :, None],
                links.at(np.s_[:, :, None]),
                placed.groups.tensor.at(ranks[:, None, None]),
                self.efficiency,
                in_parts=self.software.communication.shares_transfers and not strategy.sequence_parallel,
            )
            # Both ends wait for a message: the sender's next op does not start before it has left.
            ops[FORWARD, :-1] += sending
            ops[[BACKWARD, INPUT_GRADIENT], 1:] += sending
        return ops

    def _costs(self, placed: PlacedStrategy, ops: Floats) -> OpCosts:
        """The same for the simulator; of one set of constants."""
        split = placed.strategy.schedule in SPLIT_SCHEDULES
        forward, whole, of_input, of_weight = (tuple(map(tuple, each.tolist())) for each in ops[..., 0])
        transfer = self._transfers(placed) if self._sends_under_ops(placed.strategy) else 0.0
        return OpCosts(forward, of_input if split else whole, of_weight if split else None, transfer)

    def _transfers(self, placed: PlacedStrategy) -> TransferCosts:
        num_bytes, links = self.messages(placed)
        # Messages of other sizes (uneven models) are written as other bandwidths: the plan has one size for all.
        sizes = np.maximum(num_bytes[0], 1.0)
        scale = num_bytes.sum(axis=1) / sizes.sum()
        return TransferCosts(
            latency=tuple(np.ravel(links.latency_s + self.efficiency.transfer_s).tolist()),
            bandwidth=tuple((np.ravel(transfer_bandwidth(links, self.efficiency)) / np.maximum(scale, 1e-12)).tolist()),
            message_bytes=tuple(sizes.tolist()),
        )

    def step(
        self, partitions: Sequence[LayerCounts], groups: RankGroups, zero_stage: int, zero_shard_size: int | None = None
    ) -> StepCosts:
        """Return the end of the iteration without overlap: [P, n] seconds of n stage partitions, or [P, m] of one."""
        column = np.s_[:, None]
        counts = [(each.parameters, each.shared_parameters, each.expert_parameters) for each in partitions]
        parameters, shared, of_experts = np.array(counts).transpose(1, 2, 0)
        return step_costs(
            parameters,
            shared,
            ShardLinks(*(each.at(column) for each in groups.shards(zero_shard_size))),
            groups.ends.at(0),
            np.array([[min(map(reachable_bandwidth, devices))] for devices in groups.devices]),
            zero_stage=zero_stage,
            precision=self.precision,
            software=self.software,
            efficiency=self.efficiency,
            expert_parameters=of_experts,
            expert_topology=groups.expert_copies.at(column),
        )


def _plans_copies(strategy: Strategy) -> bool:
    """Whether token slices wait on hosts in an order that is known before a search."""
    return strategy.offload and strategy.schedule != OPTIMISED


def _by_rank(ops: Floats, ranks: int) -> Floats:
    """[parts, stages, S, m] seconds, summed over the stages of each rank and over token slices: [parts, P, m]."""
    whole = ops.sum(axis=2)
    return np.asarray(whole.reshape(len(ops), -1, ranks, whole.shape[-1]).sum(axis=1))


class Pricing:
    """Prices strategies of one model on one cluster, time and memory."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        measured_cluster: Cluster | None = None,
        memory_overheads: MemoryOverheads | None = None,
        **options: Any,
    ) -> None:
        """Prepare.

        Args:
            measured_cluster: the same nodes with measured links; None = links of the data sheets.
            memory_overheads: memory that is not of tensors; None = the defaults of its devices.
            options: as `CostModel` has them.
        """
        self.workload = workload
        self.cluster = cluster
        self.cost_model = CostModel(workload, measured_cluster or cluster, **options)
        self.memory_model = MemoryModel(
            workload=workload,
            cluster=cluster,
            software=self.cost_model.software,
            precision=self.cost_model.precision,
            overheads=memory_overheads or default_overheads(cluster, self.cost_model.software),
            orders=self.cost_model.simulator.columns,
        )

    def predict(
        self, strategy: Strategy, memory: tuple[RankMemory, ...] | None = None, of_interest_s: float = inf
    ) -> Prediction:
        """Price one strategy; see `CostModel.predict_time`."""
        time = self.cost_model.predict_time(strategy, of_interest_s=of_interest_s)
        return replace(time, memory=memory or self.memory(strategy))

    def memory(self, strategy: Strategy) -> tuple[RankMemory, ...]:
        """Return the peak memory of each pipeline rank's device, without tensors that wait on hosts."""
        model, copies = self.memory_model, self.host_copies(strategy)
        if (workload := self.cost_model.dispatched(strategy).workload) is not self.workload:
            model = replace(model, workload=workload, _tokens={})
        return model.predict(strategy, copies=copies)

    def host_copies(self, strategy: Strategy) -> HostCopyPlan | None:
        """Return the copies on hosts until every rank has reached its peak; None without copies.

        Copies of an `optimised` order depend on the order, which is not known yet: without copies, its memory is an
        upper limit.
        """
        if not _plans_copies(strategy):
            return None
        return self.cost_model.host_copies(strategy, self.memory_model.micro_batches_of_peak(strategy))

    def why_it_does_not_fit(
        self, strategy: Strategy, memory: tuple[RankMemory, ...], headroom: float = 0.0
    ) -> str | None:
        """Return which pipeline rank needs more memory than its smallest device has; None if none does."""
        usable_share = self.memory_model.overheads.usable_share * (1 - headroom)
        kept_free = f", {100 * headroom:.3g} % kept free" if headroom else ""
        for rank, smallest in enumerate(self.cost_model.groups(strategy).smallest):
            usable, needed = usable_share * smallest.memory_bytes, memory[rank].total
            if needed > usable:
                return (
                    f"out of memory: pipeline rank {rank} needs {needed / 1e9:.1f} GB of {usable / 1e9:.1f} GB "
                    f"({smallest.name}{kept_free})"
                )
        return None
