"""Closed-form prices of a space: an estimate and a lower bound in seconds of every strategy that may fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import StagePartition
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.links import RankGroups
from megatron_terapipe.search.price.stages import LayerCounter
from megatron_terapipe.search.rank.grid_memory import GridMemory
from megatron_terapipe.search.rank.grid_times import OpTables, grid_times
from megatron_terapipe.search.rank.rules import SAME_STAGES, LegalGrid, SearchCounts, layouts, legal_grids
from megatron_terapipe.search.rank.space import Choices, SearchProblem
from megatron_terapipe.search.rank.stage_partition import balanced_partition, layer_times
from megatron_terapipe.search.rank.strategy_grid import Axis, StrategyGrid
from megatron_terapipe.strategy import SOLVED, Strategy

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

FITS = "memory of the devices"
"""Name of the rejection of strategies that need more."""

HEADROOM = "memory kept free (--memory-headroom)"
"""Name of the rejection of strategies that fit the devices, but do not leave the headroom free."""

COARSE_SUMS = "bf16 gradients are added up in fp32 (ZeRO stage 1; fix stage 0 to have it)"
"""Name of the rejection of strategies that add gradients up with fewer digits; `--zero-stage 0` keeps them."""

NEEDS_NO_HOSTS = "token slices wait on hosts only where devices are short of memory"
"""Name of the rejection of strategies with host copies that the devices have no need of."""

EASILY = 0.9
"""Share of the room for a strategy that its memory, by a bound, may take for copies to be of no use."""

ProgressCallback = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and the phase."""


def no_progress(done: int, total: int, phase: str) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class PricedGrid:
    """The strategies of a grid that may win."""

    grid: StrategyGrid
    node_order: int
    partitions: dict[tuple[int, int], StagePartition]
    """Bounds of stages by model chunks and place on the axis `partition`."""
    places: NDArray[np.int64]
    """[n] flat index in the grid of each strategy that may fit the devices."""
    fullness: Floats
    """[n] share of the fullest device that it takes at least; those that leave no headroom free cannot win."""
    estimate: Floats
    """[n] seconds in closed form."""
    bound: Floats
    """[n] seconds at least."""

    def strategy(self, index: int, problem: SearchProblem) -> Strategy:
        """Return a strategy, with its stage partition."""
        place = tuple(int(each) for each in np.unravel_index(self.places[index], self.grid.shape))
        strategy = self.grid.strategy(place, problem)
        if self.grid.partition[place[1]] == SOLVED:
            bounds = self.partitions[strategy.num_model_chunks, place[1]].bounds
            strategy = replace(strategy, stage_partition=bounds)
        return strategy


def price_space(
    problem: SearchProblem,
    choices: Choices,
    pricings: Sequence[Pricing],
    counts: SearchCounts,
    progress: ProgressCallback = no_progress,
) -> Iterator[PricedGrid]:
    """Yield the prices of all strategies that keep the rules, on every node order of `pricings`, a grid at a time.

    Arrays of a grid have the shape [micro-batch sizes, token slices, ...] of its `StrategyGrid`.
    """
    tables = _tables(pricings, choices)
    total = len(layouts(choices, problem.cluster.num_devices))
    for number, found in enumerate(legal_grids(problem, choices, counts)):
        progress(number, total, "closed form")
        flags = np.zeros((4, *found.grid.shape), dtype=bool)
        memory = GridMemory(found.grid, pricings[0].memory_model)
        for order, (pricing, table) in enumerate(zip(pricings, tables, strict=True)):
            priced, of_order = _price(problem, found, order, pricing, table, memory)
            flags |= of_order
            if priced is not None:
                yield priced
        different, fitting, roomy, helped = flags
        counts.reject(SAME_STAGES, int((found.legal & ~different).sum()))
        counts.reject(FITS, int((different & ~fitting).sum()))
        counts.reject(HEADROOM, int((fitting & ~roomy).sum()))
        fine = keeps_digits(found.grid, problem.precision)
        counts.reject(COARSE_SUMS, int((roomy & ~fine).sum()))
        counts.reject(NEEDS_NO_HOSTS, int((roomy & fine & ~helped).sum()))
        for zero, row in enumerate(found.grid.rows):
            counts.variants[row] += int((roomy & fine & helped)[..., zero].sum())
        counts.priced += int(different.sum())


def keeps_digits(grid: StrategyGrid, precision: str) -> Flags:
    """Return which ZeRO stages of a grid add gradients up as exactly as any stage of it: [zero].

    DeepSpeed adds up bf16 gradients in fp32 only under ZeRO 1 (`megatron_terapipe/training/deepspeed_config.py`).
    """
    stages = [stage for stage, _ in grid.zero]
    coarse = precision == "bf16" and 1 in stages
    return np.array([not coarse or stage == 1 for stage in stages])


