"""Ops of the pipeline ranks of a grid's strategies: whole micro-batches, and the token slices that bounds follow.

    counts of layers [ranks, K]  x  table of ops [parts, K, B, S, R, Q]  ->  ops of each rank [parts, ranks, B, S, R, Q]

Ranks with the same layers, device and links are the same row, so there are few of them however long the pipeline is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.layer_counts import LayerCounts
from megatron_terapipe.search.cost.links.rank_groups import RankGroups
from megatron_terapipe.search.cost.stage_ops import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    on_slowest_device,
    stage_ops,
)
from megatron_terapipe.search.rank.grid.op_tables import OpTable
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class RankOps:
    """Ops of one micro-batch of the different rows of ranks.

    A bound follows each row's last rank, because the first token slice passes most stages before it; with several model
    chunks it also follows the last stage alone, which comes after all others. These are the N *followed* ones.
    """

    whole: Floats
    """[4, rows, B, S, R, Q] seconds of all token slices."""
    multiplicity: Floats
    """[rows] ranks that each row stands for."""
    first: int
    """Row of the first rank."""
    last: int
    """Row of the last rank."""
    completing: Floats
    """[4, B, S, R, Q] of the first token slice in the first stage, whose backward completes the gradients of the first
    rank; of two devices, the slower one."""
    stages: Whole
    """[N] stage at which each of the followed begins."""
    followed: Floats
    """[4, N, B, S, R, Q] seconds of all token slices."""
    before: Floats
    """[4, N, B, S, R, Q] of the first token slice on all stages before, at least."""
    filling: Floats
    """[4, B, S, R, Q] of all token slices but the last on the first stage, at least."""
    turning: Floats
    """[4, B, S, R, Q] of the last token slice on all stages, at least."""
    put_off: Floats
    """[N, B, S, R, Q] seconds of weight gradients that zero-bubble leaves for the end, at most."""


def rank_ops(
    grid: StrategyGrid,
    groups: RankGroups,
    of_kind: Sequence[Sequence[OpTable]],
    counts: LayerCounts,
    op_s: float,
) -> RankOps:
    """Return the ops of the ranks of a stage partition.

    Args:
        of_kind: times of layers, for each kind of ranks on each of its devices.
    """
    per_rank, ranks, num_stages = counts.per_rank, len(counts.parameters), len(counts.per_stage)
    token_slices = np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1)
    row_of_rank = np.empty(ranks, np.int64)
    whole, longest = [], []
    multiplicity: list[int] = []
    for kind, tables in zip(groups.kinds, of_kind, strict=True):
        rows, places = _different(per_rank[kind.ranks])
        row_of_rank[kind.ranks] = places + len(multiplicity)
        per_device = [stage_ops(rows, table.whole) for table in tables]
        whole.append(on_slowest_device(per_device, [ops[FORWARD] + ops[BACKWARD] for ops in per_device]))
        longest.append(np.maximum.reduce([stage_ops(rows, table.longest)[WEIGHT_GRADIENT] for table in tables]))
        multiplicity += np.bincount(places).tolist()
    rows_whole = np.concatenate(whole, axis=1) + op_s * (num_stages // ranks) * token_slices
    rank_of_row = np.zeros(len(multiplicity), np.int64)
    rank_of_row[row_of_rank] = np.arange(ranks)  # the last one of each row stays
    stages, followed = rank_of_row, rows_whole
    if num_stages > ranks:
        last_tables = next(
            tables for kind, tables in zip(groups.kinds, of_kind, strict=True) if ranks - 1 in kind.ranks
        )
        alone = [stage_ops(counts.per_stage[-1:], table.whole) for table in last_tables]
        last_stage = on_slowest_device(alone, [ops[FORWARD] + ops[BACKWARD] for ops in alone]) + op_s * token_slices
        stages, followed = np.append(stages, num_stages - 1), np.concatenate([followed, last_stage], axis=1)
    behind = stages[: len(multiplicity)].reshape(-1, 1, 1, 1, 1) + 1.0
    some = np.minimum(
        behind % token_slices * (np.concatenate(longest) + op_s),
        rows_whole[WEIGHT_GRADIENT],
    )
    put_off = behind // token_slices * rows_whole[WEIGHT_GRADIENT] + some
    (first,) = (tables for kind, tables in zip(groups.kinds, of_kind, strict=True) if kind.ranks[0] == 0)
    completing = np.maximum.reduce([stage_ops(counts.per_stage[:1], table.first)[:, 0] for table in first])
    filling = np.minimum.reduce([stage_ops(counts.per_stage[:1], table.whole - table.last)[:, 0] for table in first])
    everything = np.array([num_stages])
    return RankOps(
        whole=rows_whole,
        multiplicity=np.array(multiplicity, dtype=float),
        first=int(row_of_rank[0]),
        last=int(row_of_rank[-1]),
        completing=np.asarray(completing) + op_s,
        stages=stages,
        followed=followed,
        before=_passed(groups, [[table.first for table in tables] for tables in of_kind], counts, stages, op_s),
        filling=filling + op_s * (token_slices - 1),
        turning=_passed(groups, [[table.last for table in tables] for tables in of_kind], counts, everything, op_s)[
            :, 0
        ],
        put_off=put_off,
    )


def _different(counts: Floats) -> tuple[Floats, Whole]:
    """The different rows of [n, K] counts, and [n] which of them each row is."""
    numbers: dict[bytes, int] = {}
    places = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in counts], dtype=np.int64)
    _, first = np.unique(places, return_index=True)
    return counts[first], places


def _passed(
    groups: RankGroups, of_kind: Sequence[Sequence[Floats]], counts: LayerCounts, stages: Whole, op_s: float
) -> Floats:
    """[4, n, B, S, R, Q] seconds of one token slice on all stages before each of [n] stages, at least."""
    rank_of_stage = np.arange(len(counts.per_stage)) % len(counts.parameters)
    parts = []
    for kind, tables in zip(groups.kinds, of_kind, strict=True):
        own = np.where(np.isin(rank_of_stage, kind.ranks)[:, None], counts.per_stage, 0.0)
        passed = np.concatenate([np.zeros((1, own.shape[1])), np.cumsum(own, axis=0)])[stages]
        # A bound must not count on the slower one of two devices.
        parts.append(np.minimum.reduce([stage_ops(passed, table) for table in tables]))
    return np.asarray(sum(parts[1:], start=parts[0]) + op_s * stages.reshape(-1, 1, 1, 1, 1))
