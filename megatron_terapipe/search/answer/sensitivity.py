"""Sensitivity of the winner to the constants of the cost model, and a check of its MFU against published ones.

The contenders are the best strategies of different layouts. Each constant is moved both ways by its uncertainty: the
standard deviation of its logarithm, after calibration or before (`Prior`). Times are priced in closed form; where
another contender is more than 1 % faster, both are simulated with the moved constant. With a measured profile its four
factors are moved instead. The bandwidth of network cards, of which a data sheet may be wrong by a factor, is moved as
one where no trials on several nodes determine it.

`check_utilization` compares the predicted MFU of the winner with the best published one of training dense GPT models,
and finds the time at that one. All figures count whole attention, no recomputation, 16-bit products over the dense peak
of the data sheet; runs in FP8 are left out, since they are faster than this peak. With causal attention fewer FLOPs
count; those follow from the shapes of the run. Other generations have no published figure here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from math import exp, expm1, log
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.search.answer.figures import speed_of, strategy_text, time_text
from megatron_terapipe.search.answer.json_documents import (
    NetworkPart,
    OtherWinnerPart,
    SensitivityPart,
    UtilizationPart,
)
from megatron_terapipe.search.learn.calibration import NETWORK, Calibration
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import CostModel, Pricing, times_with
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, Prior, ProfileFactors, moved
from megatron_terapipe.search.price.memory import MemoryOverheads, total_bytes
from megatron_terapipe.search.rank.search import NEARLY_AS_FAST, Ranked
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

HIGHEST = 0.99  # share of its limit that a constant such as an efficiency is moved to at most

FACTOR = 4.0
"""By how much the bandwidth of a node may differ from the data sheet, either way: nodes with one card in place of
eight, cards at a quarter of the rate, networks that are shared."""

STEPS = 24  # bandwidths that are tried either way


def sensitivity(contenders: Sequence[Ranked], pricing: Pricing, calibration: Calibration) -> SensitivityPart:
    """Return the constants that, moved by their uncertainty, make another contender better than the first."""
    model = pricing.cost_model
    constants = model.constants
    widths = widths_of(constants, calibration)
    bandwidths: list[float] = []
    if isinstance(constants, HardwareEfficiency) and len(model.cluster.nodes) > 1 and not calibration.knows_network:
        widths = {name: width for name, width in widths.items() if name not in NETWORK}
        bandwidths = np.log(np.geomspace(1, FACTOR, STEPS)[1:]).tolist()
    moves = list(moves_of(constants, widths))
    slower, faster = ([moved(constants, NETWORK, sign * each) for each in bandwidths] for sign in (-1, 1))
    times = _times(contenders, model, [constants for _, _, constants in moves] + slower + faster)
    found = [_change(contenders, model, *each) for each in zip(moves, times, strict=False)]
    overheads = pricing.memory_model.overheads
    memory = [move for move in moves_of(overheads, widths_of(overheads, calibration)) if move[1] > 0]
    found += _memory_changes(contenders, memory, pricing)
    given = min(node.network.bandwidth * node.num_network_cards for node in model.cluster.nodes)
    network = []
    for sign, some, row in zip((-1, 1), (slower, faster), np.split(times[len(moves) :], 2), strict=True):
        decided = np.flatnonzero(row.min(axis=1) < row[:, 0] / (1 + NEARLY_AS_FAST))
        if len(decided) and (other := _change(contenders, model, ("", 0.0, some[-1]), row[-1])) is not None:
            at = given * exp(sign * bandwidths[decided[0]])
            network.append(NetworkPart(bandwidth=at, strategy=other.strategy, regret=other.regret))
    return SensitivityPart(
        changes=sorted(filter(None, found), key=lambda each: -each.regret),
        network=network,
        network_bandwidth=given if bandwidths else None,
        num_constants=len({name for name, _, _ in moves}) + len(memory),
        num_contenders=len(contenders),
    )


def widths_of(constants: Any, calibration: Calibration) -> dict[str, float]:
    """Return the standard deviation of the logarithm of each constant: of the calibration, else of its prior."""
    prior, intervals = Prior.of(constants), calibration.intervals
    found = dict(zip(prior.names, prior.widths.tolist(), strict=True))
    fitted = zip(intervals.parameter_names, np.sqrt(np.diag(intervals.covariance)).tolist(), strict=True)
    found |= {name: width for name, width in fitted if name in found}
    if isinstance(constants, MemoryOverheads) and calibration.num_memory_trials:
        found = {name: min(width, calibration.memory_sd) for name, width in found.items()}
    return found


Move = tuple[str, float, Any]  # name of a constant, the change of its logarithm, and all constants with this change


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
                yield each.name, logarithm, moved(constants, names, logarithm)


def _times(contenders: Sequence[Ranked], model: CostModel, constants: Sequence[Any]) -> Floats:
    """[m, n] seconds of n contenders with each of m sets of constants, about."""
    strategies = [entry.strategy for entry in contenders]
    found = times_with([model] * len(strategies), strategies, [model.constants, *constants])
    simulated = [entry.iteration_time_s for entry in contenders]
    return np.asarray(found[1:] * (simulated / found[0]))


def _change(contenders: Sequence[Ranked], model: CostModel, move: Move, times: Floats) -> OtherWinnerPart | None:
    """Return the strategy that is more than 1 % faster than the first with other constants; `times`: [n], about."""
    name, logarithm, constants = move
    best = int(np.argmin(times))
    if times[best] >= times[0] / (1 + NEARLY_AS_FAST):
        return None
    then, other = model.with_constants(constants), contenders[best].strategy
    winner_s, best_s = (then.predict_time(one).iteration_time_s for one in (contenders[0].strategy, other))
    regret = winner_s / best_s - 1
    return _other(name, logarithm, other, regret) if regret > NEARLY_AS_FAST else None


def _other(
    name: str, logarithm: float, strategy: Strategy | None, regret: float, *, is_memory: bool = False
) -> OtherWinnerPart:
    found = None if strategy is None else strategy.to_json()
    return OtherWinnerPart(constant=name, change=expm1(logarithm), strategy=found, regret=regret, is_memory=is_memory)


def _memory_changes(contenders: Sequence[Ranked], moves: Sequence[Move], pricing: Pricing) -> list[OtherWinnerPart]:
    """Return the constants of the memory with which the winner needs more than the devices have."""

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

    found = []
    for name, logarithm, overheads in moves:
        if fits(0, overheads):
            continue
        other = next((entry for index, entry in enumerate(contenders) if fits(index, overheads)), None)
        regret = 0.0 if other is None else other.iteration_time_s / contenders[0].iteration_time_s - 1
        found.append(_other(name, logarithm, None if other is None else other.strategy, regret, is_memory=True))
    return found


def sensitivity_note(found: SensitivityPart) -> str | None:
    """Return the constants that decide the winner, in one line; None where none does."""
    if not found.changes:
        return None
    tried = f"{found.num_constants} constants, each moved by its uncertainty; {found.num_contenders} strategies"
    first, *others = found.changes
    other = None if first.strategy is None else strategy_text(first.strategy)
    if other is None:
        effect = "rank 1 does not fit the devices any more, and none of the others does"
    elif first.is_memory:
        effect = f"rank 1 does not fit the devices any more; {other} does, and takes {first.regret:.1%} longer"
    else:
        effect = f"{other} wins, and rank 1 takes {first.regret:.1%} longer"
    more = ""
    if others:
        listed = ", ".join(f"{each.constant} {each.change:+.0%} ({each.regret:.1%})" for each in others[:3])
        more = f"; so do {listed}{', ...' if len(others) > 3 else ''}"
    return f"the winner depends on {_moved(first)}: {effect}{more} ({tried})"


def network_note(found: SensitivityPart) -> str | None:
    """Return the bandwidths of network cards from which the winner changes; None where they are known."""
    given = found.network_bandwidth
    if given is None or found.num_contenders < 2:
        return None
    unknown = f"the network is not calibrated; {bandwidth_text(given)} a node are taken"
    lines = []
    for each in found.network:
        side, last = ("below", given / FACTOR) if each.bandwidth < given else ("above", given * FACTOR)
        other = "" if each.strategy is None else strategy_text(each.strategy)
        lines.append(
            f"{side} {bandwidth_text(each.bandwidth)} rank 1 is not the best: at {bandwidth_text(last)} {other} is "
            f"{each.regret:.0%} faster"
        )
    steady = f"rank 1 stays the best of {found.num_contenders} strategies from a quarter of it to four times as much"
    return f"{unknown}: {'; '.join(lines) or steady}"


def bandwidth_text(bytes_per_s: float) -> str:
    """Return a bandwidth of a network, in bits."""
    gbits = 8e-9 * bytes_per_s
    return f"{gbits:,.0f} Gbit/s" if gbits >= 10 else f"{gbits:.2g} Gbit/s"


def _moved(other: OtherWinnerPart) -> str:
    """Return a constant with its meaning, up to the first stop, and how far it is moved."""
    of_profile = field_texts(ProfileFactors)
    texts = field_texts(HardwareEfficiency) | field_texts(MemoryOverheads) | of_profile
    text = texts.get(other.constant, "").partition(";")[0].partition(":")[0].rstrip(".")
    text = f"{'on the profile, ' if other.constant in of_profile else ''}{text[:1].lower()}{text[1:]}"
    direction = "higher" if other.change > 0 else "lower"
    return f"{other.constant} ({text}) {abs(other.change):.0%} {direction}"


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
    return PUBLISHED.get(next(iter(cluster.generations))) if len(cluster.generations) == 1 else None


TOLERANCE = 0.03
"""Share of the peak by which a prediction may be above the best published one without a note."""


def check_utilization(entry: Ranked, problem: SearchProblem) -> UtilizationPart | None:
    """Return the doubt about a strategy that is predicted to beat all published runs; None for others."""
    published, speed = best_published(problem.cluster), speed_of(problem, entry.strategy, entry.iteration_time_s)
    used, causal = speed.mfu, speed.mfu_causal
    if published is None or used is None or causal is None or used <= published.share + TOLERANCE:
        return None
    # Else the difference is the convention, which counts scores that are not computed.
    is_too_fast = causal > published.causal_share
    return UtilizationPart(
        predicted=used,
        predicted_causal=causal,
        published=published.share,
        published_causal=published.causal_share,
        published_run=published.run,
        published_time_s=entry.iteration_time_s * causal / published.causal_share if is_too_fast else None,
    )


def utilization_note(check: UtilizationPart) -> str:
    """Return the doubt about an MFU above all published ones."""
    words = (
        f"an MFU of {check.predicted:.0%} is above the best published for such devices, {check.published:.0%} "
        f"({check.published_run})"
    )
    if check.published_time_s is None:
        return (
            f"{words}, because it counts scores that causal attention never computes; compare the causal MFU, "
            f"{check.predicted_causal:.0%} and {check.published_causal:.0%}"
        )
    return f"{words}: at that MFU rank 1 takes {time_text(check.published_time_s)}"
