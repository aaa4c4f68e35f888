"""Seconds of every strategy of a grid: an estimate in closed form, and a bound that no simulation of it goes below.

    ops of each rank, messages of each boundary  ->  estimate, bound [O, P, B, S, R, Q, Z]

The end of the iteration, which no schedule changes, is added to both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.closed_form import (
    lower_bound,
    of_slowest_and_others,
    pipeline_time,
    round_trip_bound,
)
from megatron_terapipe.search.cost.cost_model import SPLIT_SCHEDULES, CostModel
from megatron_terapipe.search.cost.layer_counts import LayerCounts
from megatron_terapipe.search.cost.links.rank_groups import RankGroups
from megatron_terapipe.search.cost.stage_ops import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    StageOps,
)
from megatron_terapipe.search.cost.step_costs import CoveringOps, StepCosts, shown_reduction_s
from megatron_terapipe.search.rank.grid.grid_messages import MessageTimes, message_times
from megatron_terapipe.search.rank.grid.grid_ops import RankOps, rank_ops
from megatron_terapipe.search.rank.grid.op_tables import OpTables
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]

ONE_STAGE_EACH = ("1f1b", "zero-bubble")
"""Schedules whose first rank runs P - 2 + S forwards ahead, and then waits for backwards to come back."""


@dataclass(frozen=True)
class GridTimes:
    """Seconds of one iteration of each strategy of a grid."""

    estimate: Floats
    """[grid] in closed form."""
    bound: Floats
    """[grid] no schedule of it takes less."""


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
        counts: layers of each rank, by number of model chunks and place on the axis `partition`; pairs that are missing
            are not priced.
        wanted: [O, P] pairs of a schedule and a partition that are priced.
    """
    # Replicas on unlike nodes do not wait for each other: an iteration takes as long as that of the slowest.
    each = [_of_replicas(grid, groups, alike, cost_model, tables, counts, wanted) for alike in groups.by_replica]
    return GridTimes(
        reduce(np.maximum, [one.estimate for one in each]), reduce(np.maximum, [one.bound for one in each])
    )


def _of_replicas(
    grid: StrategyGrid,
    groups: RankGroups,
    alike: RankGroups,
    cost_model: CostModel,
    tables: OpTables,
    counts: Mapping[tuple[int, int], LayerCounts],
    wanted: NDArray[np.bool_],
) -> GridTimes:
    """Price a grid with the devices and links of one kind of replica; all of them end the iteration together."""
    estimate = np.full(grid.shape, np.inf)
    bound = np.full(grid.shape, np.inf)
    of_kind = [[tables.table(grid, device, kind.links) for device in kind.devices] for kind in alike.kinds]
    for (model_chunks, place), found in counts.items():
        orders = [row for row, order in enumerate(grid.order) if order[1] == model_chunks and wanted[row, place]]
        if not orders:
            continue
        ops = rank_ops(grid, alike, of_kind, found, cost_model.efficiency.op_s)
        messages = message_times(grid, alike, cost_model, found, tables.splits(grid))
        steps = [cost_model.step(found, groups, zero_stage) for zero_stage in grid.zero]
        for order in orders:
            schedule = grid.order[order][0]
            bound_s = _bound(schedule, model_chunks, grid, ops, messages)
            estimate_s = np.maximum(_estimate(schedule, model_chunks, grid, ops, messages), bound_s)
            covering = CoveringOps(
                completing=ops.completing[WEIGHT_GRADIENT if schedule in SPLIT_SCHEDULES else BACKWARD],
                forward=ops.whole[FORWARD, ops.first],
                backward=ops.whole[BACKWARD, ops.first],
                layers=float(found.first_stage[0].sum()),
                num_micro_batches=_sizes(grid)[0],
            )
            for zero, step in enumerate(steps):
                step_s = _step_s(step, covering, found, cost_model)
                estimate[order, place, ..., zero] = estimate_s + step_s
                bound[order, place, ..., zero] = bound_s + step_s
    return GridTimes(estimate, bound)


def _estimate(schedule: str, model_chunks: int, grid: StrategyGrid, ops: RankOps, messages: MessageTimes) -> Floats:
    """[B, S, R, Q] seconds of the ops, without a bound's certainty."""
    micro_batches, num_token_slices = _sizes(grid)
    slowest, others = of_slowest_and_others(schedule, ops.whole, ops.multiplicity)
    estimate = pipeline_time(
        schedule,
        num_micro_batches=micro_batches,
        num_token_slices=num_token_slices,
        num_model_chunks=float(model_chunks),
        slowest=slowest,
        others=others,
        latency_s=messages.usual * model_chunks,
    )
    if schedule in ONE_STAGE_EACH and model_chunks == 1:
        # The first rank holds no more than P - 1 + S token slices, and waits for one of them to come back.
        back = _back(schedule)
        there_and_back = slowest[FORWARD] + others[FORWARD] + slowest[back] + others[back]
        one = there_and_back / num_token_slices + messages.usual
        rounds = micro_batches * num_token_slices / (grid.pipeline_parallel_size - 1 + num_token_slices)
        estimate = np.maximum(estimate, rounds * one)
    return np.asarray(estimate)


def _bound(schedule: str, model_chunks: int, grid: StrategyGrid, ops: RankOps, messages: MessageTimes) -> Floats:
    """[B, S, R, Q] seconds of the ops that no simulation goes below."""
    micro_batches, num_token_slices = _sizes(grid)
    is_split = schedule in SPLIT_SCHEDULES
    before = ops.before + messages.first[ops.stages]
    each = lower_bound(
        schedule,
        num_micro_batches=micro_batches,
        ops=StageOps(*ops.followed),
        before=StageOps(*before),
        put_off_s=ops.put_off if is_split else 0.0,
    )
    bound = np.maximum(np.max(each, axis=0), micro_batches * messages.busy)
    if schedule in ONE_STAGE_EACH and model_chunks == 1:
        back = _back(schedule)
        waiting = round_trip_bound(
            schedule,
            num_ranks=grid.pipeline_parallel_size,
            num_micro_batches=micro_batches,
            num_token_slices=num_token_slices,
            filling_s=ops.filling[FORWARD],
            there=ops.turning[FORWARD] + messages.last,
            back=ops.turning[back] + messages.last,
            last=StageOps(*ops.whole[:, ops.last]),
            draining_s=before[back, ops.last],
            put_off_s=ops.put_off[ops.last] if is_split else 0.0,
        )
        bound = np.maximum(bound, waiting)
    return np.asarray(bound)


def _sizes(grid: StrategyGrid) -> tuple[Floats, Floats]:
    """Numbers of micro-batches [B, 1, 1, 1], and of token slices [1, S, 1, 1]."""
    micro_batches = grid.num_micro_batches.reshape(-1, 1, 1, 1).astype(float)
    return micro_batches, np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1)


def _back(schedule: str) -> int:
    """The part of a backward that the rank before waits for."""
    return INPUT_GRADIENT if schedule in SPLIT_SCHEDULES else BACKWARD


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
