"""Strategies with their price and their place in a ranking."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf, log1p
from typing import Any

import numpy as np

from deepspeed_ext.plan.errors import PlanError
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.prediction import Prediction
from megatron_terapipe.search.rank.rules import broken_rule
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.search.rank.strategy_grid import Row
from megatron_terapipe.strategy import DIMENSIONS, Strategy

__all__ = ["Ranked", "predict_one", "ranked_in_order"]


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

    variants: int | None = None
    """Strategies of its layout that can run, by their closed form; None = each has a row of its own."""

    def sort_key(self, fastest_s: float) -> tuple[Any, ...]:
        """Key that sorts the feasible first, then by time in steps of `NEARLY_AS_FAST`, memory, traffic and simplicity.

        Args:
            fastest_s: seconds of the fastest, from which steps are counted; 0 = times are compared exactly.
        """
        found = self.prediction
        if found is None:
            return (not self.feasible, True, inf, 0, 0.0, inf, inf, simplicity(self.strategy))
        # Differences that floating point makes are none: sums of the same terms in another order.
        time_s, network_s = float(f"{found.iteration_time_s:.10g}"), float(f"{found.network_s:.6g}")
        step = time_s if not fastest_s else time_step(time_s / float(f"{fastest_s:.10g}"))
        peak = found.peak_memory_bytes
        return (not self.feasible, False, step, memory_step(peak), network_s, time_s, peak, simplicity(self.strategy))


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


def without_repetitions(entries: Iterable[Ranked], seq_length: int) -> list[Ranked]:
    """Return the best entry of each strategy, whatever its node order and however its cut is written."""
    best: dict[Strategy, Ranked] = {}
    for entry in sorted(entries, key=lambda entry: entry.sort_key(0.0)):
        lengths = entry.strategy.cut(seq_length).lengths
        same = replace(entry.strategy, placement=None, token_slices=lengths)
        best.setdefault(same, entry)
    return list(best.values())


def ranked_in_order(entries: Iterable[Ranked]) -> list[Ranked]:
    """Return the entries numbered from 1, best first. The same entries in any order give the same ranking."""
    found = list(entries)
    fastest_s = min((each.iteration_time_s for each in found if each.feasible and each.prediction), default=0.0)
    ordered = sorted(found, key=lambda entry: entry.sort_key(fastest_s))
    return [replace(entry, rank=rank) for rank, entry in enumerate(ordered, start=1)]


def all_in_order(entries: Iterable[Ranked], seq_length: int) -> list[Ranked]:
    """Return the strategies numbered from 1, best first, each once."""
    return ranked_in_order(without_repetitions(entries, seq_length))


def best_of_layouts(entries: Iterable[Ranked], seq_length: int) -> list[Ranked]:
    """Return the best entry of each layout, numbered from 1, best first."""
    found: dict[object, Ranked] = {}
    for entry in all_in_order(entries, seq_length):
        found.setdefault(entry.row, entry)
    return [replace(entry, rank=rank) for rank, entry in enumerate(found.values(), start=1)]


MOST_CONTENDERS = 14  # strategies that a constant of the cost model may make the winner


def contenders_of(ranked: Iterable[Ranked]) -> list[Ranked]:
    """Return the first and those that differ from all before in layout, schedule or recomputation."""
    found: dict[object, Ranked] = {}
    for entry in ranked:
        one = entry.strategy
        found.setdefault((entry.row, one.schedule, one.recompute), entry)
    return list(found.values())[:MOST_CONTENDERS]


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
