"""Sensitivity of the winner to each constant of the cost model, and a check of its MFU against published ones.

The contenders are the best strategies of different layouts. Each constant is moved by 10 % both ways, and their times
are priced in closed form; where another one comes first, both are simulated with the moved constant. With a measured
profile its four factors are moved instead of the constants of the roofline.

`check_utilization` compares the predicted MFU of the winner with the best published one of training dense GPT models,
and finds the time at that one. All figures count whole attention, no recomputation, 16-bit products over the dense peak
of the data sheet; runs in FP8 are left out, since they are faster than this peak. With causal attention fewer FLOPs
count; those follow from the shapes of the run. Other generations have no published figure here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.answer.figures import flops_utilization
from megatron_terapipe.search.answer.json_schema import OtherWinnerPart, SensitivityPart, UtilizationPart
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.batch import StrategyBatches
from megatron_terapipe.search.price.cost_model import CostModel, Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, ProfileFactors, moved
from megatron_terapipe.search.price.memory import MemoryOverheads, total_bytes
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

CHANGE = 0.1  # by how much each constant is moved, as a share of it

NEAR = 1.15
"""Seconds of a contender, in those of the winner, above which no constant that is 10 % off makes it the winner: times
are products of powers of the constants, with exponents between -1 and 1."""

NEARLY = 0.002  # least share of the time that another winner must save
FARTHEST = 1.0  # largest change of a constant, as a share of it, that is looked for
HIGHEST = 0.99  # share of its limit that a constant such as an efficiency is moved to at most


def sensitivity(contenders: Sequence[Ranked], pricing: Pricing) -> SensitivityPart:
    """Return the constants that make another contender better than the first if they are 10 % off."""
    model = pricing.cost_model
    near = [entry for entry in contenders if entry.iteration_time_s <= NEAR * contenders[0].iteration_time_s]
    simulated = np.array([entry.iteration_time_s for entry in near])
    if isinstance(model.op_times, Roofline):
        moves = list(moves_of(model.efficiency))
        batches = StrategyBatches([model] * len(near), [entry.strategy for entry in near])
        ratio = simulated / batches.times(model.efficiency)
        times = batches.times_with([constants for _, _, constants in moves]) * ratio
    else:
        moves = list(moves_of(ProfileFactors()))
        models = [with_constants(model, constants) for _, _, constants in moves]
        times = np.array([[each.predict_time(entry.strategy).iteration_time_s for entry in near] for each in models])
    changes = _changes(near, moves, times, model)
    overheads = [move for move in moves_of(pricing.memory_model.overheads) if move[1] > 0]
    changes += _memory_changes(contenders, overheads, pricing)
    return SensitivityPart(
        changes=sorted(changes, key=lambda each: -each.regret),
        nearest=None if changes else _nearest(near, moves, np.log(times / simulated)),
        num_constants=len({name for name, _, _ in moves}) + len(overheads),
        num_contenders=len(contenders),
    )


def with_constants(model: CostModel, constants: HardwareEfficiency | ProfileFactors) -> CostModel:
    """Return the cost model with other constants of the roofline, or with factors on its profile."""
    return model.with_factors(constants) if isinstance(constants, ProfileFactors) else model.with_efficiency(constants)


Move = tuple[str, float, Any]  # name of a constant, the change as a share of it, and all constants with this change


def moves_of(constants: Any) -> Iterator[Move]:
    """Yield the constants with one of them moved; shares stay shares, and zeros stay zero.

    A row of factors moves as one.
    """
    for each in fields(constants):
        value = getattr(constants, each.name)
        row = [f"{each.name}[{index}]" for index in range(len(value))] if isinstance(value, tuple) else None
        if each.name == "usable_share" or (row is None and value <= 0):
            continue
        for change in (CHANGE, -CHANGE):
            if row is None:
                change = min(change, max(_highest(constants, each.name) / value - 1, 0.0))
            if change:
                yield each.name, change, moved(constants, row or [each.name], float(np.log1p(change)))


def _highest(constants: Any, name: str) -> float:
    """Return the limit of a constant: a share stays a share."""
    limits = {each.name: each.metadata.get("most", np.inf) for each in fields(constants)}
    return HIGHEST * float(limits[name])


def _changes(
    contenders: Sequence[Ranked], moves: Sequence[Move], times: Floats, model: CostModel
) -> list[OtherWinnerPart]:
    """Return the constants with which another strategy is faster than the first; `times`: [m, n] seconds, about."""
    found = []
    for (name, change, constants), row in zip(moves, times, strict=True):
        best = int(np.argmin(row))
        if row[best] >= row[0] * (1 - NEARLY / 2):
            continue
        then, other = with_constants(model, constants), contenders[best].strategy
        winner_s, best_s = (then.predict_time(one).iteration_time_s for one in (contenders[0].strategy, other))
        if best_s < winner_s * (1 - NEARLY):
            found.append(_other(name, change, other, winner_s / best_s - 1))
    return found


def _nearest(contenders: Sequence[Ranked], moves: Sequence[Move], logs: Floats) -> OtherWinnerPart | None:
    """Return the smallest change of a constant with which another contender wins, about.

    Args:
        logs: [m, n] change of the logarithms of the times by each move.
    """
    # Up to this gap the two are equally fast, which is no other winner.
    gaps = np.log(
        np.array([entry.iteration_time_s for entry in contenders]) / contenders[0].iteration_time_s
    ) - np.log1p(-NEARLY)
    best, found = np.log1p(FARTHEST), None
    for (name, change, constants), row in zip(moves, logs, strict=True):
        step = np.log1p(change)
        gained = row[0] - row
        for index in range(1, len(contenders)):
            if gained[index] <= 0 or (needed := abs(step) * gaps[index] / gained[index]) >= best:
                continue
            farther = float(np.exp(np.sign(step) * (needed - abs(step))))
            if np.max(getattr(constants, name)) * farther <= _highest(constants, name):
                best, found = needed, (name, float(np.expm1(np.sign(step) * needed)), contenders[index].strategy)
    if found is None:
        return None
    return _other(*found, regret=0.0)


def _other(
    name: str, change: float, strategy: Strategy | None, regret: float, *, is_memory: bool = False
) -> OtherWinnerPart:
    found = None if strategy is None else strategy.to_json()
    return OtherWinnerPart(constant=name, change=change, strategy=found, regret=regret, is_memory=is_memory)


def _memory_changes(contenders: Sequence[Ranked], moves: Sequence[Move], pricing: Pricing) -> list[OtherWinnerPart]:
    """Return the constants of the memory with which the winner needs more than the devices have."""
    counted = [
        (
            pricing.memory_model.count(entry.strategy, copies=pricing.host_copies(entry.strategy)),
            pricing.cost_model.groups(entry.strategy).smallest,
        )
        for entry in contenders
    ]

    def fits(index: int, overheads: MemoryOverheads) -> bool:
        return all(
            float(total_bytes(rank, overheads)) <= overheads.usable_share * device.memory_bytes
            for rank, device in zip(*counted[index], strict=True)
        )

    found = []
    for name, change, overheads in moves:
        if fits(0, overheads):
            continue
        other = next((entry for index, entry in enumerate(contenders) if fits(index, overheads)), None)
        regret = 0.0 if other is None else other.iteration_time_s / contenders[0].iteration_time_s - 1
        found.append(_other(name, change, None if other is None else other.strategy, regret, is_memory=True))
    return found


class PublishedUtilization(NamedTuple):
    """The best published MFU of a generation."""

    share: float
    """Of the peak, in [0, 1], with full attention."""
    causal_share: float
    """The same without the scores that causal attention never computes."""
    run: str
    """Which run it was, in words."""


# 2,048 tokens: abstract.
LLAMA = PublishedUtilization(0.705, 0.684, "Llama 13B on A100, arXiv 2311.05610")
# 4,096 and 8,192 tokens, Megatron-core in bf16: throughput tables of the repository.
NEMOTRON = PublishedUtilization(0.554, 0.526, "Nemotron-4 15B on 16 H100, NVIDIA dgxc-benchmarking")
LLAMA_405B = PublishedUtilization(0.460, 0.442, "Llama 3.1 405B on 128 GB200, NVIDIA dgxc-benchmarking")
# Abstracts, which may count recomputed FLOPs.
ZERO_INFINITY = PublishedUtilization(0.40, 0.40, "512 V100, arXiv 2104.07857")
FRONTIER = PublishedUtilization(0.384, 0.384, "a GPT of 22B on MI250X, arXiv 2312.12705")
PUBLISHED: Mapping[str, PublishedUtilization] = MappingProxyType(
    {"ampere": LLAMA, "hopper": NEMOTRON, "blackwell": LLAMA_405B, "volta": ZERO_INFINITY, "cdna2": FRONTIER}
)
"""By generation of devices, on any number of nodes."""


def best_published(cluster: Cluster) -> PublishedUtilization | None:
    """Return the best published MFU for the devices of a cluster; None for several kinds, or where none is known."""
    generations = {node.device.generation for node in cluster.nodes}
    return PUBLISHED.get(generations.pop()) if len(generations) == 1 else None


TOLERANCE = 0.03
"""Share of the peak by which a prediction may be above the best published one without a note."""


def check_utilization(entry: Ranked, model: CostModel) -> UtilizationPart | None:
    """Return the doubt about a strategy that is predicted to beat all published runs; None for others."""
    time_s, published = entry.iteration_time_s, best_published(model.cluster)
    used, causal = (
        flops_utilization(entry.strategy, model.workload, model.cluster, time_s, model.precision, causal=each)
        for each in (False, True)
    )
    if published is None or used <= published.share + TOLERANCE:
        return None
    # Else the difference is the convention, which counts scores that are not computed.
    is_too_fast = causal > published.causal_share
    return UtilizationPart(
        predicted=used,
        predicted_causal=causal,
        published=published.share,
        published_causal=published.causal_share,
        published_run=published.run,
        published_time_s=time_s * causal / published.causal_share if is_too_fast else None,
    )
