"""The best strategies of a space.

    all --rules--> legal --bytes at least--> may fit --seconds in closed form--> may win --simulated--> ranked --cuts

A strategy that fits the devices without the headroom cannot win. The fastest of these is found, to show the cost of the
headroom.

A row of the ranking is a layout of the ranks (data, tensor, pipeline, sequence, experts) with its best variant, or, on
request, a strategy. Strategies with the lowest estimates are simulated first, then those with the lowest bounds. A
strategy with a lower bound above the fastest is simulated only for its row: if its bound is below the last row and the
best of its own, and at most `OF_A_ROW` of a row. Then `LEANER` variants of each row are simulated that are nearly as
fast by their estimate and take less memory by its bound (`Ranked.sort_key`). If the effort does not suffice for all
that may win, the result has the share of time that the best of those could save. For the best, lengths of token slices
are then solved (`with_solved_cuts`). The same question always has the same answer.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log1p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Prediction, Pricing
from megatron_terapipe.search.price.stages import pipeline_shape
from megatron_terapipe.search.rank.grid_prices import (
    FITS,
    HEADROOM,
    PricedGrid,
    price_space,
)
from megatron_terapipe.search.rank.node_orders import node_orders, placement_of
from megatron_terapipe.search.rank.rules import ProgressCallback, SearchCounts, broken_rule, no_progress
from megatron_terapipe.search.rank.space import Choices, Row, SearchProblem
from megatron_terapipe.strategy import DIMENSIONS, Strategy

__all__ = ["Ranked", "SearchResult", "predict_one", "ranked_in_order", "search"]


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A strategy, its price and its place."""

    strategy: Strategy
    prediction: Prediction | None
    """Its cost; None where it cannot be priced."""
    reason: str | None = None
    """Why it cannot run; None if it can."""
    rank: int = 0
    """1 for the best; those that would not run come last."""
    cluster_in_order: Cluster | None = None
    """The nodes in the order of the hostfile with which ranks are on their `placement`; None = the cluster's order."""
    index: int = 0
    """Place in the file of strategies, from 0."""
    variants: int | None = None
    """Strategies of its layout that can run, by their closed form; None = each has a row of its own."""

    @property
    def feasible(self) -> bool:
        """Whether it can run."""
        return self.reason is None

    @property
    def price(self) -> Prediction:
        """The prediction of a strategy that could be priced."""
        assert self.prediction is not None
        return self.prediction

    @property
    def row(self) -> Row:
        """Row of a ranking."""
        return self.strategy.layout, self.strategy.zero_shard_size

    @property
    def iteration_time_s(self) -> float:
        """Seconds of an iteration of a strategy that could be priced."""
        return self.price.iteration_time_s

    def sort_key(self, fastest_s: float) -> tuple[Any, ...]:
        """Key that sorts the feasible first, then by time and memory in steps of `NEARLY_AS_FAST`, time and simplicity.

        Args:
            fastest_s: seconds of the fastest, from which steps are counted; 0 = times are compared exactly.
        """
        found = self.prediction
        if found is None:
            return (not self.feasible, True, inf, 0, inf, inf, simplicity(self.strategy))
        # Differences that floating point makes are none: sums of the same terms in another order.
        time_s = float(f"{found.iteration_time_s:.10g}")
        step = time_s if not fastest_s else time_step(time_s / float(f"{fastest_s:.10g}"))
        peak = found.peak_memory_bytes
        return (not self.feasible, False, step, memory_step(peak), time_s, peak, simplicity(self.strategy))


NEARLY_AS_FAST = 0.01  # relative difference of times, then of peaks of memory, below which the next key decides


def time_step(ratio: Any) -> Any:
    """Return the step of a time, in seconds of the fastest: 0 for those that are nearly as fast; for arrays."""
    return np.floor(np.log(ratio) / log1p(NEARLY_AS_FAST) + 1e-6)


def memory_step(peak: Any) -> Any:
    """Return the step of a peak of memory; for arrays."""
    return np.floor(np.log(np.maximum(peak, 1e-9)) / log1p(NEARLY_AS_FAST))


