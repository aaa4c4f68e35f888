"""Seconds of every strategy of a grid: an estimate in closed form, and a bound that no simulation of it goes below.

    counts of layers [ranks, K]  x  table of ops [parts, K, B, S, R, Q]  ->  ops of each rank [parts, ranks, B, S, R, Q]
    slowest rank, the others, the way of the first token slice           ->  estimate, bound [O, P, B, S, R, Q, Z]

Ranks with the same layers, device and links are the same row, so there are few of them however long the pipeline is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.closed_form import lower_bound, pipeline_time, total_s
from megatron_terapipe.search.cost.collectives import GroupTopology, transfer_bandwidth
from megatron_terapipe.search.cost.cost_model import SPLIT_SCHEDULES, CostModel, topology_at
from megatron_terapipe.search.cost.rank_groups import GroupLinks, RankGroups
from megatron_terapipe.search.cost.stage_ops import StageOps
from megatron_terapipe.search.cost.step_costs import StepCosts, shown_reduction_s, step_costs
from megatron_terapipe.search.rank.op_tables import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    OpTable,
    OpTables,
)
from megatron_terapipe.search.rank.stage_counts import StageCounts
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]


class Hops(NamedTuple):
    """Seconds of messages; the axes are those of ops.

    Attributes:
        least: [B, S, 1, 1] that the first token slice travels from the first rank to the last at least.
        usual: [B, S, 1, Q] that a token slice travels there and back.
        busy: [B, 1, 1, Q] that the busiest channel, of one boundary and direction, sends in a micro-batch.
    """

    least: Floats
    usual: Floats
    busy: Floats


def grid_hops(grid: StrategyGrid, groups: RankGroups, model: CostModel, counts: StageCounts) -> Hops:
    """Price them.

    Args:
        grid: the grid.
        groups: links of its layout.
        model: what prices a strategy.
        counts: layers of each stage.
    """
    ranks = grid.pipeline_parallel_size
    shape = (len(grid.micro_batch), len(grid.token_slices), 1, 1)
    if ranks == 1 or not model.software.overlaps_transfers:
        return Hops(np.zeros(shape), np.zeros(shape), np.zeros((shape[0], 1, 1, 1)))
    efficiency, links = model.efficiency, groups.pipe
    outputs = np.array([model.workload.layers[index].output_elements for index in counts.last_layers], dtype=float)
    latency = float((links.latency_s[: ranks - 1] + efficiency.transfer_s).sum())
    reached = transfer_bandwidth(links.bandwidth, links.crosses_nodes, efficiency)
    per_sequence = outputs / np.asarray(reached)[np.arange(len(outputs)) % ranks]
    sizes = np.array(grid.micro_batch, dtype=float).reshape(-1, 1, 1, 1)
    seq_length = model.workload.seq_length
    share = np.array(
        [(grid.lengths or _equal(count, seq_length))[0] / seq_length for count in grid.token_slices]
    ).reshape(1, -1, 1, 1)
    tensor = grid.tensor_parallel_size
    own = np.array([1 / tensor if parallel else 1.0 for parallel in grid.sequence_parallel])
    sent = model.element_bytes * sizes * own
    moving = sent * share * per_sequence[: ranks - 1].sum()
    # Sizes of uneven layers are averaged over a micro-batch when messages are simulated: the least leaves them out.
    return Hops(np.broadcast_to(latency, shape), 2 * (latency + moving), sent * per_sequence.max())


def _equal(count: int, seq_length: int) -> tuple[float, ...]:
    return (seq_length / count,)


@dataclass(frozen=True)
class GridTimes:
    """Seconds of one iteration of each strategy of a grid.

    Attributes:
        estimate: [grid] in closed form.
        bound: [grid] no schedule of it takes less.
    """

    estimate: Floats
    bound: Floats


class RankKinds:
    """Pipeline ranks of a layout by what they compute with: those of a kind share their tables of ops."""

    def __init__(self, grid: StrategyGrid, groups: RankGroups, tables: OpTables) -> None:
        """Find them.

        Args:
            grid: the grid.
            groups: links and devices of the layout.
            tables: prices layers.
        """
        numbers: dict[tuple[object, ...], int] = {}
        self.of_rank: list[int] = []
        """Kind of each pipeline rank."""
        self.tables: list[list[OpTable]] = []
        """Of each kind, the table of each of its different devices."""
        for rank, devices in enumerate(groups.devices):
            topology = topology_at(groups.tensor, rank)
            key = (devices, topology)
            if key not in numbers:
                numbers[key] = len(numbers)
                self.tables.append([tables.table(grid, device, topology) for device in devices])
            self.of_rank.append(numbers[key])


def grid_times(
    grid: StrategyGrid,
    groups: RankGroups,
    cost_model: CostModel,
    tables: OpTables,
    counts: Mapping[tuple[int, int], StageCounts],
    *,
    wanted: NDArray[np.bool_],
) -> GridTimes:
    """Price a grid.

    Args:
        grid: the grid.
        groups: links and devices of its layout.
        cost_model: what prices a strategy.
        tables: prices layers.
        counts: layers of each rank, by number of model chunks and place on the axis `partition`; pairs that are missing
            are not priced.
        wanted: [O, P] pairs of a schedule and a partition that are priced.
    """
    kinds = RankKinds(grid, groups, tables)
    estimate = np.full(grid.shape, np.inf)
    bound = np.full(grid.shape, np.inf)
    for model_chunks in dict.fromkeys(model_chunks for _, model_chunks in grid.order):
        for place in range(len(grid.partition)):
            found = counts.get((model_chunks, place))
            orders = [row for row, order in enumerate(grid.order) if order[1] == model_chunks and wanted[row, place]]
            if found is None or not orders:
                continue
            ops = _rank_ops(kinds, found)
            hops = grid_hops(grid, groups, cost_model, found)
            steps = _steps(grid, groups, cost_model, found)
            op_s = cost_model.efficiency.op_s
            for order in orders:
                schedule = grid.order[order][0]
                times = _pipeline(schedule, model_chunks, grid, ops, hops, op_s)
                last_op_s = ops.completing[WEIGHT_GRADIENT if schedule in SPLIT_SCHEDULES else BACKWARD] + op_s
                # The last axis is the ZeRO stage, which the ops do not depend on.
                step_s = np.stack([_step_s(step, last_op_s, found, cost_model) for step in steps], axis=-1)
                estimate[order, place] = times[0][..., None] + step_s
                bound[order, place] = times[1][..., None] + step_s
    return GridTimes(estimate, bound)


@dataclass(frozen=True)
class _RankOps:
    """Ops of one micro-batch of the different rows of ranks: [4, rows, B, S, R, Q], and how many ranks each row is."""

    whole: Floats
    multiplicity: Floats
    last: int
    completing: Floats
    """[4, B, S, R, Q] of the first token slice in the first stage, whose backward completes the first rank's gradients;
    of two devices, the slower one."""
    fill: Floats
    """[4, B, S, R, Q] of the first token slice in the first stages of all ranks but the last."""

    def with_op_s(self, op_s: float, model_chunks: int, num_token_slices: Floats) -> "_RankOps":
        """The same with what an executor needs between two ops: once for each token slice and stage of a rank."""
        if not op_s:
            return self
        others = self.multiplicity.sum() - 1
        return replace(self, whole=self.whole + op_s * model_chunks * num_token_slices, fill=self.fill + op_s * others)


def _rank_ops(kinds: RankKinds, counts: StageCounts) -> _RankOps:
    ranks = len(kinds.of_rank)
    keyed = np.column_stack([np.array(kinds.of_rank), counts.per_rank])
    rows, row_of_rank, multiplicity = np.unique(keyed, axis=0, return_inverse=True, return_counts=True)
    row_of_rank = row_of_rank.reshape(-1)
    of_kind = rows[:, 0].astype(int)
    parts = []
    fill: Floats | float = 0.0
    of_rank = np.array(kinds.of_rank)
    order: list[int] = []
    for kind, tables in enumerate(kinds.tables):
        mine = np.flatnonzero(of_kind == kind)
        parts.append(_slowest_device([_times(rows[mine, 1:], table.whole) for table in tables]))
        order += mine.tolist()
        before_last = (of_rank == kind) & (np.arange(ranks) < ranks - 1)
        passed = counts.first_stage[before_last].sum(axis=0)[None]
        fills = [_times(passed, table.first)[:, 0] for table in tables]
        # A bound must not count on the slower one of two devices.
        fill = fill + np.minimum.reduce(fills)
    whole = np.concatenate(parts, axis=1)
    back = np.argsort(np.array(order))
    tables = kinds.tables[kinds.of_rank[0]]
    completing = np.maximum.reduce([_times(counts.first_stage[:1], table.first)[:, 0] for table in tables])
    return _RankOps(
        whole[:, back], multiplicity.astype(float), int(row_of_rank[-1]), np.asarray(completing), np.asarray(fill)
    )


def _times(counts: Floats, table: Floats) -> Floats:
    """[rows, K] x [4, K, ...] -> [4, rows, ...]."""
    parts, kinds = table.shape[:2]
    product = counts @ table.reshape(parts, kinds, -1)
    return np.asarray(product.reshape(parts, len(counts), *table.shape[2:]), dtype=float)


def _slowest_device(per_device: Sequence[Floats]) -> Floats:
    """Ops of the device that takes longest for a forward and a backward; the others of its stage wait for it."""
    slowest = per_device[0]
    for other in per_device[1:]:
        slowest = np.where((other[0] + other[1]) > (slowest[0] + slowest[1]), other, slowest)
    return slowest


def _ops(parts: Sequence[Floats] | Floats) -> StageOps:
    """Four parts as ops; nothing here asks how much of them is collectives."""
    return StageOps(parts[0], parts[1], parts[2], parts[3], 0.0)


def _pipeline(
    schedule: str, model_chunks: int, grid: StrategyGrid, ops: _RankOps, hops: Hops, op_s: float
) -> tuple[Floats, Floats]:
    """[B, S, R, Q] estimate and bound of the ops."""
    micro_batches = grid.num_micro_batches.reshape(-1, 1, 1, 1).astype(float)
    ops = ops.with_op_s(op_s, model_chunks, np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1))
    per_row = _ops(ops.whole)
    totals = total_s(schedule, per_row)
    slowest_row = np.argmax(totals, axis=0)[None]
    slowest = _ops([np.take_along_axis(part, slowest_row, axis=0)[0] for part in ops.whole])
    weights = ops.multiplicity[:, None, None, None, None]
    everything = [(part * weights).sum(axis=0) for part in ops.whole]
    others = _ops([whole - one for whole, one in zip(everything, slowest[:4], strict=True)])
    num_token_slices = np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1)
    estimate = pipeline_time(
        schedule,
        num_micro_batches=micro_batches,
        num_token_slices=num_token_slices,
        num_model_chunks=float(model_chunks),
        slowest=slowest,
        others=others,
        latency_s=hops.usual * model_chunks,
    )
    fill = _ops(ops.fill)
    last = _ops(ops.whole[:, ops.last])
    passing = fill._replace(
        forward=fill.forward + hops.least,
        backward=fill.backward + hops.least,
        input_gradient=fill.input_gradient + hops.least,
    )
    bound = lower_bound(schedule, num_micro_batches=micro_batches, slowest=slowest, last=last, fill=passing)
    bound = np.maximum(bound, micro_batches * hops.busy)
    estimate = np.maximum(estimate, bound)
    if schedule in ("1f1b", "zero-bubble") and model_chunks == 1:
        # The first rank holds no more than P - 1 + S token slices, and waits for one of them to come back.
        back = everything[INPUT_GRADIENT if schedule == "zero-bubble" else BACKWARD]
        one = (everything[FORWARD] + back) / num_token_slices + hops.usual
        rounds = micro_batches * num_token_slices / (grid.pipeline_parallel_size - 1 + num_token_slices)
        estimate = np.maximum(estimate, rounds * one)
    return np.asarray(estimate), np.asarray(bound)


def _columns(links: GroupLinks, ranks: int) -> GroupTopology:
    """Links of the groups of all pipeline ranks, as arrays of [P]."""
    return GroupTopology(
        float(links.size),
        links.num_nodes[:ranks],
        links.inside_bandwidth[:ranks],
        links.inside_latency_s[:ranks],
        links.network_bandwidth[:ranks],
        links.network_latency_s[:ranks],
    )


def _steps(grid: StrategyGrid, groups: RankGroups, model: CostModel, counts: StageCounts) -> list[StepCosts]:
    """Per ZeRO stage the end of the iteration, arrays of [P]."""
    ranks = grid.pipeline_parallel_size
    bandwidth = np.array([min(device.memory_bandwidth for device in devices) for devices in groups.devices])
    return [
        step_costs(
            counts.parameters,
            counts.shared_parameters,
            _columns(groups.data, ranks),
            topology_at(groups.ends, 0),
            bandwidth,
            zero_stage=zero_stage,
            precision=model.precision,
            software=model.software,
            efficiency=model.efficiency,
        )
        for zero_stage in grid.zero
    ]


def _step_s(step: StepCosts, last_op_s: Floats, counts: StageCounts, model: CostModel) -> Floats:
    """[B, S, R, Q] seconds behind the last op.

    Of reductions that overlap, those of the first rank are counted: the others have the time until it is done.
    """
    reduction = np.full_like(last_op_s, float(np.max(step.gradient_reduction)))
    if model.software.overlaps_gradient_reduction:
        first = StepCosts(*(float(np.broadcast_to(part, counts.parameters.shape)[0]) for part in step))
        reduction = np.asarray(shown_reduction_s(first, last_op_s, float(counts.first_stage[0].sum())))
    fixed = float(np.max(step.shared_weight)) + float(np.max(step.optimizer)) + model.efficiency.iteration_s
    return np.asarray(reduction + fixed)
