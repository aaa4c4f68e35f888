"""Where nothing fits: the strategy that is nearest to fitting, and the single changes with which one fits.

The nearest needs the smallest multiple of the memory of its fullest device. Each change is proven: with it a strategy
leaves the headroom free, counted exactly.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from megatron_terapipe.search.answer.json_documents import WhatIfPart
from megatron_terapipe.search.answer.question import Question
from megatron_terapipe.search.answer.what_if import left_free
from megatron_terapipe.search.machine.library import smallest_device_with
from megatron_terapipe.search.price.memory import RankMemory
from megatron_terapipe.search.price.workload import IMBALANCE, gpt_workload
from megatron_terapipe.search.rank.grid_prices import FITS, HEADROOM, GridMemory
from megatron_terapipe.search.rank.rules import LegalGrid, SearchCounts, legal_grids
from megatron_terapipe.search.rank.search import SearchResult
from megatron_terapipe.search.rank.space import Choices
from megatron_terapipe.strategy import SOLVED, Strategy
from megatron_terapipe.texts import bytes_text, strategy_text, time_text

COUNTED_EXACTLY = 8  # strategies with the lowest bounds of memory whose memory is counted on their schedule
TIMES_THE_NODES = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16)  # clusters that are tried, in nodes of the one that is too small
LEAST_SEQ_LENGTH = 128  # tokens below which no sequence is proposed

LEAST = {"recompute": ("full", "selective", "none"), "zero_stage": (3, 1, 0), "zero_shard_size": (None,)}
"""Values of dimensions by the memory that they need, the least first."""


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """A strategy that is nearest to fitting, and its fullest pipeline rank."""

    strategy: Strategy
    pipeline_rank: int
    memory: RankMemory
    device: str
    usable_bytes: float
    """Bytes of the device that may be used."""
    device_bytes: float
    """Memory of a device that it would fit."""

    @property
    def fullness(self) -> float:
        """Needed memory as a share of the usable one; it fits up to 1."""
        return self.memory.total / self.usable_bytes


def if_nothing_fits(asked: Question, result: SearchResult) -> Iterator[WhatIfPart]:
    """Yield the nearest strategy, and then the changes with which one fits; nothing if other rules are broken."""

    def part(name: str, value: int | float | str, line: str, strategy: Strategy, more: str = "") -> WhatIfPart:
        return WhatIfPart(name=name, value=value, strategy=strategy.to_json(), change=1.0, line=line, more=more)

    if result.too_full is not None:
        free, full = left_free(result.too_full, asked.pricing), result.too_full
        value = math.floor(1000 * free) / 1000
        more = f"{strategy_text(full.strategy)} takes {time_text(full.iteration_time_s)} and leaves {free:.1%} free."
        yield part("memory_headroom", value, f"--memory-headroom {value:g}", full.strategy, more)
    if not (result.counts.rejected[FITS] or result.counts.rejected[HEADROOM]):
        return
    nearest = nearest_to_fitting(asked)
    if nearest is None:
        return
    if result.too_full is None:
        line = (
            f"the nearest needs {bytes_text(nearest.memory.total)} of a device, and {nearest.device} has "
            f"{bytes_text(nearest.usable_bytes)} ({100 * asked.problem.memory_headroom:.3g}% kept free)"
        )
        yield part("nearest", nearest.memory.total, line, nearest.strategy, _shortage(nearest))
    for change in fitting_changes(asked):
        yield part(*change)
    enough = smallest_device_with(nearest.device_bytes)
    words = f"devices of {bytes_text(math.ceil(nearest.device_bytes / 1e9) * 1e9)}"
    such = "" if enough is None else f", such as {enough.name}"
    yield part("device_memory", nearest.device_bytes, f"{words}{such}", nearest.strategy)


def _shortage(nearest: Nearest) -> str:
    """Return the memory of the fullest device by kind."""
    parts = sorted(asdict(nearest.memory).items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name.replace('_', ' ')} {bytes_text(number)}" for name, number in parts if number > 0)
    return f"It is {strategy_text(nearest.strategy)}, and needs on pipeline rank {nearest.pipeline_rank}: {listed}."


def nearest_to_fitting(asked: Question) -> Nearest | None:
    """Return the strategy with the least full device; None if none keeps the other rules."""
    candidates: list[tuple[float, Strategy]] = []
    for found in legal_grids(asked.problem, _leanest(asked.choices, asked.constraints), SearchCounts()):
        candidates += _least_full(found, asked)
        candidates = sorted(candidates, key=lambda pair: pair[0])[:COUNTED_EXACTLY]
    return min((_counted(strategy, asked) for _, strategy in candidates), key=lambda each: each.fullness, default=None)


def _leanest(choices: Choices, constraints: Mapping[str, tuple[Any, ...]]) -> Choices:
    """Return the choices without values that never need less memory than a remaining one."""
    lean: dict[str, tuple[Any, ...]] = {
        name: tuple(value for value in order if value in choices[name])[:1] for name, order in LEAST.items()
    }
    if "stage" in choices["recompute"]:
        # It keeps less than whole layers do, and holds more while a backward runs.
        lean["recompute"] += ("stage",)
    lean |= {name: (min(choices[name]),) for name in ("num_model_chunks", "micro_batch_size")}
    if "1f1b" in choices["schedule"]:
        lean["schedule"] = ("1f1b",)
    # Stages that are solved for balance times, not bytes.
    partitions = tuple(each for each in choices["stage_partition"] if each != SOLVED)
    lean["stage_partition"] = partitions or ("uniform", "parameters")
    # Where constraints go together with values that were dropped, all of them stay.
    kept = {name: values for name, values in lean.items() if name not in constraints or name == "stage_partition"}
    return Choices({**choices.values, **kept})


def _least_full(found: LegalGrid, asked: Question) -> list[tuple[float, Strategy]]:
    """Return the strategies of a grid with the lowest bound of memory, each with this share of the capacity."""
    grid, model, problem = found.grid, asked.pricing.cost_model, asked.problem
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
    fullness = GridMemory(grid, asked.pricing.memory_model).fullness(model.groups_of(grid.layout), counts)
    shares = np.where(found.legal, fullness, np.inf).ravel()
    lowest = [flat for flat in np.argsort(shares, kind="stable")[:COUNTED_EXACTLY] if np.isfinite(shares[flat])]
    places = [tuple(map(int, np.unravel_index(flat, grid.shape))) for flat in lowest]
    return [(float(shares[flat]), grid.strategy(place, problem)) for flat, place in zip(lowest, places, strict=True)]


def _counted(strategy: Strategy, asked: Question) -> Nearest:
    """Return a strategy with the memory of its fullest pipeline rank."""
    pricing = asked.pricing
    usable_share = pricing.memory_model.overheads.usable_share * (1 - asked.problem.memory_headroom)
    held = list(zip(pricing.memory(strategy), pricing.cost_model.groups(strategy).smallest, strict=True))
    rank = max(range(len(held)), key=lambda each: held[each][0].total / held[each][1].memory_bytes)
    memory, device = held[rank]
    return Nearest(
        strategy=strategy,
        pipeline_rank=rank,
        memory=memory,
        device=device.name,
        usable_bytes=usable_share * device.memory_bytes,
        device_bytes=memory.total / usable_share,
    )


Change = tuple[str, int | str, str, Question]  # name, value, words of the change, and the question with it


def fitting_changes(asked: Question) -> Iterator[tuple[str, int | str, str, Strategy]]:
    """Yield (name, value, words, a strategy) of each change with which one fits; where it grows, the smallest."""
    freed = False
    for _, changes in groupby(_changes(asked), key=lambda each: (each[0], each[0] == "constraint" and each[1])):
        for name, value, words, changed in changes:
            if name == "constraint" and not value and freed:
                break  # One flag less is enough.
            found = nearest_to_fitting(changed)
            if found is not None and found.fullness <= 1:
                freed |= name == "constraint"
                yield name, value, words, found.strategy
                break


def _changes(asked: Question) -> Iterator[Change]:
    """Yield questions without a flag, with rounded gradients, more and more nodes, shorter sequences, smaller batches.

    All nodes of a mixed cluster grow by the same factor. A model that is a list of layers keeps its sequences.
    """
    problem, constraints = asked.problem, asked.constraints
    for name in constraints:
        others = {other: values for other, values in constraints.items() if other != name}
        yield "constraint", name, f"--{name.replace('_', '-')} free", asked.changed(others)
    if len(constraints) > 1:
        yield "constraint", "", "no flag that fixes a dimension", asked.changed({})
    if problem.software.can_run("key_value_gradients", "bf16") and "bf16" not in constraints.get(
        "key_value_gradients", ()
    ):
        # No search rounds them unasked, since a run's numbers change.
        rounded = asked.changed({**constraints, "key_value_gradients": ("bf16",)})
        yield "key_value_gradients", "bf16", "--key-value-gradients bf16", rounded
    nodes = problem.cluster.nodes
    for times in TIMES_THE_NODES:
        whole = round(times * len(nodes))
        if whole > len(nodes) and (problem.cluster.is_uniform or times == int(times)):
            cluster = replace(problem.cluster, nodes=tuple(nodes[index % len(nodes)] for index in range(whole)))
            words = f"{cluster.num_devices} such devices ({whole} nodes)"
            yield "devices", cluster.num_devices, words, asked.changed(cluster=cluster)
    config, length = problem.workload.config, problem.workload.seq_length
    imbalance = IMBALANCE if problem.workload.experts is None else problem.workload.experts.imbalance
    while config is not None and (length := length // 2) >= LEAST_SEQ_LENGTH:
        shorter = gpt_workload(replace(config, seq_length=length), imbalance=imbalance)
        yield "seq_length", length, f"--seq-length {length}", asked.changed(workload=shorter)
    for part in (2, 4, 8):
        if problem.global_batch_size % part == 0:
            batch = problem.global_batch_size // part
            yield "global_batch_size", batch, f"--global-batch-size {batch}", asked.changed(global_batch_size=batch)
