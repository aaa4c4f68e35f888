"""Which constant of the cost model changes the winner if it is 10 % off, and what it then costs to have chosen it.

The contenders are the best strategies of different layouts. Each constant is moved both ways. What that does to their
times is priced in closed form; where another one comes first, both are simulated with the moved constant. With a
measured profile the constants of the roofline decide nothing, and its four factors are moved instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.price.batch import StrategyBatches
from megatron_terapipe.search.price.cost_model import CostModel, Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, ProfileFactors, moved
from megatron_terapipe.search.price.memory import MemoryOverheads, total_bytes
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

CHANGE = 0.1  # by how much each constant is moved, as a share of it
MOST_CONTENDERS = 12  # strategies that are compared

NEAR = 1.15
"""Seconds of a contender, in those of the winner, above which no constant that is 10 % off makes it the winner: times
are products of powers of the constants, with exponents between -1 and 1."""

NEARLY = 0.002  # share of the time below which another strategy is no other winner
FARTHEST = 1.0  # change of a constant, as a share of it, beyond which nothing is said of it
HIGHEST = 0.99  # share of its limit that a constant such as an efficiency is moved to at most


@dataclass(frozen=True, kw_only=True)
class OtherWinner:
    """A constant with which another strategy is better than the winner; `OtherWinnerPart` describes its fields."""

    constant: str
    change: float
    strategy: Strategy | None
    regret: float
    is_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The constants that decide who wins; `SensitivityPart` describes its fields."""

    changes: list[OtherWinner]
    nearest: OtherWinner | None
    num_constants: int
    num_contenders: int


def contenders_of(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Return the winner and the best strategies that differ from all before in layout, schedule or recomputation."""
    found: dict[object, Ranked] = {}
    for entry in ranked:
        one = entry.strategy
        found.setdefault((one.layout, one.schedule, one.recompute), entry)
    return list(found.values())[:MOST_CONTENDERS]


def sensitivity(contenders: Sequence[Ranked], pricing: Pricing) -> Sensitivity:
    """Return which constants, 10 % off, make another contender better than the first."""
    model = pricing.cost_model
    near = [entry for entry in contenders if entry.iteration_time_s <= NEAR * contenders[0].iteration_time_s]
    simulated = np.array([entry.iteration_time_s for entry in near])
    if isinstance(model.op_times, Roofline):
        moves = list(moves_of(model.efficiency))
        batches = StrategyBatches([model] * len(near), [entry.strategy for entry in near])
        ratio = simulated / batches.times(model.efficiency)
        times = np.array([batches.times(constants) * ratio for _, _, constants in moves])
    else:
        moves = list(moves_of(ProfileFactors()))
        models = [with_constants(model, constants) for _, _, constants in moves]
        times = np.array([[each.predict_time(entry.strategy).iteration_time_s for entry in near] for each in models])
    changes = _changes(near, moves, times, model)
    overheads = [move for move in moves_of(pricing.memory_model.overheads) if move[1] > 0]
    changes += _memory_changes(contenders, overheads, pricing)
    return Sensitivity(
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
    """Yield the constants with one of them moved; shares stay shares, and what is nothing stays nothing.

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
    """Return what a constant is moved to at most: a share stays one."""
    limits = {each.name: each.metadata.get("most", np.inf) for each in fields(constants)}
    return HIGHEST * float(limits[name])


def _changes(contenders: Sequence[Ranked], moves: Sequence[Move], times: Floats, model: CostModel) -> list[OtherWinner]:
    """Return the constants with which another strategy is faster than the first; `times`: [m, n] seconds, about."""
    found = []
    for (name, change, constants), row in zip(moves, times, strict=True):
        best = int(np.argmin(row))
        if row[best] >= row[0] * (1 - NEARLY / 2):
            continue
        then, strategy = with_constants(model, constants), contenders[best].strategy
        winner_s, best_s = (then.predict_time(one).iteration_time_s for one in (contenders[0].strategy, strategy))
        if best_s < winner_s * (1 - NEARLY):
            found.append(OtherWinner(constant=name, change=change, strategy=strategy, regret=winner_s / best_s - 1))
    return found


def _nearest(contenders: Sequence[Ranked], moves: Sequence[Move], logs: Floats) -> OtherWinner | None:
    """Return the smallest change of a constant with which another contender wins, about.

    Args:
        logs: [m, n] what moving them adds to the logarithms of the times.
    """
    # Until then the two are nearly as fast as each other, which is no other winner.
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
                best, strategy = needed, contenders[index].strategy
                found = OtherWinner(
                    constant=name, change=float(np.expm1(np.sign(step) * needed)), strategy=strategy, regret=0.0
                )
    return found


def _memory_changes(contenders: Sequence[Ranked], moves: Sequence[Move], pricing: Pricing) -> list[OtherWinner]:
    """Return the constants of the memory with which the winner needs more than the devices have."""
    counted = [
        pricing.memory_model.count(entry.strategy, copies=pricing.host_copies(entry.strategy)) for entry in contenders
    ]
    groups = [pricing.cost_model.groups(entry.strategy) for entry in contenders]

    def fits(index: int, overheads: MemoryOverheads) -> bool:
        return all(
            float(total_bytes(rank, overheads)) <= overheads.usable_share * min(each.memory_bytes for each in devices)
            for rank, devices in zip(counted[index], groups[index].devices, strict=True)
        )

    found = []
    for name, change, overheads in moves:
        if fits(0, overheads):
            continue
        other = next((entry for index, entry in enumerate(contenders) if fits(index, overheads)), None)
        found.append(
            OtherWinner(
                constant=name,
                change=change,
                strategy=None if other is None else other.strategy,
                regret=0.0 if other is None else other.iteration_time_s / contenders[0].iteration_time_s - 1,
                is_memory=True,
            )
        )
    return found
