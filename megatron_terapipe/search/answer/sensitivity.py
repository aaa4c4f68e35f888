"""Other constants of the cost model: which of them makes another strategy the best.

The contenders are the best strategies of different layouts. Each constant is moved both ways by its uncertainty: the
standard deviation of its logarithm, after calibration or before (`Prior`). Times are priced in closed form; where
another contender is more than 1 % faster, both are simulated with the moved constant. With a measured profile its four
factors are moved instead. The bandwidth of network cards, of which a data sheet may be wrong by a factor, is moved by
`FACTOR` where no trials on several nodes determine it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from math import exp, expm1, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.search.answer.figures import bandwidth_text, difference_text, strategy_text
from megatron_terapipe.search.answer.json_documents import WhatIfPart
from megatron_terapipe.search.learn.calibration import NETWORK, Calibration
from megatron_terapipe.search.learn.fit import times_with
from megatron_terapipe.search.price.cost_model import CostModel, Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, Prior, ProfileFactors, moved
from megatron_terapipe.search.price.memory import MemoryOverheads, total_bytes
from megatron_terapipe.search.rank.search import NEARLY_AS_FAST, Ranked

Floats = NDArray[np.float64]

HIGHEST = 0.99  # share of its limit that a constant such as an efficiency is moved to at most

FACTOR = 4.0
"""By how much the bandwidth of a node may differ from the data sheet, either way: nodes with one card in place of
eight, cards at a quarter of the rate, networks that are shared."""


class Move(NamedTuple):
    """A constant that is moved."""

    name: str
    logarithm: float
    """Change of its logarithm."""
    constants: Any
    """All constants of its object with this change."""


def other_constants(contenders: Sequence[Ranked], pricing: Pricing, calibration: Calibration) -> Iterator[WhatIfPart]:
    """Yield the constants with which another contender is better than the first, those with the largest regret first.

    The network is left out where trials determine it, or where there is one node.
    """
    model, overheads = pricing.cost_model, pricing.memory_model.overheads
    constants = model.constants
    widths, moves = widths_of(constants, calibration), []
    if isinstance(constants, HardwareEfficiency) and len(model.cluster.nodes) > 1 and not calibration.knows_network:
        widths = {name: width for name, width in widths.items() if name not in NETWORK}
        steps = (-log(FACTOR), log(FACTOR))
        moves = [Move("network", step, moved(constants, NETWORK, step)) for step in steps]
    moves += moves_of(constants, widths)
    found = [_faster(contenders, model, *each) for each in zip(moves, _times(contenders, model, moves), strict=True)]
    fuller = [move for move in moves_of(overheads, widths_of(overheads, calibration)) if move.logarithm > 0]
    found += _that_fit(contenders, fuller, pricing)
    yield from sorted(filter(None, found), key=lambda each: -each.change)


def widths_of(constants: Any, calibration: Calibration) -> dict[str, float]:
    """Return the standard deviation of the logarithm of each constant: of the calibration, else of its prior."""
    prior, intervals = Prior.of(constants), calibration.intervals
    found = dict(zip(prior.names, prior.widths.tolist(), strict=True))
    fitted = zip(intervals.parameter_names, np.sqrt(np.diag(intervals.covariance)).tolist(), strict=True)
    found |= {name: width for name, width in fitted if name in found}
    if isinstance(constants, MemoryOverheads) and calibration.num_memory_trials:
        found = {name: min(width, calibration.memory_sd) for name, width in found.items()}
    return found


def moves_of(constants: Any, widths: Mapping[str, float]) -> Iterator[Move]:
    """Yield the constants with one of them moved by its width; shares stay shares. A row of factors moves as one."""
    for each in fields(constants):
        value = getattr(constants, each.name)
        names = [name for name in widths if name.partition("[")[0] == each.name]
        for sign in (1, -1) if names else ():
            logarithm = sign * widths[names[0]]
            if not isinstance(value, tuple):
                logarithm = min(logarithm, log(HIGHEST * each.metadata["most"] / value))
            if sign * logarithm > 0:
                yield Move(each.name, logarithm, moved(constants, names, logarithm))


def _times(contenders: Sequence[Ranked], model: CostModel, moves: Sequence[Move]) -> Floats:
    """[m, n] seconds of n contenders with each of m sets of constants, about."""
    strategies, constants = [entry.strategy for entry in contenders], [move.constants for move in moves]
    found = times_with([model] * len(strategies), strategies, [model.constants, *constants])
    simulated = [entry.iteration_time_s for entry in contenders]
    return np.asarray(found[1:] * (simulated / found[0]))


def _faster(contenders: Sequence[Ranked], model: CostModel, move: Move, times: Floats) -> WhatIfPart | None:
    """Return the strategy that is more than 1 % faster than the first with other constants; `times`: [n], about."""
    best = int(np.argmin(times))
    if times[best] >= times[0] / (1 + NEARLY_AS_FAST):
        return None
    then, first, other = model.with_constants(move.constants), contenders[0].strategy, contenders[best].strategy
    winner_s, best_s = (then.predict_time(one).iteration_time_s for one in (first, other))
    regret = winner_s / best_s - 1
    if regret <= NEARLY_AS_FAST:
        return None
    words = f"{move.name} {expm1(move.logarithm):+.0%}"
    if move.name == "network":
        given = min(node.network.bandwidth * node.num_network_cards for node in model.cluster.nodes)
        words = f"{bandwidth_text(given * exp(move.logarithm))} a node in place of {bandwidth_text(given)}"
    line = f"with {words}, {difference_text(other, first)} is {regret:.0%} faster than rank 1"
    return _part(move, contenders[best], line, change=1 - best_s / winner_s, iteration_time_s=best_s)


def _that_fit(contenders: Sequence[Ranked], moves: Sequence[Move], pricing: Pricing) -> Iterator[WhatIfPart]:
    """Yield the constants of the memory with which the winner needs more than the devices have."""

    @cache
    def counted(index: int) -> tuple[Any, ...]:
        strategy = contenders[index].strategy
        counts = pricing.memory_model.count(strategy, copies=pricing.host_copies(strategy))
        return tuple(zip(counts, pricing.cost_model.groups(strategy).smallest, strict=True))

    def fits(index: int, overheads: MemoryOverheads) -> bool:
        return all(
            float(total_bytes(rank, overheads)) <= overheads.usable_share * device.memory_bytes
            for rank, device in counted(index)
        )

    for move in moves:
        if fits(0, move.constants):
            continue
        words = f"with {move.name} {expm1(move.logarithm):+.0%} rank 1 does not fit the devices"
        other = next((entry for index, entry in enumerate(contenders) if fits(index, move.constants)), None)
        if other is None:
            yield _part(move, None, f"{words}, and no other strategy does", change=1.0, iteration_time_s=None)
            continue
        regret = other.iteration_time_s / contenders[0].iteration_time_s - 1
        difference = difference_text(other.strategy, contenders[0].strategy)
        line = f"{words}; {difference} does, {regret:.1%} slower"
        yield _part(move, other, line, change=regret, iteration_time_s=other.iteration_time_s)


def _part(move: Move, other: Ranked | None, line: str, *, change: float, iteration_time_s: float | None) -> WhatIfPart:
    of_profile = field_texts(ProfileFactors)
    texts = field_texts(HardwareEfficiency) | field_texts(MemoryOverheads) | of_profile
    meaning = texts.get(move.name, "The network is not calibrated; its data sheet may be wrong by a factor.")
    on_profile = "On the profile: " if move.name in of_profile else ""
    return WhatIfPart(
        name="network" if move.name == "network" else "constant",
        value=expm1(move.logarithm) if move.name == "network" else move.name,
        strategy=None if other is None else other.strategy.to_json(),
        iteration_time_s=iteration_time_s,
        change=change,
        line=line,
        more=f"{on_profile}{meaning}" + ("" if other is None else f" The strategy: {strategy_text(other.strategy)}."),
    )
