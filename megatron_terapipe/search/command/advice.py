"""What is worked out beside a ranking: what to change, what to doubt, and what else to run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_terapipe.search.command.costs import Costs
from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.rank.distance_to_fit import distance_to_fit
from megatron_terapipe.search.rank.fewer_devices import on_fewer_devices
from megatron_terapipe.search.rank.found_orders import with_found_order
from megatron_terapipe.search.rank.grid.grid_prices import FITS, HEADROOM, ProgressCallback
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.search import SearchResult
from megatron_terapipe.search.rank.sensitivity import sensitivity
from megatron_terapipe.search.report.advice import Advice, TooFull
from megatron_terapipe.search.report.rivals import RivalAdvice, compare_rival
from megatron_terapipe.search.report.utilisation_check import check_utilization
from megatron_terapipe.search.rivals.best import best_rival, has_rival
from megatron_terapipe.search.software.terapipe import TERAPIPE
from megatron_terapipe.search.space.problem import SearchProblem


def fullness(entry: Ranked, pricing: Pricing) -> float:
    """Return the predicted share of memory that is used on the fullest device, in [0, 1] if it fits.

    Args:
        pricing: on the cluster, in the order of its hostfile.
    """
    assert entry.prediction is not None
    held = zip(entry.prediction.memory, pricing.cost_model.groups(entry.strategy).devices, strict=True)
    return max(memory.total / min(device.memory_bytes for device in devices) for memory, devices in held)


def advise(
    result: SearchResult,
    problem: SearchProblem,
    constraints: Mapping[str, tuple[Any, ...]],
    costs: Costs,
    progress: ProgressCallback | None = None,
    *,
    rivals: bool = True,
) -> Advice:
    """Return the advice that goes with the result of a search.

    Args:
        rivals: whether to price what would be run in place of this trainer.
    """
    pricing = costs.pricing_on(problem.cluster)
    compared = _rivals(result, problem, pricing) if rivals else ()
    full = None if result.too_full is None else _too_full(result.too_full, result, pricing)
    if not result.entries:
        short = result.counts.rejected[FITS] or result.counts.rejected[HEADROOM]

        def pricing_of(workload: Workload, cluster: Cluster) -> Pricing:
            return replace(costs, workload=workload).pricing_on(cluster)

        return Advice(
            memory_headroom=problem.memory_headroom,
            too_full=full,
            distance=distance_to_fit(problem, constraints, pricing_of) if short else None,
            rivals=compared,
        )
    winner = result.entries[0]
    order = with_found_order(winner, problem, constraints, pricing)
    return Advice(
        memory_headroom=problem.memory_headroom,
        too_full=full,
        fewer_devices=on_fewer_devices(winner, problem, constraints, costs.pricing_on, progress),
        sensitivity=sensitivity(result.contenders, pricing),
        utilization=check_utilization(winner, pricing.cost_model),
        rivals=compared,
        found_order=order,
        found_order_saves=0.0 if order is None else 1 - order.iteration_time_s / winner.iteration_time_s,
    )


def _rivals(result: SearchResult, problem: SearchProblem, pricing: Pricing) -> tuple[RivalAdvice, ...]:
    """Return what would be run in place of this trainer; nothing beside strategies of other trainers."""
    if problem.software.name != TERAPIPE.name or not has_rival(pricing):
        return ()
    rival = best_rival(pricing, problem.global_batch_size, headroom=problem.memory_headroom)
    winner = next(iter(result.entries), None)
    return () if rival is None else (compare_rival(rival, winner, problem.workload, problem.cluster),)


def _too_full(entry: Ranked, result: SearchResult, pricing: Pricing) -> TooFull:
    saves = None
    if result.entries and result.entries[0].prediction is not None and entry.prediction is not None:
        saves = 1 - entry.iteration_time_s / result.entries[0].iteration_time_s
    return TooFull(entry=entry, left_free=1 - fullness(entry, pricing), could_save=saves)
