"""Warnings about the winner of a ranking: memory that is nearly full, and nodes that slow the others down."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.rank.grid_prices import ProgressCallback
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.search import SearchResult, search
from megatron_terapipe.search.report.figures import flops_utilization, strategy_text, time_text
from megatron_terapipe.search.space.choices import all_choices
from megatron_terapipe.search.space.problem import MEMORY_HEADROOM, SearchProblem
from megatron_terapipe.strategy import Strategy

FULL = 1 - MEMORY_HEADROOM
"""Share of a device's memory above which a prediction that is a few per cent off means out of memory."""

EFFORT = 0.2
"""Effort of a search on a part of the cluster: enough to see whether it is worth a search of its own."""

MOST_UTILIZATION = 0.8
"""Share of the peak FLOP/s that no part of a cluster is expected to reach; a part that needs more is not searched."""

WORTH_SAYING = 0.02
"""Share of the time that leaving machines out must save before a note says so."""


def fullness(entry: Ranked, pricing: Pricing) -> float:
    """Return the predicted share of memory that is used on the fullest device, in [0, 1] if it fits.

    Args:
        entry: with a prediction.
        pricing: on the cluster, in the order of its hostfile.
    """
    assert entry.prediction is not None
    held = zip(entry.prediction.memory, pricing.cost_model.groups(entry.strategy).devices, strict=True)
    return max(memory.total / min(device.memory_bytes for device in devices) for memory, devices in held)


def memory_note(entries: Sequence[Ranked], pricing: Pricing) -> str | None:
    """Return a warning if the winner nearly fills its devices, and which strategy does not; None if there is room.

    Args:
        entries: strategies that can run, best first.
        pricing: on the cluster, in the order of its hostfile.
    """
    if not entries or (share := fullness(entries[0], pricing)) <= FULL:
        return None
    words = f"rank 1 is predicted to take {share:.0%} of a device's memory, and a prediction may be some per cent off"
    roomy = next((entry for entry in entries[1:] if fullness(entry, pricing) <= FULL), None)
    if roomy is None:
        return f"{words}: nothing listed here leaves 5 %, so try it before you rely on it, or list more with --top"
    assert roomy.prediction is not None and entries[0].prediction is not None
    slower = roomy.prediction.iteration_time_s / entries[0].prediction.iteration_time_s - 1
    return f"{words}: rank {roomy.rank} takes {fullness(roomy, pricing):.0%} and {slower:.1%} longer"


def headroom_note(result: SearchResult, problem: SearchProblem, pricing: Pricing) -> str | None:
    """Return what keeping memory free costs; None if nothing that fits without headroom is faster.

    Args:
        result: a winner, and perhaps a faster strategy that is too full.
        problem: what was asked.
        pricing: on the cluster, in the order of its hostfile.
    """
    full = result.too_full
    if full is None or full.prediction is None:
        return None
    left = 1 - fullness(full, pricing)
    words = (
        f"{strategy_text(full.strategy)} takes {time_text(full.prediction.iteration_time_s)}, but leaves {left:.1%} of "
        f"a device's memory free, less than the {100 * problem.memory_headroom:.3g} % asked for"
    )
    allow = f"--memory-headroom {math.floor(1000 * left) / 1000:g}"
    if not result.entries or result.entries[0].prediction is None:
        return f"{words}: {allow} allows it"
    saved = 1 - full.prediction.iteration_time_s / result.entries[0].prediction.iteration_time_s
    return f"{words}: {allow} allows it and saves {saved:.1%}"


def parts_of(cluster: Cluster) -> list[Cluster]:
    """Return the cluster without its slowest devices, without those and the next slowest, and so on."""
    speeds = sorted({node.device.half_flops for node in cluster.nodes})
    return [
        replace(cluster, nodes=tuple(node for node in cluster.nodes if node.device.half_flops > slowest))
        for slowest in speeds[:-1]
    ]


def smaller_cluster_note(
    winner: Ranked,
    problem: SearchProblem,
    constraints: Mapping[str, tuple[Any, ...]],
    pricing_on: Callable[[Cluster], Pricing],
    progress: ProgressCallback | None = None,
) -> str | None:
    """Return a warning if a mixed cluster is faster without its slower devices; None if it is not.

    Args:
        winner: the best on all of the cluster.
        problem: what was asked.
        constraints: values that flags allow for dimensions, which stay so.
        pricing_on: prices strategies on a cluster.
        progress: told what is being done.
    """
    assert winner.prediction is not None
    used = flops_utilization(
        winner.strategy, problem.workload, problem.cluster, winner.prediction.iteration_time_s, problem.precision
    )
    peak = _peak_flops(problem.cluster, problem.precision)
    lowest_s, best = winner.prediction.iteration_time_s * (1 - WORTH_SAYING), None
    for part in parts_of(problem.cluster):
        if used * peak > MOST_UTILIZATION * _peak_flops(part, problem.precision):
            break
        smaller = SearchProblem(
            workload=problem.workload,
            cluster=part,
            global_batch_size=problem.global_batch_size,
            precision=problem.precision,
            software=problem.software,
            memory_headroom=problem.memory_headroom,
        )
        choices = all_choices(smaller).constrained({**_near(winner.strategy, constraints), **constraints})
        found = search(smaller, choices, pricing_on, top=1, effort=EFFORT, refine=False, progress=progress).entries
        if found and found[0].prediction is not None and found[0].prediction.iteration_time_s < lowest_s:
            lowest_s, best = found[0].prediction.iteration_time_s, part
    if best is None:
        return None
    left_out = sorted({node.device.name for node in problem.cluster.nodes} - {node.device.name for node in best.nodes})
    saved = 1 - lowest_s / winner.prediction.iteration_time_s
    return (
        f"without the nodes of {' and '.join(left_out)} an iteration takes {time_text(lowest_s)}, {saved:.0%} less: "
        "every strategy here uses all devices, so take them out of the cluster and rank again"
    )


def _near(strategy: Strategy, constraints: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Return constraints that keep a search short: the plain values of a dimension, and those of a strategy."""
    near: dict[str, tuple[Any, ...]] = {
        "schedule": tuple(dict.fromkeys(("1f1b", strategy.schedule))),
        "num_model_chunks": tuple(sorted({1, strategy.num_model_chunks})),
    }
    if "token_slices" not in constraints:
        near["num_token_slices"] = tuple(sorted({1, strategy.num_token_slices}))
    return near


def _peak_flops(cluster: Cluster, precision: str) -> float:
    return sum(node.num_devices * node.device.peak_flops(precision) for node in cluster.nodes)
