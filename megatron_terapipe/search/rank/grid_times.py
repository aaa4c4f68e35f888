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

from megatron_terapipe.search.cost.closed_form import lower_bound, of_slowest_and_others, pipeline_time
from megatron_terapipe.search.cost.collectives import transfer_bandwidth
from megatron_terapipe.search.cost.cost_model import SPLIT_SCHEDULES, CostModel
from megatron_terapipe.search.cost.layer_counts import LayerCounts
from megatron_terapipe.search.cost.rank_groups import RankGroups
from megatron_terapipe.search.cost.stage_ops import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    StageOps,
    on_slowest_device,
    stage_ops,
)
from megatron_terapipe.search.cost.step_costs import CoveringOps, StepCosts, shown_reduction_s
from megatron_terapipe.search.rank.op_tables import OpTable, OpTables
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]


class P2pTimes(NamedTuple):
    """Seconds of messages; the axes are those of ops.

    Attributes:
        least: [B, S, 1, 1] that the first token slice travels from the first rank to the last at least.
        usual: [B, S, 1, Q] that a token slice travels there and back.
        busy: [B, 1, 1, Q] that the busiest channel, of one boundary and direction, sends in a micro-batch.
    """

    least: Floats
    usual: Floats
    busy: Floats


def p2p_times(grid: StrategyGrid, groups: RankGroups, model: CostModel, counts: LayerCounts) -> P2pTimes:
    """Return the times of messages between stages: [micro-batch sizes, token slices, ...].

    Args:
        grid: the grid.
        groups: links of its layout.
        model: cost model of a strategy.
        counts: layers of each stage.
    """
    ranks = grid.pipeline_parallel_size
    shape = (len(grid.micro_batch), len(grid.token_slices), 1, 1)
    if ranks == 1 or not model.software.communication.overlaps_transfers:
        return P2pTimes(np.zeros(shape), np.zeros(shape), np.zeros((shape[0], 1, 1, 1)))
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
    return P2pTimes(np.broadcast_to(latency, shape), 2 * (latency + moving), sent * per_sequence.max())


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


def grid_times(
    grid: StrategyGrid,
    groups: RankGroups,
    cost_model: CostModel,
    tables: OpTables,
    counts: Mapping[tuple[int, int], LayerCounts],
    *,
    wanted: NDArray[np.bool_],
) -> GridTimes:
    """Price a grid.

    Args:
        grid: the grid.
        groups: links and devices of its layout.
        cost_model: prices a strategy.
        tables: prices layers.
        counts: layers of each rank, by number of model chunks and place on the axis `partition`; pairs that are missing
            are not priced.
        wanted: [O, P] pairs of a schedule and a partition that are priced.
    """
    estimate = np.full(grid.shape, np.inf)
    bound = np.full(grid.shape, np.inf)
    of_kind = [[tables.table(grid, device, kind.topology) for device in kind.devices] for kind in groups.kinds]
    op_s = cost_model.efficiency.op_s
    for (model_chunks, place), found in counts.items():
        orders = [row for row, order in enumerate(grid.order) if order[1] == model_chunks and wanted[row, place]]
        if not orders:
            continue
        ops = _rank_ops(groups, of_kind, found).with_op_s(op_s, model_chunks, _token_slices(grid))
        p2p = p2p_times(grid, groups, cost_model, found)
        steps = [cost_model.step(found, groups, zero_stage) for zero_stage in grid.zero]
        for order in orders:
            schedule = grid.order[order][0]
            times = _pipeline(schedule, model_chunks, grid, ops, p2p)
            covering = CoveringOps(
                completing=ops.completing[WEIGHT_GRADIENT if schedule in SPLIT_SCHEDULES else BACKWARD] + op_s,
                forward=ops.whole[FORWARD, ops.first],
                backward=ops.whole[BACKWARD, ops.first],
                layers=float(found.first_stage[0].sum()),
                num_micro_batches=grid.num_micro_batches.reshape(-1, 1, 1, 1).astype(float),
            )
            for zero, step in enumerate(steps):
                step_s = _step_s(step, covering, found, cost_model)
                estimate[order, place, ..., zero] = times[0] + step_s
                bound[order, place, ..., zero] = times[1] + step_s
    return GridTimes(estimate, bound)


@dataclass(frozen=True)
class _RankOps:
    """Ops of one micro-batch of the different rows of ranks.

    Attributes:
        whole: [4, rows, B, S, R, Q] seconds of all token slices.
        multiplicity: [rows] ranks that each row stands for.
        first: row of the first rank.
        last: row of the last rank.
        completing: [4, B, S, R, Q] of the first token slice in the first stage, whose backward completes the gradients
            of the first rank; of two devices, the slower one.
        fill: [4, B, S, R, Q] of the first token slice in the first stages of all ranks but the last.
    """

    whole: Floats
    multiplicity: Floats
    first: int
    last: int
    completing: Floats
    fill: Floats

    def with_op_s(self, op_s: float, model_chunks: int, num_token_slices: Floats) -> "_RankOps":
        """Add what an executor needs between two ops: once for each token slice and stage of a rank."""
        if not op_s:
            return self
        others = self.multiplicity.sum() - 1
        return replace(self, whole=self.whole + op_s * model_chunks * num_token_slices, fill=self.fill + op_s * others)