def simplicity(strategy: Strategy) -> tuple[Any, ...]:
    """Return the tie-break key: smaller for the simpler of two strategies, and different for any two."""
    by_place = sorted(DIMENSIONS, key=lambda each: each.tie)
    return tuple(each.tie_key_of(getattr(strategy, each.name)) for each in by_place)


def first_of_each(entries: Iterable[Ranked], key: Callable[[Ranked], object]) -> list[Ranked]:
    """Return the first entry with each key."""
    found: dict[object, Ranked] = {}
    for entry in entries:
        found.setdefault(key(entry), entry)
    return list(found.values())


def ranked_in_order(entries: Iterable[Ranked]) -> list[Ranked]:
    """Return the entries numbered from 1, best first. The same entries in any order give the same ranking."""
    found = list(entries)
    fastest_s = min((each.iteration_time_s for each in found if each.feasible and each.prediction), default=0.0)
    ordered = sorted(found, key=lambda entry: entry.sort_key(fastest_s))
    return [replace(entry, rank=rank) for rank, entry in enumerate(ordered, start=1)]


def all_in_order(entries: Iterable[Ranked], seq_length: int) -> list[Ranked]:
    """Return the strategies numbered from 1, best first, each once, whatever its node order or spelling of its cut."""

    def same(entry: Ranked) -> Strategy:
        return replace(entry.strategy, placement=None, token_slices=entry.strategy.cut(seq_length).lengths)

    return ranked_in_order(first_of_each(sorted(entries, key=lambda entry: entry.sort_key(0.0)), same))


def best_of_layouts(entries: Iterable[Ranked], seq_length: int) -> list[Ranked]:
    """Return the best entry of each layout, numbered from 1, best first."""
    found = first_of_each(all_in_order(entries, seq_length), lambda entry: entry.row)
    return [replace(entry, rank=rank) for rank, entry in enumerate(found, start=1)]


MOST_CONTENDERS = 14  # strategies that a constant of the cost model may make the winner


def contenders_of(ranked: Iterable[Ranked]) -> list[Ranked]:
    """Return the first and those that differ from all before in layout, schedule or recomputation."""
    different = first_of_each(ranked, lambda entry: (entry.row, entry.strategy.schedule, entry.strategy.recompute))
    return different[:MOST_CONTENDERS]


def priced(strategy: Strategy, pricing: Pricing, headroom: float = 0.0) -> Ranked | None:
    """Return a strategy with its price on a node order; None if it does not leave this share of memory free."""
    memory = pricing.memory(strategy)
    if pricing.why_it_does_not_fit(strategy, memory, headroom) is not None:
        return None
    return Ranked(strategy=strategy, prediction=pricing.predict(strategy, memory), cluster_in_order=pricing.cluster)


def with_batch(strategy: Strategy, global_batch_size: int | None) -> Strategy:
    """Return the strategy with a batch, if it has none itself and this one can be dealt evenly."""
    if strategy.global_batch_size is not None or global_batch_size is None:
        return strategy
    if global_batch_size % (strategy.micro_batch_size * strategy.data_parallel_size):
        return strategy
    return replace(strategy, global_batch_size=global_batch_size)


def predict_one(strategy: Strategy, problem: SearchProblem, pricing: Pricing, index: int = 0) -> Ranked:
    """Return a strategy with its price, and the reason if it cannot run."""
    entry = Ranked(strategy=strategy, prediction=None, index=index)
    try:
        reason = broken_rule(strategy, problem)
        if reason is not None:
            return replace(entry, reason=reason)
        prediction = pricing.predict(strategy)
        reason = pricing.why_it_does_not_fit(strategy, prediction.memory)
    except (ConfigError, PlanError) as error:
        return replace(entry, reason=str(error).removeprefix("strategy: "))
    return replace(entry, prediction=prediction, reason=reason)


Places = NDArray[np.int64]
"""Places of strategies among all grids."""

MOST_CUTS = 3  # strategies whose token slices are solved for with effort 1


