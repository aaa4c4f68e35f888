"""Solves, for the best strategies alone, for lengths of token slices, layers of stages and the order of nodes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from deepspeed_ext.plan.errors import PlanError
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.rank.grid.balanced_partition import balanced_partition, layer_times
from megatron_terapipe.search.rank.grid.grid_prices import ProgressCallback
from megatron_terapipe.search.rank.grid.op_tables import OpTables
from megatron_terapipe.search.rank.placement import better_order
from megatron_terapipe.search.rank.ranked import Ranked, ranked_in_order, without_repetitions
from megatron_terapipe.search.space.choices import Choices
from megatron_terapipe.search.space.problem import SearchProblem
from megatron_terapipe.search.space.strategy_grid import StrategyGrid
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.strategy_fields import SOLVED

MOST_CUTS = 3
"""Strategies whose token slices are solved for with effort 1."""

MOST_ORDERS = 24
"""Node orders that are tried for the winner with effort 1."""


def refined(
    entries: Sequence[Ranked],
    problem: SearchProblem,
    choices: Choices,
    pricing_on: Callable[[Cluster], Pricing],
    *,
    top: int,
    effort: float = 1.0,
    progress: ProgressCallback | None = None,
) -> list[Ranked]:
    """Return improvements of the best strategies that leave the headroom free. What no flag fixes may change.

    Args:
        choices: values of each dimension; one with a single value stays.
        pricing_on: prices strategies on the cluster's nodes in another order.
        top: how many of the best matter.
    """
    found: list[Ranked] = []
    best = ranked_in_order(without_repetitions(entries, problem.workload.seq_length))[:top]
    tried = list(_worth_cutting(best, problem, choices))[: max(1, round(MOST_CUTS * effort))]
    for number, entry in enumerate(tried):
        if progress is not None:
            progress(number, len(tried), "token slices")
        pricing = pricing_on(entry.cluster_in_order or problem.cluster)
        found += _with_solved_cut(entry, problem, pricing, choices)
    if SOLVED in choices["stage_partition"]:
        for entry in ranked_in_order(without_repetitions([*best, *found], problem.workload.seq_length))[:top]:
            found += _with_solved_stages(entry, problem, pricing_on(entry.cluster_in_order or problem.cluster))
    if len({node.device for node in problem.cluster.nodes}) > 1 or not problem.cluster.is_uniform:
        if progress is not None:
            progress(0, 1, "order of nodes")
        winner = ranked_in_order([*best, *found])[0]
        found += _with_better_order(winner, problem, pricing_on, round(MOST_ORDERS * effort))
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


def _with_solved_cut(entry: Ranked, problem: SearchProblem, pricing: Pricing, choices: Choices) -> list[Ranked]:
    # The solver compiles its kernels, and not every search needs it.
    from megatron_terapipe.search.rank.token_slices import solve_cut

    strategy = entry.strategy
    counts = sorted({strategy.num_token_slices} & set(choices["num_token_slices"]) - {1})
    if not counts:
        return []
    try:
        solved = solve_cut(pricing.cost_model, strategy, counts=counts)
    except (ConfigError, PlanError):
        return []  # a schedule without room for more: the strategy stays as it is
    cut = replace(strategy, num_token_slices=len(solved.token_slices), token_slices=solved.token_slices)
    return _priced(cut, problem, pricing)


def _with_solved_stages(entry: Ranked, problem: SearchProblem, pricing: Pricing) -> list[Ranked]:
    """Return the strategy with stages that balance the times of its own layers; empty if that changes nothing."""
    strategy, model = entry.strategy, pricing.cost_model
    num_stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
    if num_stages == 1:
        return []
    tables = OpTables(model, (strategy.micro_batch_size,))
    times = layer_times(model.counter, StrategyGrid.of_strategy(strategy), model.groups(strategy), tables)
    partition = balanced_partition(
        problem, times, strategy.pipeline_parallel_size, strategy.num_model_chunks, strategy.num_micro_batches
    )
    if partition == problem.partition(strategy.stage_partition, num_stages):
        return []
    return _priced(replace(strategy, stage_partition=partition.bounds), problem, pricing)


def _with_better_order(
    winner: Ranked, problem: SearchProblem, pricing_on: Callable[[Cluster], Pricing], evaluations: int
) -> list[Ranked]:
    def score(cluster: Cluster) -> float:
        entries = _priced(winner.strategy, problem, pricing_on(cluster))
        return entries[0].prediction.iteration_time_s if entries and entries[0].prediction else float("inf")

    start = winner.cluster_in_order or problem.cluster
    ordered = better_order(start, score, evaluations=max(evaluations, 2))
    return _priced(winner.strategy, problem, pricing_on(ordered)) if ordered != start else []


def _priced(strategy: Strategy, problem: SearchProblem, pricing: Pricing) -> list[Ranked]:
    """Return the strategy with its price; empty if it does not leave the headroom free."""
    prediction = pricing.predict(strategy)
    if pricing.why_it_does_not_fit(strategy, prediction.memory, problem.memory_headroom) is not None:
        return []
    return [Ranked(strategy=strategy, prediction=prediction, cluster_in_order=pricing.cluster)]
