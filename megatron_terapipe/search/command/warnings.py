"""Warnings about the winner of a ranking: memory that is nearly full, and devices that it would be better without."""

import math
from collections.abc import Sequence

from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.rank.fewer_devices import FewerDevices
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.search import SearchResult
from megatron_terapipe.search.report.figures import strategy_text, time_text
from megatron_terapipe.search.space.problem import MEMORY_HEADROOM, SearchProblem

FULL = 1 - MEMORY_HEADROOM
"""Share of a device's memory above which a prediction that is a few per cent off means out of memory."""

WORTH_SAYING = 0.02
"""Share of the time that leaving devices out must save before a note says so."""

CHEAPER = 0.1
"""Share of the device hours that leaving devices out must save before a note says so."""


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


def fewer_devices_note(found: Sequence[FewerDevices], problem: SearchProblem) -> str | None:
    """Return that a part of the cluster is faster than all of it, or much cheaper for each token; None if none is.

    Args:
        found: parts that were tried.
        problem: what was asked.
    """
    best = min(found, key=lambda part: part.time_ratio, default=None)
    if best is not None and best.time_ratio <= 1 - WORTH_SAYING:
        return (
            f"FEWER DEVICES ARE FASTER: {_on_part(best, problem)}, {1 - best.time_ratio:.0%} less than rank 1, which "
            f"uses all: {_add(best)}"
        )
    # Devices of other kinds have other prices.
    alike = [part for part in found if part.cluster.is_uniform and problem.cluster.is_uniform]
    best = min(alike, key=lambda part: part.cost_ratio, default=None)
    if best is None or best.cost_ratio > 1 - CHEAPER:
        return None
    return (
        f"fewer devices are cheaper: {_on_part(best, problem)}, {best.time_ratio:.2g} times as long as rank 1, for "
        f"{1 - best.cost_ratio:.0%} fewer device hours a token: {_add(best)}"
    )


def _on_part(part: FewerDevices, problem: SearchProblem) -> str:
    assert part.entry.prediction is not None
    names = {node.device.name for node in problem.cluster.nodes} - {node.device.name for node in part.cluster.nodes}
    without = f", without the nodes of {' and '.join(sorted(names))}" if names else ""
    return (
        f"on {part.cluster.num_devices} of the {problem.cluster.num_devices} devices{without}, an iteration takes "
        f"{time_text(part.entry.prediction.iteration_time_s)} ({strategy_text(part.entry.strategy)})"
    )


def _add(part: FewerDevices) -> str:
    return f"add --devices-at-most {part.cluster.num_devices} to rank them"