def _rank_ops(groups: RankGroups, of_kind: Sequence[Sequence[OpTable]], counts: LayerCounts) -> _RankOps:
    per_rank, first_stage = counts.per_rank, counts.first_stage
    ranks = len(per_rank)
    row_of_rank = np.empty(ranks, np.int64)
    whole: list[Floats] = []
    fill: list[Floats] = []
    multiplicity: list[int] = []
    for kind, tables in zip(groups.kinds, of_kind, strict=True):
        rows, places = _different(per_rank[kind.ranks])
        row_of_rank[kind.ranks] = places + len(multiplicity)
        per_device = [stage_ops(rows, table.whole) for table in tables]
        whole.append(on_slowest_device(per_device, [ops[FORWARD] + ops[BACKWARD] for ops in per_device]))
        multiplicity += np.bincount(places).tolist()
        passed = first_stage[kind.ranks[kind.ranks < ranks - 1]].sum(axis=0)[None]
        # A bound must not count on the slower one of two devices.
        fill.append(np.minimum.reduce([stage_ops(passed, table.first)[:, 0] for table in tables]))
    (first,) = (tables for kind, tables in zip(groups.kinds, of_kind, strict=True) if kind.ranks[0] == 0)
    completing = np.maximum.reduce([stage_ops(first_stage[:1], table.first)[:, 0] for table in first])
    return _RankOps(
        whole[0] if len(whole) == 1 else np.concatenate(whole, axis=1),
        np.array(multiplicity, dtype=float),
        int(row_of_rank[0]),
        int(row_of_rank[-1]),
        np.asarray(completing),
        np.asarray(sum(fill[1:], start=fill[0])),
    )


def _different(counts: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The different rows of [n, K] counts, and [n] which of them each row is."""
    numbers: dict[bytes, int] = {}
    places = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in counts], dtype=np.int64)
    _, first = np.unique(places, return_index=True)
    return counts[first], places


def _token_slices(grid: StrategyGrid) -> Floats:
    """[1, S, 1, 1] numbers of token slices."""
    return np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1)


def _pipeline(
    schedule: str, model_chunks: int, grid: StrategyGrid, ops: _RankOps, p2p: P2pTimes
) -> tuple[Floats, Floats]:
    """[B, S, R, Q] estimate and bound of the ops."""
    micro_batches = grid.num_micro_batches.reshape(-1, 1, 1, 1).astype(float)
    num_token_slices = _token_slices(grid)
    slowest, others = of_slowest_and_others(schedule, ops.whole, ops.multiplicity)
    estimate = pipeline_time(
        schedule,
        num_micro_batches=micro_batches,
        num_token_slices=num_token_slices,
        num_model_chunks=float(model_chunks),
        slowest=slowest,
        others=others,
        latency_s=p2p.usual * model_chunks,
    )
    bound = lower_bound(
        schedule,
        num_micro_batches=micro_batches,
        slowest=slowest,
        last=StageOps(*ops.whole[:, ops.last]),
        fill=StageOps(*(ops.fill + p2p.least)),
    )
    bound = np.maximum(bound, micro_batches * p2p.busy)
    estimate = np.maximum(estimate, bound)
    if schedule in ("1f1b", "zero-bubble") and model_chunks == 1:
        # The first rank holds no more than P - 1 + S token slices, and waits for one of them to come back.
        back = INPUT_GRADIENT if schedule == "zero-bubble" else BACKWARD
        there_and_back = slowest[FORWARD] + others[FORWARD] + slowest[back] + others[back]
        one = there_and_back / num_token_slices + p2p.usual
        rounds = micro_batches * num_token_slices / (grid.pipeline_parallel_size - 1 + num_token_slices)
        estimate = np.maximum(estimate, rounds * one)
    return np.asarray(estimate), np.asarray(bound)


def _step_s(step: StepCosts, covering: CoveringOps, counts: LayerCounts, model: CostModel) -> Floats:
    """[B, S, R, Q] seconds behind the last op.

    Of reductions that overlap, those of the first rank are counted: the others have the time until it is done.
    """
    fixed = float(np.max(step.shared_weight)) + float(np.max(step.optimizer)) + model.efficiency.iteration_s
    communication = model.software.communication
    first = StepCosts(*(float(np.broadcast_to(part, counts.parameters.shape)[0]) for part in step))
    if not communication.overlaps_gradient_reduction:
        first = first._replace(gradient_reduction=float(np.max(step.gradient_reduction)))
    return np.asarray(shown_reduction_s(first, covering, communication, model.efficiency) + fixed)
