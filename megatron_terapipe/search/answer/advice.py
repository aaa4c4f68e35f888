"""Advice with a ranking: possible changes, doubts, and the robustness of the winner.

advise                     after a search -> AdvicePart, as the document has it
advice_notes               the same in words, a line each
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.search.answer.decisions import NOT_ASKED, Training
from megatron_terapipe.search.answer.distance_to_fit import distance_to_fit
from megatron_terapipe.search.answer.figures import bytes_text, devices_of, strategy_text, time_text
from megatron_terapipe.search.answer.json_documents import (
    AdvicePart,
    DistancePart,
    FewerDevicesPart,
    FoundOrderPart,
    OtherWinnerPart,
    SensitivityPart,
    TooFullPart,
    UtilizationPart,
)
from megatron_terapipe.search.answer.sensitivity import FACTOR, check_utilization, sensitivity
from megatron_terapipe.search.learn.costs import Costs
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import smallest_device_with
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, ProfileFactors
from megatron_terapipe.search.price.memory import MemoryOverheads
from megatron_terapipe.search.rank.alternatives import on_fewer_devices, with_found_order, with_interleaved_slices
from megatron_terapipe.search.rank.grid_prices import FITS, HEADROOM, ProgressCallback, no_progress
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.search import SearchResult
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy

FOUND_ORDER = "found-order"
"""Folder, inside the folder of an answer, with the files that launch the winner with an order that was found."""

WORTH_SAYING = 0.02  # share of the time that leaving devices out must save before a note advises it

WORTH_CHANGING = 0.01
"""How much longer, as a share, the winner takes than another strategy before a note advises to look at that one."""

CHEAPER = 0.1  # share of the device hours that leaving devices out must save before a note advises it


def advise(
    result: SearchResult,
    problem: SearchProblem,
    constraints: Mapping[str, tuple[Any, ...]],
    costs: Costs,
    progress: ProgressCallback = no_progress,
    *,
    training: Training = NOT_ASKED,
) -> AdvicePart:
    """Return the advice that goes with the result of a search."""
    pricing = costs.pricing_on(problem.cluster)
    winner = next(iter(result.entries), None)
    found: dict[str, Any] = {"memory_headroom": problem.memory_headroom}
    if result.too_full is not None:
        found["too_full"] = too_full_part(result.too_full, winner, pricing)
    if winner is None:
        if result.counts.rejected[FITS] or result.counts.rejected[HEADROOM]:
            found["distance_to_fit"] = distance_to_fit(
                problem,
                constraints,
                lambda workload, cluster: replace(costs, workload=workload).pricing_on(cluster),
            )
        return AdvicePart.of(**found)
    order = with_found_order(winner, problem, constraints, pricing)
    interleaved = with_interleaved_slices(winner, problem, constraints, costs.pricing_on)
    parts = on_fewer_devices(winner, problem, constraints, costs.pricing_on, progress)
    return AdvicePart.of(
        **found,
        fewer_devices=[fewer_devices_part(part, entry, winner, problem, training) for part, entry in parts],
        sensitivity=sensitivity(result.contenders, pricing, costs.calibration),
        utilization=check_utilization(winner, problem),
        interleaved_slices=None if interleaved is None else found_order_part(interleaved, winner),
        found_order=None if order is None else found_order_part(order, winner),
    )


def too_full_part(entry: Ranked, winner: Ranked | None, pricing: Pricing) -> TooFullPart:
    """Return the fastest strategy without headroom; `winner`: None = no strategy leaves the headroom free."""
    held = zip(entry.price.memory, pricing.cost_model.groups(entry.strategy).smallest, strict=True)
    fullness = max(memory.total / device.memory_bytes for memory, device in held)
    return TooFullPart(
        strategy=entry.strategy.to_json(),
        iteration_time_s=entry.iteration_time_s,
        left_free=1 - fullness,
        could_save=None if winner is None else 1 - entry.iteration_time_s / winner.iteration_time_s,
    )


def found_order_part(entry: Ranked, winner: Ranked) -> FoundOrderPart:
    """Return an alternative to the winner."""
    return FoundOrderPart(
        strategy=entry.strategy.to_json(),
        iteration_time_s=entry.iteration_time_s,
        peak_memory_bytes=entry.price.peak_memory_bytes,
        could_save=1 - entry.iteration_time_s / winner.iteration_time_s,
    )


def fewer_devices_part(
    part: Cluster, entry: Ranked, winner: Ranked, problem: SearchProblem, training: Training = NOT_ASKED
) -> FewerDevicesPart:
    """Return the best strategy on a part of the cluster, compared with the winner on all of it."""
    ratio = entry.iteration_time_s / winner.iteration_time_s
    devices, all_devices = devices_of(part), devices_of(problem.cluster)
    price, on_all = training.hourly_price(devices), training.hourly_price(all_devices)
    return FewerDevicesPart(
        num_devices=part.num_devices,
        nodes=[node.name for node in part.nodes],
        strategy=entry.strategy.to_json(),
        iteration_time_s=entry.iteration_time_s,
        time_ratio=ratio,
        cost_ratio=ratio * part.num_devices / problem.cluster.num_devices,
        device_hours_ratio={name: ratio * devices.get(name, 0) / number for name, number in all_devices.items()},
        price_ratio=ratio * price / on_all if price and on_all else None,
    )


def advice_notes(advice: AdvicePart, problem: SearchProblem) -> list[str]:
    """Return the advice in words, a line each, the most important first."""
    lines = [
        _fewer_devices(advice.fewer_devices, problem.cluster),
        advice.found_order and _found_order(advice.found_order),
        advice.interleaved_slices and _interleaved_slices(advice.interleaved_slices),
        advice.too_full and _too_full(advice.too_full, problem),
        advice.utilization and _utilization(advice.utilization),
        advice.sensitivity and _sensitivity(advice.sensitivity),
        advice.sensitivity and _network(advice.sensitivity),
        # A strategy that is only too full for the headroom fits the devices.
        None if advice.distance_to_fit is None or advice.too_full is not None else _shortage(advice.distance_to_fit),
    ]
    return [line for line in lines if line]


def _strategy(document: Mapping[str, Any]) -> str:
    return strategy_text(Strategy.from_json(document))


def _fewer_devices(found: Sequence[FewerDevicesPart], cluster: Cluster) -> str | None:
    """Return a part of the cluster that is faster than all of it, or much cheaper for each token; None if none is."""

    def cost(part: FewerDevicesPart) -> float:
        return part.cost_ratio if part.price_ratio is None else part.price_ratio

    if not found:
        return None
    best, title, remedy = min(found, key=lambda part: part.time_ratio), "FEWER DEVICES ARE FASTER", ""
    if best.time_ratio > 1 - WORTH_SAYING:
        best = min(found, key=cost)
        if min(best.cost_ratio, cost(best)) > 1 - CHEAPER:
            return None
        # Devices of other kinds have other prices.
        is_cheaper = cost(best) <= 1 - CHEAPER and (best.price_ratio is not None or cluster.is_uniform)
        title = f"fewer devices {'are cheaper' if is_cheaper else 'take fewer device hours'}"
        remedy = "" if is_cheaper or best.price_ratio is not None else "--price to compare prices, or "
    hours = {name: ratio for name, ratio in best.device_hours_ratio.items() if ratio}
    without = " and ".join(sorted(best.device_hours_ratio.keys() - hours))
    kinds = " and ".join(f"{ratio:.2f} times those of {name}" for name, ratio in hours.items())
    return (
        f"{title}: on {best.num_devices} of the {cluster.num_devices} devices"
        f"{f', without the nodes of {without}' if without else ''}, an iteration takes "
        f"{time_text(best.iteration_time_s)} ({_strategy(best.strategy)}), {best.time_ratio:.2f} times as long as on "
        f"all, for {1 - best.cost_ratio:.0%} fewer device hours a token"
        f"{f', {kinds}' if len(best.device_hours_ratio) > 1 else ''}"
        f"{'' if best.price_ratio is None else f', at {best.price_ratio:.2f} times the price'}: "
        f"add {remedy}--devices-at-most {best.num_devices} to rank them"
    )


def _found_order(order: FoundOrderPart) -> str:
    """Return the time with a found order, and the folder of its files."""
    vocabulary = order.strategy["vocabulary_stages"]
    flags = f"--pipeline-schedule {OPTIMISED}{' --vocabulary-stages' if vocabulary else ''}"
    parts = " and the output layer in parts on all pipeline ranks" if vocabulary else ""
    return (
        f"with an order of ops that is found for it{parts} ({flags}) rank 1 takes "
        f"{time_text(order.iteration_time_s)}, {order.could_save:.0%} less: --output DIR writes it into "
        f"DIR/{FOUND_ORDER}; the trainer looks for the order before its first iteration"
    )


def _interleaved_slices(order: FoundOrderPart) -> str:
    return (
        f"{_strategy(order.strategy)} is predicted to take {time_text(order.iteration_time_s)}, {order.could_save:.0%} "
        "less, and is not ranked: interleaved schedules with token slices were published slower than 1F1B in three of "
        "four cases (by the authors of arXiv 2406.03488), and no trial on such devices has them; --schedule "
        f"interleaved --num-token-slices {order.strategy['num_token_slices']} ranks them"
    )


def _too_full(full: TooFullPart, problem: SearchProblem) -> str | None:
    """Return the cost of the headroom; None if it is small."""
    if full.could_save is not None and full.could_save < WORTH_CHANGING:
        return None
    saves = "" if full.could_save is None else f" and saves {full.could_save:.1%}"
    return (
        f"{_strategy(full.strategy)} takes {time_text(full.iteration_time_s)}, but leaves "
        f"{full.left_free:.1%} of a device's memory free, less than the {100 * problem.memory_headroom:.3g} % asked "
        f"for: --memory-headroom {math.floor(1000 * full.left_free) / 1000:g} allows it{saves}"
    )


def _utilization(check: UtilizationPart) -> str:
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


def _sensitivity(found: SensitivityPart) -> str | None:
    """Return the constants that decide the winner, in one line; None where none does."""
    if not found.changes:
        return None
    tried = f"{found.num_constants} constants, each moved by its uncertainty; {found.num_contenders} strategies"
    first, *others = found.changes
    other = None if first.strategy is None else _strategy(first.strategy)
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


def _network(found: SensitivityPart) -> str | None:
    """Return the bandwidths of network cards from which the winner changes; None where they are known."""
    given = found.network_bandwidth
    if given is None or found.num_contenders < 2:
        return None
    unknown = f"the network is not calibrated; {bandwidth_text(given)} a node are taken"
    lines = []
    for each in found.network:
        side, last = ("below", given / FACTOR) if each.bandwidth < given else ("above", given * FACTOR)
        other = "" if each.strategy is None else _strategy(each.strategy)
        lines.append(
            f"{side} {bandwidth_text(each.bandwidth)} rank 1 is not the best: at {bandwidth_text(last)} {other} is "
            f"{each.regret:.0%} faster"
        )
    if not lines:
        lines = [
            f"rank 1 stays the best of {found.num_contenders} strategies from a quarter of it to four times as much"
        ]
    return f"{unknown}: {'; '.join(lines)}"


def bandwidth_text(bytes_per_s: float) -> str:
    """Return a bandwidth of a network, in bits."""
    gbits = 8e-9 * bytes_per_s
    return f"{gbits:,.0f} Gbit/s" if gbits >= 10 else f"{gbits:.2g} Gbit/s"


def _moved(other: OtherWinnerPart) -> str:
    return f"{_constant(other.constant)} {abs(other.change):.0%} {'higher' if other.change > 0 else 'lower'}"


def _constant(name: str) -> str:
    """Return a constant with its meaning, up to the first stop."""
    meaning = _constant_texts().get(name, "").partition(";")[0].partition(":")[0].rstrip(".")
    return f"{name} ({meaning})" if meaning else name


@cache
def _constant_texts() -> dict[str, str]:
    """Meaning of each constant of the cost model, in lower case as within a sentence."""
    texts = field_texts(HardwareEfficiency) | field_texts(MemoryOverheads)
    texts = {name: text[:1].lower() + text[1:] for name, text in texts.items()}
    of_profile = field_texts(ProfileFactors).items()
    return texts | {name: f"on the profile, {text[:1].lower()}{text[1:]}" for name, text in of_profile}


def _shortage(distance: DistancePart) -> str:
    """Return the memory of the fullest device of the nearest strategy, by kind."""
    parts = sorted((each for each in distance.memory.items() if each[0] != "total"), key=lambda part: -part[1])
    listed = ", ".join(f"{name.replace('_', ' ')} {bytes_text(number)}" for name, number in parts if number > 0)
    return (
        f"the nearest strategy, {_strategy(distance.strategy)}, needs on pipeline rank {distance.pipeline_rank}: "
        f"{listed}; together {bytes_text(distance.memory['total'])} of {bytes_text(distance.usable_bytes)}. With the "
        f"optimizer state in the memory of the host ({bytes_text(distance.memory['optimizer'])} less) it would "
        f"{'fit' if distance.fits_with_optimizer_on_host else 'not fit either'}: Megatron-core "
        "(--optimizer-cpu-offload) and DeepSpeed without a pipeline offload it, terapipe only token slices"
    )


def distance_text(distance: DistancePart, problem: SearchProblem) -> str:
    """Return the missing memory and the changes with which the model fits, in one line."""
    kept = f" ({100 * problem.memory_headroom:.3g} % kept free)" if problem.memory_headroom else ""
    return (
        f"the nearest needs {bytes_text(distance.memory['total'])} on a device, of {bytes_text(distance.usable_bytes)} "
        f"that a {distance.device} has{kept}; it would fit with {remedies_text(distance, problem)}"
    )


def remedies_text(distance: DistancePart, problem: SearchProblem) -> str:
    """Return the single changes with which the model fits."""
    words = []
    for remedy in distance.remedies:
        if remedy.kind == "constraint" and remedy.value:
            words.append(f"--{str(remedy.value).replace('_', '-')} free")
        elif remedy.kind == "devices":
            nodes = int(remedy.value) * len(problem.cluster.nodes) // problem.cluster.num_devices
            words.append(f"{remedy.value} such devices ({nodes} nodes)")
        elif remedy.value:
            words.append(f"--{remedy.kind.replace('_', '-')} {remedy.value}")
    example = smallest_device_with(distance.device_bytes)
    such = "" if example is None else f", such as {example.name}"
    words.append(f"devices of {bytes_text(math.ceil(distance.device_bytes / 1e9) * 1e9)}{such}")
    lifted = [remedy.value for remedy in distance.remedies if remedy.kind == "constraint"]
    return " or ".join([*words, "no flag that fixes a dimension"] if lifted == [""] else words)