def with_solved_cuts(
    best: Sequence[Ranked],
    problem: SearchProblem,
    choices: Choices,
    pricing_on: Callable[[Cluster], Pricing],
    *,
    effort: float = 1.0,
    progress: ProgressCallback = no_progress,
) -> list[Ranked]:
    """Return the best strategies with lengths of token slices that are solved for, where these leave the headroom free.

    Flags stay fixed.
    """
    tried = list(_worth_cutting(best, problem, choices))[: max(1, round(MOST_CUTS * effort))]
    found = []
    for number, entry in enumerate(tried):
        progress(number, len(tried), "token slices")
        pricing = pricing_on(entry.cluster_in_order or problem.cluster)
        found.append(_with_solved_cut(entry, problem, pricing, choices))
    return list(filter(None, found))


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


MOST_STRATEGIES = 200  # strategies that are simulated with effort 1
MOST_OPS = 400_000  # ops of new schedules that are generated with effort 1; one takes some microseconds
OPS_OF_ONE = 8_000  # ops of a schedule that are generated at most; `price/makespan.py` extrapolates the rest
OF_A_ROW = 4  # variants of a row that are simulated although none of them can win
LEANER = 2  # variants of a row that are simulated because they take less memory
AT_ONCE = 1024  # strategies among which the next one that may rank is looked for
MOST_TOO_FULL = 8  # strategies without headroom that are simulated, to find the fastest of them
ROUNDING = 1e-9  # relative difference below which two times are the same


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The answer to a problem."""

    entries: tuple[Ranked, ...]
    counts: SearchCounts
    """How many were rejected, by reason."""
    proven: bool
    """Whether no other strategy of the space can be more than `NEARLY_AS_FAST` faster than the winner."""
    could_save: float
    """Share of the winner's time that the most promising strategy left out could save at most."""
    refused: tuple[Ranked, ...] = ()
    """Strategies that looked good in closed form and need too much memory on their schedule, a few."""
    too_full: Ranked | None = None
    """The fastest found that fits the devices without the headroom, if it is faster than the winner."""
    contenders: tuple[Ranked, ...] = ()
    """The winner, the best of other layouts, and then of other schedules."""


def search(
    problem: SearchProblem,
    choices: Choices,
    pricing_on: Callable[[Cluster], Pricing],
    *,
    top: int = 10,
    effort: float = 1.0,
    refine: bool = True,
    all_variants: bool = False,
    progress: ProgressCallback = no_progress,
) -> SearchResult:
    """Return the best strategies, one of each layout or with `all_variants` all."""
    counts = SearchCounts()
    pricings = [pricing_on(cluster) for cluster in node_orders(problem.cluster)]
    grids = list(price_space(problem, choices, pricings, counts, progress))
    contest = _Contest(problem, pricings, grids, counts, top, all_variants=all_variants)
    contest.simulate(effort, progress)
    entries = contest.ranked
    seq_length = problem.workload.seq_length
    rows = all_in_order if all_variants else best_of_layouts
    if refine and entries:
        best = rows(entries, seq_length)[:top]
        cut = with_solved_cuts(best, problem, choices, pricing_on, effort=effort, progress=progress)
        entries = [*entries, *cut]
    ordered = rows(entries, seq_length)[:top]
    left = contest.lowest_bound_left
    best_s = ordered[0].iteration_time_s if ordered else np.inf
    could_save = max(0.0, 1 - left / best_s) if ordered and np.isfinite(left) else 0.0
    too_full = contest.fastest_too_full(best_s)
    contenders = contenders_of([*best_of_layouts(entries, seq_length)[:top], *all_in_order(entries, seq_length)])
    if not all_variants:
        ordered = [replace(entry, variants=counts.variants[entry.row]) for entry in ordered]
    in_hostfile_order = partial(_in_hostfile_order, cluster=problem.cluster)
    return SearchResult(
        entries=tuple(map(in_hostfile_order, ordered)),
        counts=counts,
        proven=could_save <= 1 - 1 / (1 + NEARLY_AS_FAST),
        could_save=could_save,
        refused=tuple(contest.refused),
        contenders=tuple(map(in_hostfile_order, contenders)),
        too_full=None if too_full is None else in_hostfile_order(too_full),
    )


