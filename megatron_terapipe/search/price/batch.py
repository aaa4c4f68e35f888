"""Many strategies at once, each priced in closed form (`makespan`).

Grids of strategies (`rank/grid_times.py`) read the same formulas. The n strategies of a `StrategyBatch` are of one
workload and differ only in numbers (not in recompute, software, ...): calibration prices them again and again with
other constants. Their groups and links on the cluster are looked up once; then other constants cost a few array
operations.

Two differences are deliberate, because fitted constants depend on them: a batch leaves out the gaps of the executor
(`op_s`), latencies of messages under ops and round trips, and takes the reductions of the slowest rank; a grid counts
all of these, and of reductions under ops the first rank's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, moved, reachable_bandwidth
from megatron_terapipe.search.price.links import (
    BoundaryLinks,
    GroupTopology,
    LayerLinks,
    RankKind,
    ShardLinks,
    sending_s,
)
from megatron_terapipe.search.price.makespan import pipeline_time, slowest_rank_and_rest
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.stages import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    SPLIT_SCHEDULES,
    WEIGHT_GRADIENT,
    PlacedStrategy,
    StageOps,
    on_slowest_device,
    op_sizes,
    stage_ops,
)
from megatron_terapipe.search.price.step import CoveringOps, exposed_reduction_s, step_costs
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]


NUMBERS = (
    "tensor_parallel_size",
    "sequence_parallel_size",
    "expert_parallel_size",
    "micro_batch_size",
    "num_micro_batches",
    "num_token_slices",
    "num_model_chunks",
)
"""Numbers of a strategy that the formulas read, first the fields of `OpSizes`; the data-parallel size is in links."""


def batch_key(model: CostModel, strategy: Strategy) -> tuple[object, ...]:
    """Return the key of a batch: the values that its strategies share.

    Where all ranks compute alike, layouts may differ. On a mixed cluster each layout has a batch of its own.
    """
    groups = model.groups(strategy)
    kinds, layout = groups.kinds, None
    if len(kinds) > 1 or len(groups.by_replica) > 1:
        layout = strategy.layout, strategy.placement, id(model.cluster)
    return (
        id(model.workload),
        tuple(kind.devices for kind in kinds),
        layout,
        model.software,
        model.precision,
        strategy.schedule,
        strategy.recompute,
        strategy.sequence_parallel,
        strategy.key_value_gradients,
        strategy.zero_stage,
        strategy.cut(model.workload.seq_length).lengths,
    )


class Replicas(NamedTuple):
    """Devices and links of the replicas of one kind."""

    kinds: tuple[RankKind, ...]
    """Ranks that compute alike; the links between those that share a layer broadcast with [n]."""
    tensor: GroupTopology
    links: BoundaryLinks
    """[stages, n] from a stage to the next."""

    @classmethod
    def of(cls, models: Sequence[CostModel], placed: Sequence[PlacedStrategy]) -> "Replicas":
        """Look up the replicas that the groups of strategies count."""
        ranks = [each.strategy.pipeline_parallel_size for each in placed]
        kinds = placed[0].groups.kinds
        if len(kinds) == 1:
            links = zip(*(each.groups.layer_links(0) for each in placed), strict=True)
            links_of_layers = LayerLinks(*map(_columns, links))
            kinds = (RankKind(np.arange(max(ranks)), kinds[0].devices, links_of_layers),)
        sent_over = [model.messages(each)[1] for model, each in zip(models, placed, strict=True)]
        return cls(
            kinds,
            _all_ranks([each.groups.tensor for each in placed], ranks),
            BoundaryLinks(
                *(_stacked([each[:, 0] for each in parts], fill=1) for parts in zip(*sent_over, strict=True))
            ),
        )


@dataclass(frozen=True)
class StrategyBatch:
    """n strategies, ready to be priced. Make it with `of`."""

    model: CostModel
    """Cost model of one of them, for the values that all share."""
    strategy: Strategy
    per_rank: Floats
    """[P, K, n] layers of each kind on each rank; ranks that a strategy does not have hold none."""
    first_stage: Floats
    """[P, K, n] layers of the first stage of each rank."""
    parameters: Floats
    """[P, n] parameters that a rank holds, without experts."""
    expert_parameters: Floats
    """[P, n] parameters of experts."""
    shared: Floats
    """[P, n] of them in a weight that two ranks hold."""
    numbers: dict[str, Floats]
    replicas: tuple[Replicas, ...]
    """Devices and links of each kind; one entry where all are alike."""
    shards: ShardLinks
    """Links of ranks with the same weights, arrays of [P, n]."""
    expert_copies: GroupTopology
    """Links of ranks with the same experts, arrays of [P, n]."""
    ends: GroupTopology
    """Links of the first and the last pipeline rank, arrays of [n]."""
    memory_bandwidth: Floats
    """[P, n] bytes per second of the slowest memory of each rank."""
    message: Floats
    """[stages, n] bytes that a stage sends to the next in one micro-batch; 0 = no message."""
    rank_of_stage: NDArray[np.int64]
    """[stages, n] pipeline rank."""

    @classmethod
    def of(cls, models: Sequence[CostModel], strategies: Sequence[Strategy]) -> "StrategyBatch":
        """Look up the groups of layouts on their clusters."""
        placed = [model.placed(one) for model, one in zip(models, strategies, strict=True)]
        sent = [model.messages(each)[0] for model, each in zip(models, placed, strict=True)]
        ranks = [each.strategy.pipeline_parallel_size for each in placed]
        bandwidths = [[min(map(reachable_bandwidth, rank)) for rank in each.groups.devices] for each in placed]
        shards = [each.groups.shards(each.strategy.zero_shard_size) for each in placed]
        # Strategies with unlike replicas share a layout.
        unlike = placed[0].groups.by_replica
        counted = [placed] if len(unlike) == 1 else [[replace(each, groups=one) for each in placed] for one in unlike]
        stages = [
            np.arange(len(each.counts.per_stage), dtype=float) % number
            for each, number in zip(placed, ranks, strict=True)
        ]
        return cls(
            model=models[0],
            strategy=strategies[0],
            per_rank=_stacked([each.counts.per_rank for each in placed]),
            first_stage=_stacked([each.counts.first_stage for each in placed]),
            parameters=_stacked([each.counts.parameters for each in placed]),
            expert_parameters=_stacked([each.counts.expert_parameters for each in placed]),
            shared=_stacked([each.counts.shared_parameters for each in placed]),
            numbers={name: np.array([getattr(one, name) for one in strategies], dtype=float) for name in NUMBERS},
            replicas=tuple(Replicas.of(models, each) for each in counted),
            shards=ShardLinks(*(_all_ranks(part, ranks) for part in zip(*shards, strict=True))),
            expert_copies=_all_ranks([each.groups.expert_copies for each in placed], ranks),
            ends=_columns([each.groups.ends.at(0) for each in placed]),
            memory_bandwidth=_stacked([np.array(rows) for rows in bandwidths], fill=1),
            message=_stacked([each.sum(axis=1) for each in sent]),
            rank_of_stage=_stacked(stages).astype(np.int64),
        )

    def at(self, columns: NDArray[np.int64]) -> "StrategyBatch":
        """Return the batch of some of its strategies, which may repeat."""
        arrays = {
            each.name: _at(getattr(self, each.name), columns)
            for each in fields(self)
            if each.name not in ("model", "strategy", "replicas", "numbers")
        }
        numbers = {name: values[columns] for name, values in self.numbers.items()}
        replicas = tuple(
            Replicas(
                tuple(kind._replace(links=_at(kind.links, columns)) for kind in each.kinds),
                _at(each.tensor, columns),
                _at(each.links, columns),
            )
            for each in self.replicas
        )
        return replace(self, **arrays, numbers=numbers, replicas=replicas)

    def times(self, efficiency: HardwareEfficiency) -> Floats:
        """Return the seconds of one iteration of each strategy, in closed form: [n]."""
        each = [self._times_of(replicas, efficiency) for replicas in self.replicas]
        return np.asarray(np.maximum.reduce(each), dtype=float)

    def _times_of(self, replicas: Replicas, efficiency: HardwareEfficiency) -> Floats:
        """[n] seconds of one iteration of the replicas of a kind."""
        numbers, schedule = self.numbers, self.strategy.schedule
        whole, first = self._rank_ops(replicas, efficiency)
        slowest, others = slowest_rank_and_rest(schedule, self._with_messages(whole, replicas, efficiency))
        makespan = pipeline_time(
            schedule,
            num_micro_batches=numbers["num_micro_batches"],
            num_token_slices=numbers["num_token_slices"],
            num_model_chunks=numbers["num_model_chunks"],
            slowest=slowest,
            others=others,
        )
        covering = CoveringOps(
            completing=first[WEIGHT_GRADIENT if schedule in SPLIT_SCHEDULES else BACKWARD],
            forward=whole[FORWARD],
            backward=whole[BACKWARD],
            layers=self.first_stage.sum(axis=1),
            num_micro_batches=numbers["num_micro_batches"],
        )
        step = step_costs(
            self.parameters,
            self.shared,
            self.shards,
            self.ends,
            self.memory_bandwidth,
            zero_stage=self.strategy.zero_stage,
            precision=self.model.precision,
            software=self.model.software,
            efficiency=efficiency,
            expert_parameters=self.expert_parameters,
            expert_topology=self.expert_copies,
        )
        cool_down_s = covering.cool_down_s(drains=schedule not in SPLIT_SCHEDULES)
        communication, zero_stage = self.model.software.communication, self.strategy.zero_stage
        reduction = exposed_reduction_s(step, covering, communication, efficiency, cool_down_s, zero_stage=zero_stage)
        ends = sum(np.max(part, axis=0) for part in (reduction, step.shared_weight, step.optimizer))
        return np.asarray(makespan + ends + efficiency.iteration_s, dtype=float)

    def _rank_ops(self, replicas: Replicas, efficiency: HardwareEfficiency) -> tuple[Floats, Floats]:
        """[6, P, n] seconds of the ops of a whole micro-batch, and of its first token slice in the first stage."""
        model, strategy = self.model, self.strategy
        op_times = model.op_times
        if isinstance(op_times, Roofline):
            op_times = replace(op_times, efficiency=efficiency)
        prices = replace(model.prices, op_times=op_times, efficiency=efficiency)
        lengths = strategy.cut(model.workload.seq_length).lengths
        bounds = np.cumsum([0, *lengths])[:, None] / model.workload.seq_length
        numbers = {name: self.numbers[name] for name in NUMBERS[:4]}
        sizes = replace(op_sizes(strategy, bounds[:-1], bounds[1:]), **numbers)  # type: ignore[arg-type]
        whole_micro_batch = np.zeros((len(StageOps._fields), *self.parameters.shape))
        first_token_slice = np.zeros_like(whole_micro_batch)
        for kind in replicas.kinds:
            rows = kind.ranks
            tables = [prices.ops(device, kind.links, sizes) for device in kind.devices]
            whole = [stage_ops(self.per_rank[rows], table.sum(axis=2)) for table in tables]
            first = [stage_ops(self.first_stage[rows], table[:, :, 0]) for table in tables]
            whole_s = [ops[FORWARD] + ops[BACKWARD] for ops in whole]
            whole_micro_batch[:, rows] = on_slowest_device(whole, whole_s)
            first_token_slice[:, rows] = on_slowest_device(first, whole_s)
        return whole_micro_batch, first_token_slice

    def _with_messages(self, ops: Floats, replicas: Replicas, efficiency: HardwareEfficiency) -> Floats:
        """[6, P, n] ops of a whole micro-batch, with the messages that block them."""
        model = self.model
        if model.software.communication.overlaps_transfers or not self.message.any():
            return ops
        columns = np.arange(ops.shape[2])
        sending = sending_s(
            self.message,
            replicas.links,
            replicas.tensor.at((self.rank_of_stage[: len(self.message)], columns)),
            efficiency,
            in_parts=model.software.communication.shares_transfers and not self.strategy.sequence_parallel,
        )
        sending = np.where(self.message > 0, sending, 0.0)
        after_forward, before_backward = np.zeros_like(ops[0]), np.zeros_like(ops[0])
        np.add.at(after_forward, (self.rank_of_stage[: len(sending)], columns), sending)
        # The gradient comes from the next stage; a stage that does not exist sends no message.
        np.add.at(
            before_backward, (self.rank_of_stage[1 : len(sending) + 1], columns), sending[: len(self.rank_of_stage) - 1]
        )
        blocked = ops.copy()
        blocked[FORWARD] += after_forward
        blocked[[BACKWARD, INPUT_GRADIENT]] += before_backward
        return blocked


STEP = 0.02
"""Change of a constant's logarithm over which the slope is taken."""


