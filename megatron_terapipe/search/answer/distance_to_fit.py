"""Missing memory of a model on a cluster, and the single changes with which it fits.

The strategy nearest to fitting needs the smallest multiple of the memory of its fullest device. Each remedy is proven:
the same question with more nodes, a shorter sequence, a smaller batch, or without a constraint has a strategy that
leaves the headroom free, counted exactly.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np

from megatron_terapipe.search.answer.json_documents import DistancePart, RemedyKind, RemedyPart
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.memory import SHARE_OF_HOST
from megatron_terapipe.search.price.workload import IMBALANCE, Workload, gpt_workload
from megatron_terapipe.search.rank.grid_memory import GridMemory
from megatron_terapipe.search.rank.rules import LegalGrid, SearchCounts, legal_grids
from megatron_terapipe.search.rank.space import Choices, SearchProblem, all_choices
from megatron_terapipe.strategy import SOLVED, Strategy

COUNTED_EXACTLY = 8  # strategies with the lowest bounds of memory whose memory is counted on their schedule
TIMES_THE_NODES = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16)  # clusters that are tried, in nodes of the one that is too small
LEAST_SEQ_LENGTH = 128  # tokens below which no sequence is proposed

LEAST = {"recompute": ("full", "selective", "none"), "zero_stage": (3, 1, 0), "zero_shard_size": (None,)}
"""Values of dimensions by the memory that they need, the least first."""

PricingOf = Callable[[Workload, Cluster], Pricing]  # prices strategies of a model on a cluster


GRADIENTS: Literal["key_value_gradients"] = "key_value_gradients"
ROUNDED = "bf16"
"""Dimension of the type of gradients of keys and values, and its value with half the memory."""


def distance_to_fit(
    problem: SearchProblem, constraints: Mapping[str, tuple[Any, ...]], pricing_of: PricingOf
) -> DistancePart | None:
    """Return how far the nearest strategy is from fitting; None if none keeps the other rules."""
    nearest = nearest_to_fitting(problem, constraints, pricing_of)
    if nearest is None:
        return None
    return nearest.model_copy(update={"remedies": list(_remedies(problem, constraints, pricing_of))})


def nearest_to_fitting(
    problem: SearchProblem, constraints: Mapping[str, tuple[Any, ...]], pricing_of: PricingOf
) -> DistancePart | None:
    """Return the strategy with the least full device, without remedies; None if none keeps the other rules."""
    pricing = pricing_of(problem.workload, problem.cluster)
    choices = _leanest(all_choices(problem).constrained(constraints), constraints)
    candidates: list[tuple[float, Strategy]] = []
    for found in legal_grids(problem, choices, SearchCounts()):
        candidates += _least_full(found, problem, pricing)
        candidates = sorted(candidates, key=lambda pair: pair[0])[:COUNTED_EXACTLY]
    distances = [_distance(strategy, problem, pricing) for _, strategy in candidates]
    return min(distances, key=lambda distance: distance.fullness, default=None)


def _leanest(choices: Choices, constraints: Mapping[str, tuple[Any, ...]]) -> Choices:
    """Return the choices without values that never need less memory than a remaining one."""
    lean: dict[str, tuple[Any, ...]] = {
        name: tuple(value for value in order if value in choices[name])[:1] for name, order in LEAST.items()
    }
    if "stage" in choices["recompute"]:
        # It keeps less than whole layers do, and holds more while a backward runs.
        lean["recompute"] += ("stage",)
    lean["num_model_chunks"] = (min(choices["num_model_chunks"]),)
    lean["micro_batch_size"] = (min(choices["micro_batch_size"]),)
    if "1f1b" in choices["schedule"]:
        lean["schedule"] = ("1f1b",)
    # Stages that are solved for balance times, not bytes.
    partitions = tuple(each for each in choices["stage_partition"] if each != SOLVED)
    lean["stage_partition"] = partitions or ("uniform", "parameters")
    # Where constraints go together with values that were dropped, all of them stay.
    kept = {name: values for name, values in lean.items() if name not in constraints or name == "stage_partition"}
    return Choices({**choices.values, **kept})


def _least_full(found: LegalGrid, problem: SearchProblem, pricing: Pricing) -> list[tuple[float, Strategy]]:
    """Return the strategies of a grid with the lowest bound of memory, each with this share of the capacity."""
    grid, model = found.grid, pricing.cost_model
    groups = model.groups_of(grid.layout)
    legal = np.asarray(found.legal.any(axis=(2, 3, 4, 5, 6)))
    counts = {
        (model_chunks, place): model.counter.count(
            problem.partition(rule, grid.layout.pipeline_parallel_size * model_chunks),
            grid.layout.pipeline_parallel_size,
            grid.layout.tensor_parallel_size,
            grid.layout.expert_parallel_size,
        )
        for order, (_, model_chunks) in enumerate(grid.order)
        for place, rule in enumerate(grid.partition)
        if legal[order, place]
    }
    shares = np.where(found.legal, GridMemory(grid, pricing.memory_model).fullness(groups, counts), np.inf).ravel()
    lowest = np.argsort(shares, kind="stable")[:COUNTED_EXACTLY]
    places = [tuple(map(int, np.unravel_index(flat, grid.shape))) for flat in lowest if np.isfinite(shares[flat])]
    return [(float(shares[flat]), grid.strategy(place, problem)) for flat, place in zip(lowest, places, strict=False)]


def _distance(strategy: Strategy, problem: SearchProblem, pricing: Pricing) -> DistancePart:
    """Return the memory of the fullest pipeline rank of a strategy."""
    usable_share = pricing.memory_model.overheads.usable_share * (1 - problem.memory_headroom)
    held = list(zip(pricing.memory(strategy), pricing.cost_model.groups(strategy).smallest, strict=True))
    on_device = max((memory.total - memory.optimizer) / device.memory_bytes for memory, device in held)
    on_host = max(memory.optimizer for memory, _ in held)
    has_room = all(
        node.num_devices * on_host <= SHARE_OF_HOST * node.host.memory_bytes for node in pricing.cluster.nodes
    )
    ranks = [
        DistancePart(
            strategy=strategy.to_json(),
            pipeline_rank=rank,
            memory={**asdict(memory), "total": memory.total},
            device=device.name,
            usable_bytes=usable_share * device.memory_bytes,
            device_bytes=memory.total / usable_share,
            fits_with_optimizer_on_host=has_room and on_device <= usable_share,
            remedies=[],
        )
        for rank, (memory, device) in enumerate(held)
    ]
    return max(ranks, key=lambda each: each.fullness)


def _remedies(
    problem: SearchProblem, constraints: Mapping[str, tuple[Any, ...]], pricing_of: PricingOf
) -> Iterator[RemedyPart]:
    """Yield the smallest change of each kind with which a strategy fits."""

    def fitting(
        kind: RemedyKind, value: int | str, changed: SearchProblem, constraints: Mapping[str, tuple[Any, ...]]
    ) -> list[RemedyPart]:
        found = nearest_to_fitting(changed, constraints, pricing_of)
        if found is None or found.fullness > 1:
            return []
        return [RemedyPart(kind=kind, value=value, strategy=found.strategy)]

    for name in constraints:
        others = {other: values for other, values in constraints.items() if other != name}
        yield from fitting("constraint", name, problem, others)
    if len(constraints) > 1:
        yield from fitting("constraint", "", problem, {})
    if problem.software.can_run(GRADIENTS, ROUNDED) and ROUNDED not in constraints.get(GRADIENTS, ()):
        # No search rounds them unasked, since a run's numbers change.
        yield from fitting(GRADIENTS, ROUNDED, problem, {**constraints, GRADIENTS: (ROUNDED,)})
    for _, changes in groupby(_changes(problem), key=lambda change: change[0]):
        tried = (fitting(kind, value, changed, constraints) for kind, value, changed in changes)
        yield from next(filter(None, tried), [])


def _changes(problem: SearchProblem) -> Iterator[tuple[RemedyKind, int, SearchProblem]]:
    """Yield kind, value and the question with it: more and more nodes, shorter and shorter sequences, smaller batches.

    All nodes of a mixed cluster grow by the same factor. A model that is a list of layers keeps its sequences.
    """
    nodes = problem.cluster.nodes
    for times in TIMES_THE_NODES:
        whole = round(times * len(nodes))
        if whole > len(nodes) and (problem.cluster.is_uniform or times == int(times)):
            cluster = replace(problem.cluster, nodes=tuple(nodes[index % len(nodes)] for index in range(whole)))
            yield "devices", cluster.num_devices, replace(problem, cluster=cluster)
    config, length = problem.workload.config, problem.workload.seq_length
    imbalance = IMBALANCE if problem.workload.experts is None else problem.workload.experts.imbalance
    while config is not None and (length := length // 2) >= LEAST_SEQ_LENGTH:
        shorter = gpt_workload(replace(config, seq_length=length), imbalance=imbalance)
        yield "seq_length", length, replace(problem, workload=shorter)
    for part in (2, 4, 8):
        if problem.global_batch_size % part == 0:
            batch = problem.global_batch_size // part
            yield "global_batch_size", batch, replace(problem, global_batch_size=batch)
