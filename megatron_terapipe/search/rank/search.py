"""The best strategies of a space.

    all --rules--> legal --bytes at least--> may fit --seconds in closed form--> may win --simulated--> ranked --refined

A strategy that fits the devices without the headroom cannot win. The fastest of these is found, to show the cost of the
headroom.

The strategies with the lowest estimates are simulated first, then those with the lowest bounds. A strategy whose lower
bound is above the last of the ranking is never simulated. If the effort does not suffice for all others, the
result has the share of time that the best of those could save. Lengths of token slices, layers of stages and the order
of nodes are then solved for the best (`refined`). The same question always has the same answer.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.stages import pipeline_shape
from megatron_terapipe.search.rank.grid_prices import (
    FITS,
    HEADROOM,
    PricedGrid,
    ProgressCallback,
    no_progress,
    price_space,
)
from megatron_terapipe.search.rank.grid_times import OpTables
from megatron_terapipe.search.rank.node_orders import better_order, node_orders, placement_of
from megatron_terapipe.search.rank.ranked import Ranked, contenders_of, priced, ranked_in_order, without_repetitions
from megatron_terapipe.search.rank.rules import SearchCounts
from megatron_terapipe.search.rank.space import Choices, SearchProblem
from megatron_terapipe.search.rank.stage_partition import balanced_partition, layer_times
from megatron_terapipe.search.rank.strategy_grid import StrategyGrid
from megatron_terapipe.strategy import SOLVED, Strategy

__all__ = ["SearchResult", "search"]

MOST_CUTS = 3  # strategies whose token slices are solved for with effort 1
MOST_ORDERS = 24  # node orders that are tried for the winner with effort 1


def refined(
    entries: Sequence[Ranked],
    problem: SearchProblem,
    choices: Choices,
    pricing_on: Callable[[Cluster], Pricing],
    *,
    top: int,
    effort: float = 1.0,
    progress: ProgressCallback = no_progress,
) -> list[Ranked]:
    """Return improvements of the best strategies that leave the headroom free. Flags stay fixed."""
    found: list[Ranked] = []

    def keep(entry: Ranked | None) -> None:
        if entry is not None:
            found.append(entry)

    best = ranked_in_order(without_repetitions(entries, problem.workload.seq_length))[:top]
    tried = list(_worth_cutting(best, problem, choices))[: max(1, round(MOST_CUTS * effort))]
    for number, entry in enumerate(tried):
        progress(number, len(tried), "token slices")
        pricing = pricing_on(entry.cluster_in_order or problem.cluster)
        keep(_with_solved_cut(entry, problem, pricing, choices))
    if SOLVED in choices["stage_partition"]:
        for entry in ranked_in_order(without_repetitions([*best, *found], problem.workload.seq_length))[:top]:
            keep(_with_solved_stages(entry, problem, pricing_on(entry.cluster_in_order or problem.cluster)))
    if len({node.device for node in problem.cluster.nodes}) > 1 or not problem.cluster.is_uniform:
        progress(0, 1, "order of nodes")
        winner = ranked_in_order([*best, *found])[0]
        keep(_with_better_order(winner, problem, pricing_on, round(MOST_ORDERS * effort)))
    return found


def _worth_cutting(best: Sequence[Ranked], problem: SearchProblem, choices: Choices) -> Iterator[Ranked]:
    """Yield the strategies whose cut may be improved: one of each that differ in more than their cut."""
    if (
        not problem.workload.can_cut_tokens
        or choices.values.get("token_slices") is not None
        or choices["num_token_slices"] == (1,)
    ):
        return
    seen: set[Strategy] = set()
    for entry in best:
        uncut = replace(entry.strategy, num_token_slices=1, token_slices=None)
        if entry.strategy.pipeline_parallel_size > 1 and uncut not in seen:
            seen.add(uncut)
            yield entry


def _with_solved_cut(entry: Ranked, problem: SearchProblem, pricing: Pricing, choices: Choices) -> Ranked | None:
    # The solver compiles its kernels, and not every search needs it.
    from megatron_terapipe.search.rank.token_slices import solve_cut

    strategy = entry.strategy
    counts = sorted({strategy.num_token_slices} & set(choices["num_token_slices"]) - {1})
    if not counts:
        return None
    try:
        solved = solve_cut(pricing.cost_model, strategy, counts=counts)
    except (ConfigError, PlanError):
        return None  # a schedule without room for more: the strategy stays as it is
    cut = replace(strategy, num_token_slices=len(solved.token_slices), token_slices=solved.token_slices)
    return priced(cut, pricing, problem.memory_headroom)


def _with_solved_stages(entry: Ranked, problem: SearchProblem, pricing: Pricing) -> Ranked | None:
    """Return the strategy with stages that balance the times of its own layers; None if they are the same."""
    strategy, model = entry.strategy, pricing.cost_model
    if strategy.num_stages == 1:
        return None
    tables = OpTables(model, (strategy.micro_batch_size,))
    times = layer_times(model.counter, StrategyGrid.of_strategy(strategy), model.groups(strategy), tables)
    partition = balanced_partition(
        problem, times, strategy.pipeline_parallel_size, strategy.num_model_chunks, strategy.num_micro_batches
    )
    if partition == problem.partition(strategy.stage_partition, strategy.num_stages):
        return None
    return priced(replace(strategy, stage_partition=partition.bounds), pricing, problem.memory_headroom)


def _with_better_order(
    winner: Ranked, problem: SearchProblem, pricing_on: Callable[[Cluster], Pricing], evaluations: int
) -> Ranked | None:
    def on(cluster: Cluster) -> Ranked | None:
        return priced(winner.strategy, pricing_on(cluster), problem.memory_headroom)

    def score(cluster: Cluster) -> float:
        found = on(cluster)
        return float("inf") if found is None else found.iteration_time_s

    start = winner.cluster_in_order or problem.cluster
    ordered = better_order(start, score, evaluations=max(evaluations, 2))
    return None if ordered == start else on(ordered)


MOST_STRATEGIES = 200  # strategies that are simulated with effort 1
MOST_OPS = 400_000  # ops of new schedules that are generated with effort 1; one takes some microseconds
OPS_OF_ONE = 8_000  # ops of a schedule that are generated at most; `price/simulated_time.py` extrapolates the rest
MOST_LAYOUTS = 6  # layouts with a contender in addition to those of the best strategies
OF_A_LAYOUT = 4  # strategies of each of them that are simulated
CONTENDS = 1.3  # closed form of a contender, in seconds of the winner, at most
MOST_TOO_FULL = 8  # strategies without headroom that are simulated, to find the fastest of them
ROUNDING = 1e-9  # relative difference below which two times are the same


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The answer to a problem."""

    entries: tuple[Ranked, ...]
    counts: SearchCounts
    """How many were rejected, by reason."""
    proven: bool
    """Whether no other strategy of the space can be faster than the winner, under this model."""
    could_save: float
    """Share of the winner's time that the most promising strategy left out could save at most."""
    refused: tuple[Ranked, ...] = ()
    """Strategies that looked good in closed form and need too much memory on their schedule, a few."""
    too_full: Ranked | None = None
    """The fastest found that fits the devices without the headroom, if it is faster than the winner."""
    contenders: tuple[Ranked, ...] = ()
    """The winner, and the best of other layouts and schedules."""