class _Contest:
    """Simulates strategies until none of the remaining ones can be among the best."""

    def __init__(
        self,
        problem: SearchProblem,
        pricings: list[Pricing],
        grids: list[PricedGrid],
        counts: SearchCounts,
        top: int,
        *,
        all_variants: bool,
    ) -> None:
        self._problem, self._pricings, self._grids = problem, pricings, grids
        self._counts, self._top = counts, top

        def joined(name: str, dtype: type) -> NDArray[Any]:
            """[n] an attribute of all grids."""
            return np.concatenate([np.zeros(0, dtype), *(getattr(grid, name) for grid in grids)])

        self._estimate, self._bound = joined("estimate", float), joined("bound", float)
        self._fullness = joined("fullness", float)
        self._roomy = self._fullness <= 1 - problem.memory_headroom
        self._too_full: list[int] = np.flatnonzero(~self._roomy).tolist()
        """Places of the strategies that fit the devices, but do not leave the headroom free."""
        self._first = np.cumsum([0, *(len(grid.places) for grid in grids)])
        self._shapes: set[tuple[str, PipelineShape]] = set()
        self._ops = 0.0
        self._done = 0
        self._simulated: set[int] = set()
        self.ranked: list[Ranked] = []
        self.refused: list[Ranked] = []
        numbers: dict[Row, int] = {}
        rows = [np.array([numbers.setdefault(row, len(numbers)) for row in grid.grid.rows]) for grid in grids]
        each = (of[grid.places % len(of)] for of, grid in zip(rows, grids, strict=True))
        count = len(self._bound)
        self._row = np.arange(count) if all_variants else np.concatenate([np.zeros(0, dtype=np.int64), *each])
        """[n] number of the row that each strategy is in."""
        self._best_s = np.full(max(count, len(numbers)), np.inf)
        """[rows] seconds of the fastest strategy of each, and its place; infinite where none was simulated."""
        self._fastest = np.zeros(len(self._best_s), dtype=np.int64)
        self._tries = np.zeros(len(self._best_s), dtype=np.int64)
        self._best_of_kind_s: defaultdict[Hashable, float] = defaultdict(lambda: inf)
        """Seconds of the fastest of each row, schedule and recomputation: much slower ones are never shown."""
        self._fastest_s = self._to_beat_s = np.inf
        """Seconds of the first and of the last row of the ranking."""
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
            left = left[np.argsort(self._bound[left], kind="stable")]
        if not self.ranked:
            # None of the fastest fits on its schedule: the emptiest ones may.
            left = left[np.argsort(self._fullness[left], kind="stable")]
            self._done = 0
            while len(left) and not self.ranked and self._done < most:
                self._done += 1
                self._simulate(int(left[0]))
                left = left[1:]
        self.lowest_bound_left = float(self._bound[left].min(initial=np.inf))
        self._simulate_leaner()

    def _simulate_leaner(self) -> None:
        """Simulate variants that may be as fast as the best of their row, and take less memory."""
        memory, fastest_s = memory_step(self._fullness), self._fastest_s
        for row in np.argsort(self._best_s, kind="stable")[: min(self._top, np.isfinite(self._best_s).sum())]:
            variants = np.flatnonzero(self._roomy & (self._row == row))
            as_fast = time_step(self._estimate[variants] / fastest_s) <= time_step(self._best_s[row] / fastest_s)
            variants = variants[as_fast & (memory[variants] < memory[self._fastest[row]])]
            for index in variants[np.lexsort((self._estimate[variants], memory[variants]))][:LEANER].tolist():
                if index not in self._simulated:
                    self._simulate(index)

    def _simulate_some(self, places: Places, most: int, ops: float, progress: ProgressCallback) -> Places:
        """Simulate candidates in this order; return the rest after so many strategies or new ops."""
        left = places[self._may_rank(places)]
        while len(left) and self._done < most and (self._ops < ops or len(self.ranked) < self._top):
            progress(self._done, most, "simulated")
            self._done += 1
            self._simulate(int(left[0]))
            # What may not rank now may never: most of the first ones are passed before all are looked at.
            first = np.flatnonzero(self._may_rank(left[1:AT_ONCE]))
            left = left[1 + first[0] :] if len(first) else left[AT_ONCE:][self._may_rank(left[AT_ONCE:])]
        return left[self._may_rank(left)]

    def _may_rank(self, places: Places) -> NDArray[np.bool_]:
        """Whether strategies may be the fastest, or else their rows in the ranking and much faster than so far."""
        rows = self._row[places]
        to_beat_s: Any = self._to_beat_s
        if self._fastest_s < to_beat_s:
            of_row_s = np.where(self._tries[rows] < OF_A_ROW, self._best_s[rows] / (1 + NEARLY_AS_FAST), 0.0)
            to_beat_s = np.maximum(self._fastest_s, np.minimum(of_row_s, to_beat_s))
        return np.asarray(self._bound[places] < to_beat_s * (1 - ROUNDING))

    def fastest_too_full(self, to_beat_s: float) -> Ranked | None:
        """Return the fastest of a few promising strategies that fit without headroom; None if none is faster."""
        fastest, simulated = None, 0
        for index in self._by_estimate(np.array(sorted(self._too_full), dtype=np.int64)).tolist():
            if simulated >= MOST_TOO_FULL:
                break
            if self._bound[index] >= to_beat_s * (1 - ROUNDING):
                continue
            simulated += 1
            found = priced(*self._at(index))
            if found is not None and found.iteration_time_s < to_beat_s * (1 - ROUNDING):
                to_beat_s, fastest = found.iteration_time_s, found
        return fastest

    def _by_estimate(self, places: Places) -> Places:
        """Return places in the order of their estimates; equal ones in the order of the space."""
        estimate = self._estimate[places]
        return places[np.argsort(np.round(estimate / estimate.min(initial=np.inf), 10), kind="stable")]

    def _at(self, index: int) -> tuple[Strategy, Pricing]:
        """Return the strategy at a place among all grids, and the pricing of its node order."""
        owner = int(np.searchsorted(self._first, index, side="right")) - 1
        grid = self._grids[owner]
        return grid.strategy(int(index - self._first[owner]), self._problem), self._pricings[grid.node_order]

    def _simulate(self, index: int) -> None:
        strategy, pricing = self._at(index)
        memory = pricing.memory(strategy)
        if pricing.why_it_does_not_fit(strategy, memory, self._problem.memory_headroom) is not None:
            refused = Ranked(strategy=strategy, prediction=None, reason=pricing.why_it_does_not_fit(strategy, memory))
            self._counts.reject(HEADROOM if refused.feasible else FITS, 1)
            self._counts.variants[refused.row] -= 1
            if refused.feasible:
                self._too_full.append(index)
            elif len(self.refused) < self._top:
                self.refused.append(refused)
            return
        key = (strategy.schedule, pipeline_shape(strategy))
        if key not in self._shapes:
            self._shapes.add(key)
            shape = key[1]
            self._ops += min(2 * shape.num_stages * shape.num_micro_batches * shape.num_token_slices, OPS_OF_ONE)
        self._counts.simulated += 1
        self._simulated.add(index)
        kind = int(self._row[index]), strategy.schedule, strategy.recompute
        prediction = pricing.predict(strategy, memory, self._best_of_kind_s[kind] * (1 + 1.1 * NEARLY_AS_FAST))
        self._best_of_kind_s[kind] = min(self._best_of_kind_s[kind], prediction.iteration_time_s)
        self.ranked.append(Ranked(strategy=strategy, prediction=prediction, cluster_in_order=pricing.cluster))
        row = self._row[index]
        self._tries[row] += 1
        if prediction.iteration_time_s < self._best_s[row]:
            self._best_s[row], self._fastest[row] = prediction.iteration_time_s, index
            self._fastest_s = min(self._fastest_s, prediction.iteration_time_s)
            if self._top < len(self._best_s):
                self._to_beat_s = float(np.partition(self._best_s, self._top - 1)[self._top - 1])


def _in_hostfile_order(entry: Ranked, cluster: Cluster) -> Ranked:
    """Return the entry with the placement of its ranks in the cluster of the problem."""
    ordered = entry.cluster_in_order
    if ordered is None:
        return entry
    placement = placement_of(ordered, cluster, entry.strategy.world_size)
    if placement is None:
        return replace(entry, cluster_in_order=None)
    return replace(entry, strategy=replace(entry.strategy, placement=placement))
