"""Other constants of the cost model: which of them makes another strategy the best.

The contenders are the best strategies of different layouts. Each constant is moved both ways by its uncertainty: the
standard deviation of its logarithm, after calibration or before (`Prior`). Times are priced in closed form; where
another contender is more than 1 % faster, both are simulated with the moved constant. With a measured profile its four
factors are moved instead. The bandwidth of network cards, of which a data sheet may be wrong by a factor, is moved by
`FACTOR` where no trials on several nodes determine it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from math import exp, expm1, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.search.answer.json_documents import WhatIfPart
from megatron_terapipe.search.learn.calibration import NETWORK, Calibration
from megatron_terapipe.search.learn.fit import times_with
from megatron_terapipe.search.learn.priors import Prior, most_of, moved
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, ProfileFactors
from megatron_terapipe.search.rank.search import NEARLY_AS_FAST, Ranked
from megatron_terapipe.texts import bandwidth_text, difference_text, layout_text, strategy_text

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


def other_constants(contenders: Sequence[Ranked], model: CostModel, calibration: Calibration) -> Iterator[WhatIfPart]:
    """Yield the constants with which another contender is better than the first, those with the largest regret first.

    The network is left out where trials determine it, or where there is one node.
    """
    constants = model.constants
    widths, moves = widths_of(constants, calibration), []
    if isinstance(constants, HardwareEfficiency) and len(model.cluster.nodes) > 1 and not calibration.knows_network:
        widths = {name: width for name, width in widths.items() if name not in NETWORK}
        steps = (-log(FACTOR), log(FACTOR))
        moves = [Move("network", step, moved(constants, dict.fromkeys(NETWORK, step))) for step in steps]
    moves += moves_of(constants, widths)
    found = [_faster(contenders, model, *each) for each in zip(moves, _times(contenders, model, moves), strict=True)]
    yield from sorted(filter(None, found), key=lambda each: -each.change)


def widths_of(constants: Any, calibration: Calibration) -> dict[str, float]:
    """Return the standard deviation of the logarithm of each constant: of the calibration, else of its prior."""
    prior, intervals = Prior.of(constants), calibration.intervals
    found = dict(zip(prior.names, prior.widths.tolist(), strict=True))
    fitted = zip(intervals.parameter_names, np.sqrt(np.diag(intervals.covariance)).tolist(), strict=True)
    found |= {name: width for name, width in fitted if name in found}
    return found


def moves_of(constants: Any, widths: Mapping[str, float]) -> Iterator[Move]:
    """Yield the constants with one of them moved by its width; shares stay shares. A row of factors moves as one."""
    for each in fields(constants):
        value = getattr(constants, each.name)
        names = [name for name in widths if name.partition("[")[0] == each.name]
        for sign in (1, -1) if names else ():
            logarithm = sign * widths[names[0]]
            if not isinstance(value, tuple):
                logarithm = min(logarithm, log(HIGHEST * most_of(each.name) / value))
            if sign * logarithm > 0:
                yield Move(each.name, logarithm, moved(constants, dict.fromkeys(names, logarithm)))


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
    if move.name == "network":
        given = min(node.network.bandwidth * node.num_network_cards for node in model.cluster.nodes)
        words = f"{bandwidth_text(given * exp(move.logarithm))} a node, not {bandwidth_text(given)}"
    else:
        (declared,) = (each for each in fields(move.constants) if each.name == move.name)
        words = f"{declared.metadata['words']} {expm1(move.logarithm):+.0%}"
    # Some differ only in the schedule or recomputation.
    changed = layout_text(other) if other.layout != first.layout else difference_text(other, first)
    on_profile = "On the profile: " if isinstance(move.constants, ProfileFactors) else ""
    meaning = field_texts(type(move.constants)).get(move.name, "The data sheet of a network may be wrong by a factor.")
    return WhatIfPart(
        name="network" if move.name == "network" else "constant",
        value=expm1(move.logarithm) if move.name == "network" else move.name,
        strategy=other,
        iteration_time_s=best_s,
        change=1 - best_s / winner_s,
        line=f"{words}: {changed} is {regret:.0%} faster than rank 1",
        more=f"{on_profile}{meaning} The strategy: {strategy_text(other)}.",
    )