class StrategyBatches:
    """Strategies that do not fit into one batch: times and slopes of all of them, each by its own model."""

    def __init__(self, models: Sequence[CostModel], strategies: Sequence[Strategy]) -> None:
        places: dict[tuple[object, ...], list[int]] = {}
        for index, (model, strategy) in enumerate(zip(models, strategies, strict=True)):
            places.setdefault(batch_key(model, strategy), []).append(index)
        self._count = len(strategies)
        self._batches = [
            (StrategyBatch.of([models[row] for row in rows], [strategies[row] for row in rows]), np.array(rows))
            for rows in places.values()
        ]

    def times(self, efficiency: HardwareEfficiency) -> Floats:
        """[n] seconds, in closed form."""
        times = np.empty(self._count)
        for batch, rows in self._batches:
            times[rows] = batch.times(efficiency)
        return times

    def times_with(self, constants: Sequence[HardwareEfficiency]) -> Floats:
        """[m, n] seconds with each of some constants: a batch is repeated, a column for each strategy and constants."""
        times = np.empty((len(constants), self._count))
        for batch, rows in self._batches:
            most = max(MOST_COLUMNS // len(rows), 1)
            for first in range(0, len(constants), most):
                some = constants[first : first + most]
                columns = np.tile(np.arange(len(rows)), len(some))
                found = batch.at(columns).times(_joined(some, len(rows)))
                times[first : first + most, rows] = found.reshape(len(some), -1)
        return times

    def slopes(self, efficiency: HardwareEfficiency, names: Sequence[str]) -> Floats:
        """[n, p] change of the logarithms of times with the logarithm of each constant."""
        logs = np.log(self.times_with([efficiency, *(moved(efficiency, [name], STEP) for name in names)]))
        return np.asarray((logs[1:] - logs[0]).T / STEP)


MOST_COLUMNS = 4096  # columns of a batch that is repeated


def _at(value: Any, columns: NDArray[np.int64]) -> Any:
    """Return arrays of [..., n] at columns; tuples of them likewise, numbers as they are."""
    if isinstance(value, tuple):
        return type(value)(*(_at(each, columns) for each in value))
    return value if np.ndim(value) == 0 else value[..., columns]


def _joined(constants: Sequence[HardwareEfficiency], repeats: int) -> HardwareEfficiency:
    """Return several sets of constants in one: arrays [m * repeats] where they differ, each value `repeats` times."""
    first = constants[0]
    found: dict[str, Any] = {}
    for each in fields(first):
        values = [getattr(one, each.name) for one in constants]
        if any(value != values[0] for value in values):
            columns = np.repeat(np.array(values), repeats, axis=0).T
            found[each.name] = tuple(columns) if columns.ndim > 1 else columns
    return replace(first, **found)


def _columns(topologies: Sequence[GroupTopology]) -> GroupTopology:
    """Join the links of n groups: arrays of [n]."""
    return GroupTopology(*map(np.array, zip(*topologies, strict=True)))


def _all_ranks(topologies: Sequence[GroupTopology], ranks: Sequence[int]) -> GroupTopology:
    """Join the links of all ranks of n layouts: arrays of [P, n]."""
    rows = [[np.broadcast_to(part, number) for part in each] for each, number in zip(topologies, ranks, strict=True)]
    return GroupTopology(*(_stacked(columns, fill=1) for columns in zip(*rows, strict=True)))


def _stacked(columns: Sequence[Floats], fill: float = 0.0) -> Floats:
    """Join n arrays of [rows, ...], which may differ in their rows: [most rows, ..., n]."""
    rows = max(map(len, columns))
    out = np.full((rows, *columns[0].shape[1:], len(columns)), float(fill))
    for index, column in enumerate(columns):
        out[: len(column), ..., index] = column
    return out