def _tables(pricings: Sequence[Pricing], choices: Choices) -> list[OpTables]:
    """Return the prices of layers for every node order; orders with equal efficiencies and op times share them."""
    tables: list[OpTables] = []
    for pricing in pricings:
        model = pricing.cost_model
        same = (
            found
            for found, other in zip(tables, pricings, strict=False)
            if (model.efficiency, model.op_times) == (other.cost_model.efficiency, other.cost_model.op_times)
        )
        tables.append(next(same, None) or OpTables(model, choices["micro_batch_size"]))
    return tables


def _price(
    problem: SearchProblem, found: LegalGrid, order: int, pricing: Pricing, tables: OpTables, memory: GridMemory
) -> tuple[PricedGrid | None, Flags]:
    """Return the strategies of a grid that fit; [4, grid] which differ, fit, fit with headroom, and `_helped`."""
    grid = found.grid
    cost_model = pricing.cost_model
    groups = cost_model.groups_of(grid.layout)
    partitions = _partitions(problem, found, groups, tables, cost_model.counter)
    layout = grid.layout
    sizes = layout.pipeline_parallel_size, layout.tensor_parallel_size, layout.expert_parallel_size
    counts = {key: cost_model.counter.count(partition, *sizes) for key, partition in partitions.items()}
    # Pairs of a schedule and a rule that have a stage partition of their own.
    own = [
        [(model_chunks, place) in partitions for place in range(len(grid.partition))] for _, model_chunks in grid.order
    ]
    legal = found.legal & grid.along(("order", "partition"), own)
    fullness = memory.fullness(groups, counts, only_possible=True)
    fits, roomy = legal & (fullness <= 1), legal & (fullness <= 1 - problem.memory_headroom)
    if not fits.any():
        return None, np.stack([legal, fits, roomy, fits])
    helped = _helped(grid, fullness <= EASILY * (1 - problem.memory_headroom))
    estimate, bound = grid_times(grid, groups, cost_model, tables, counts, pairs=_pairs(fits))
    places = np.flatnonzero(fits & helped & keeps_digits(grid, problem.precision))
    of_places = fullness.ravel()[places], estimate.ravel()[places], bound.ravel()[places]
    priced = PricedGrid(grid, order, partitions, places, *of_places) if len(places) else None
    return priced, np.stack([legal, fits, roomy, helped])


def _helped(grid: StrategyGrid, easily: Flags) -> Flags:
    """[grid] which strategies need their host copies: without them the same strategy has not easily room.

    Copies take no time off any op. Where flags only allow offload, there is no plain strategy to compare with.

    Args:
        easily: [grid] which strategies have.
    """
    helped = np.ones(grid.shape, dtype=bool)
    without = {mode: place for place, (mode, offload) in enumerate(grid.recompute) if not offload}
    for place, (mode, offload) in enumerate(grid.recompute):
        if offload and mode in without:
            helped[:, :, :, :, place] = ~easily[:, :, :, :, without[mode]]
    return helped


def _pairs(flags: Flags) -> Flags:
    """[O, P] whether any strategy with a schedule and a partition is flagged."""
    return np.asarray(flags.any(axis=(2, 3, 4, 5, 6)))


def _partitions(
    problem: SearchProblem, legal: LegalGrid, groups: RankGroups, tables: OpTables, counter: LayerCounter
) -> dict[tuple[int, int], StagePartition]:
    """Return the stages of every pair of model chunks and partition rule that a legal strategy has."""
    grid = legal.grid
    ranks = grid.layout.pipeline_parallel_size
    pairs = _pairs(legal.legal)
    found: dict[tuple[int, int], StagePartition] = {}
    times: Floats | None = None
    axes: tuple[Axis, ...] = ("micro_batch", "token_slices", "recompute", "sequence_parallel")
    one_value: dict[str, Any] = {axis: getattr(grid, axis)[:1] for axis in axes}
    for model_chunks in dict.fromkeys(model_chunks for _, model_chunks in grid.order):
        rows = [row for row, (_, its_model_chunks) in enumerate(grid.order) if its_model_chunks == model_chunks]
        for place, rule in enumerate(grid.partition):
            if not pairs[rows, place].any():
                continue
            if rule == SOLVED:
                if times is None:
                    times = layer_times(counter, replace(grid, **one_value), groups, tables)
                micro_batches = int(grid.num_micro_batches.max())
                partition = balanced_partition(problem, times, ranks, model_chunks, micro_batches)
                if all(key[0] != model_chunks or partition != other for key, other in found.items()):
                    found[model_chunks, place] = partition
            else:
                found[model_chunks, place] = problem.partition(rule, ranks * model_chunks)
    return found