def search(
    problem: SearchProblem,
    choices: Choices,
    pricing_on: Callable[[Cluster], Pricing],
    *,
    top: int = 10,
    effort: float = 1.0,
    refine: bool = True,
    other_layouts: bool = False,
    progress: ProgressCallback = no_progress,
) -> SearchResult:
    """Return the best strategies."""
    counts = SearchCounts()
    pricings = [pricing_on(cluster) for cluster in node_orders(problem.cluster)]
    grids = list(price_space(problem, choices, pricings, counts, progress))
    contest = _Contest(problem, pricings, grids, counts, top)
    contest.simulate(effort, progress)
    entries = contest.ranked
    if refine and entries:
        entries = [*entries, *refined(entries, problem, choices, pricing_on, top=top, effort=effort, progress=progress)]
    everything = ranked_in_order(without_repetitions(entries, problem.workload.seq_length))
    ordered = everything[:top]
    left = contest.lowest_bound_left
    best_s = ordered[0].iteration_time_s if ordered else np.inf
    could_save = max(0.0, 1 - left / best_s) if ordered and np.isfinite(left) else 0.0
    too_full = contest.fastest_too_full(best_s)
    others = contest.best_of_other_layouts(best_s) if other_layouts else []
    contenders = contenders_of(
        ranked_in_order(without_repetitions([*everything, *others], problem.workload.seq_length))
    )
    return SearchResult(
        entries=tuple(_in_hostfile_order(entry, problem.cluster) for entry in ordered),
        counts=counts,
        proven=could_save <= ROUNDING,
        could_save=could_save,
        refused=tuple(contest.refused),
        contenders=tuple(_in_hostfile_order(entry, problem.cluster) for entry in contenders),
        too_full=None if too_full is None else _in_hostfile_order(too_full, problem.cluster),
    )


class _Contest:
    """Simulates strategies until none of the remaining ones can be among the best."""

    def __init__(
        self, problem: SearchProblem, pricings: list[Pricing], grids: list[PricedGrid], counts: SearchCounts, top: int
    ) -> None:
        self._problem, self._pricings, self._grids = problem, pricings, grids
        self._counts, self._top = counts, top

        def joined(name: str, dtype: type) -> NDArray[Any]:
            """[n] an attribute of all grids."""
            return np.concatenate([np.zeros(0, dtype), *(getattr(grid, name) for grid in grids)])

        self._estimate, self._bound = joined("estimate", float), joined("bound", float)
        self._roomy = joined("roomy", bool)
        self._too_full: list[int] = np.flatnonzero(~self._roomy).tolist()
        """Places of the strategies that fit the devices, but do not leave the headroom free."""
        self._first = np.cumsum([0, *(len(grid.places) for grid in grids)])
        self._shapes: set[tuple[str, PipelineShape]] = set()
        self._ops = 0.0
        self._done = 0
        self.ranked: list[Ranked] = []
        self.refused: list[Ranked] = []
        self._times_s: list[float] = []
        self._to_beat_s = np.inf
        """Seconds of the slowest of the current best strategies."""
        self.lowest_bound_left = np.inf
        """Lower bound in seconds of all strategies that were not simulated."""

    def simulate(self, effort: float, progress: ProgressCallback) -> None:
        """Simulate until no strategy left can be among the best, or the effort is spent.

        Half of the effort goes to the lowest estimates, which are mostly the best. The other half goes to the lowest
        bounds: none of the remaining strategies could save much.
        """
        most, ops = max(int(MOST_STRATEGIES * effort), self._top), MOST_OPS * effort
        left = self._by_estimate(np.flatnonzero(self._roomy))
        for share in (0.5, 1.0):
            left = self._simulate_some(left, max(int(most * share), self._top), ops * share, progress)
            left.sort(key=self._bound.__getitem__)
        self.lowest_bound_left = float(self._bound[left[0]]) if left else np.inf

    def _simulate_some(self, places: list[int], most: int, ops: float, progress: ProgressCallback) -> list[int]:
        """Simulate candidates in this order; return the rest after so many strategies or new ops."""
        left = []
        for index in places:
            if self._bound[index] >= self._to_beat_s * (1 - ROUNDING):
                continue
            spent = self._ops >= ops and len(self.ranked) >= self._top
            if self._done >= most or spent:
                left.append(index)
                continue
            progress(self._done, most, "simulated")
            self._done += 1
            self._simulate(index)
        return [index for index in left if self._bound[index] < self._to_beat_s * (1 - ROUNDING)]

    def fastest_too_full(self, to_beat_s: float) -> Ranked | None:
        """Return the fastest of a few promising strategies that fit without headroom; None if none is faster."""
        fastest, simulated = None, 0
        for index in self._by_estimate(np.array(sorted(self._too_full), dtype=np.int64)):
            if simulated >= MOST_TOO_FULL:
                break
            if self._bound[index] >= to_beat_s * (1 - ROUNDING):
                continue
            simulated += 1
            found = priced(*self._at(index))
            if found is not None and found.iteration_time_s < to_beat_s * (1 - ROUNDING):
                to_beat_s, fastest = found.iteration_time_s, found
        return fastest

    def best_of_other_layouts(self, best_s: float) -> list[Ranked]:
        """Return the fastest of the most promising strategies of a few layouts of which none was simulated."""
        known = {entry.strategy.layout for entry in self.ranked}
        lowest = []
        for grid, first in zip(self._grids, self._first, strict=False):
            places = np.flatnonzero(grid.roomy)
            if len(places):
                places = places[np.argsort(grid.estimate[places], kind="stable")[:OF_A_LAYOUT]]
                lowest.append((float(grid.estimate[places[0]]), (int(first) + places).tolist()))
        found: list[Ranked] = []
        for estimate, indices in sorted(lowest):
            if len(found) >= MOST_LAYOUTS or estimate > CONTENDS * best_s:
                break
            layout = self._at(indices[0])[0].layout
            if layout not in known:
                known.add(layout)
                entries = (priced(*self._at(index), self._problem.memory_headroom) for index in indices)
                found += ranked_in_order(filter(None, entries))[:1]
        return found

    def _by_estimate(self, places: NDArray[np.int64]) -> list[int]:
        """Return places in the order of their estimates; equal ones in the order of the space."""
        if not len(places):
            return []
        estimate = self._estimate[places]
        return list(places[np.argsort(np.round(estimate / estimate.min(), 10), kind="stable")].tolist())

    def _at(self, index: int) -> tuple[Strategy, Pricing]:
        """Return the strategy at a place among all grids, and the pricing of its node order."""
        owner = int(np.searchsorted(self._first, index, side="right")) - 1
        grid = self._grids[owner]
        return grid.strategy(int(index - self._first[owner]), self._problem), self._pricings[grid.node_order]

    def _simulate(self, index: int) -> None:
        strategy, pricing = self._at(index)
        memory = pricing.memory(strategy)
        reason = pricing.why_it_does_not_fit(strategy, memory)
        if reason is not None:
            self._counts.reject(FITS, 1)
            if len(self.refused) < self._top:
                self.refused.append(Ranked(strategy=strategy, prediction=None, reason=reason))
            return
        if pricing.why_it_does_not_fit(strategy, memory, self._problem.memory_headroom) is not None:
            self._counts.reject(HEADROOM, 1)
            self._too_full.append(index)
            return
        key = (strategy.schedule, pipeline_shape(strategy))
        if key not in self._shapes:
            self._shapes.add(key)
            shape = key[1]
            self._ops += min(2 * shape.num_stages * shape.num_micro_batches * shape.num_token_slices, OPS_OF_ONE)
        self._counts.simulated += 1
        prediction = pricing.predict(strategy, memory)
        self.ranked.append(Ranked(strategy=strategy, prediction=prediction, cluster_in_order=pricing.cluster))
        insort(self._times_s, prediction.iteration_time_s)
        if len(self._times_s) >= self._top:
            self._to_beat_s = self._times_s[self._top - 1]


def _in_hostfile_order(entry: Ranked, cluster: Cluster) -> Ranked:
    """Return the entry with the placement of its ranks in the cluster of the problem."""
    ordered = entry.cluster_in_order
    if ordered is None:
        return entry
    placement = placement_of(ordered, cluster, entry.strategy.world_size)
    if placement is None:
        return replace(entry, cluster_in_order=None)
    return replace(entry, strategy=replace(entry.strategy, placement=placement))
