"""Advice beside a ranking: what to change, what to doubt, and how sure the winner is; in words, and as JSON.

RivalAdvice, rival_note   ZeRO-3 with Ulysses beside the winner
Advice, advice_notes      fewer devices, a found order, headroom, MFU, sensitivity, distance to fit: a line each
advice_part               the same as an object of the JSON document (`json_schema.AdvicePart`)
"""

import math
from dataclasses import asdict, dataclass
from functools import cache

from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.search.answer.figures import bytes_text, model_flops, strategy_text, time_text
from megatron_terapipe.search.answer.json_schema import (
    AdvicePart,
    DistancePart,
    FewerDevicesPart,
    FoundOrderPart,
    OtherWinnerPart,
    RemedyPart,
    RivalPart,
    SensitivityPart,
    TooFullPart,
    UtilizationPart,
)
from megatron_terapipe.search.answer.utilisation import UtilizationCheck
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import is_guess, smallest_device_with
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, ProfileFactors
from megatron_terapipe.search.price.memory import MemoryOverheads
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.alternatives import FewerDevices
from megatron_terapipe.search.rank.distance_to_fit import DistanceToFit, Remedy
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.rivals import Rival
from megatron_terapipe.search.rank.sensitivity import CHANGE, OtherWinner, Sensitivity
from megatron_terapipe.search.rank.space import MEMORY_HEADROOM, SearchProblem

NAME = "ZeRO-3 with Ulysses"
TRAINER = "DeepSpeed's ALST"

FASTER = 0.98
"""Seconds of a rival in those of the winner up to which a note advises it: predictions are not exact."""


@dataclass(frozen=True, kw_only=True)
class RivalAdvice:
    """A rival beside our best strategy."""

    rival: Rival
    """The rival."""
    num_devices: int
    """Devices of the cluster, of which it may use a part."""
    time_ratio: float | None
    """Its seconds in those of our best strategy; None = nothing of ours fits."""
    mfu_causal: float | None
    """FLOPs of the model over the peak of the devices in use, without the scores that causal attention never computes;
    None where the peak is a guess."""


def compare_rival(rival: Rival, winner: Ranked | None, workload: Workload, cluster: Cluster) -> RivalAdvice:
    """Return a rival beside our best strategy.

    Args:
        winner: our best strategy; None = nothing fits.
    """
    ratio = None
    if winner is not None and winner.prediction is not None:
        ratio = rival.time.total_s / winner.prediction.iteration_time_s
    return RivalAdvice(
        rival=rival,
        num_devices=cluster.num_devices,
        time_ratio=ratio,
        mfu_causal=_rival_utilization(rival, workload, cluster),
    )


def _rival_utilization(rival: Rival, workload: Workload, cluster: Cluster) -> float | None:
    if any(is_guess(node.device.name) for node in cluster.nodes):
        return None
    peaks = [node.device.peak_flops("bf16") for node in cluster.nodes for _ in range(node.num_devices)]
    flops = model_flops(workload, causal=True) * rival.settings.num_sequences
    return flops / (rival.time.total_s * sum(peaks[: rival.settings.num_ranks]))


def rival_note(advice: RivalAdvice) -> str:
    """Return one line on a rival: how long it takes, whether it fits, and which of the two to run."""
    rival, settings = advice.rival, advice.rival.settings
    over = f"{settings.num_ranks} ranks"
    if settings.num_ranks < advice.num_devices:
        over = f"{settings.num_ranks} of the {advice.num_devices} devices"
    if settings.data_parallel_size > 1:
        over += f", {settings.sequence_parallel_size} to a sequence"
    offloaded = f"; on the host: {', '.join(settings.on_host)}" if settings.on_host else ""
    compared = "" if advice.time_ratio is None else f", {advice.time_ratio:.3g} times as long as rank 1"
    line = f"{NAME} over {over} ({TRAINER}{offloaded}) would take {time_text(rival.time.total_s)} (predicted){compared}"
    why_not = why_it_does_not_fit(rival)
    if why_not is not None:
        return f"{line}; it does not fit, because {why_not}"
    held = f"{bytes_text(rival.memory.device)} of a device"
    if settings.on_host:
        held += f" and {bytes_text(rival.memory.host)} of a host"
    better = advice.time_ratio is None or advice.time_ratio <= FASTER
    return f"{line}; it fits, with {held}{': train this model without a pipeline' if better else ''}"


def why_it_does_not_fit(rival: Rival) -> str | None:
    """Return what is too small for a rival, in words; None if it fits."""
    memory, limits = rival.memory, rival.limits
    missing = []
    if memory.device > limits.device:
        missing.append(f"it needs {bytes_text(memory.device)} of a device, of {bytes_text(limits.device)}")
    if memory.host > limits.host:
        missing.append(f"it needs {bytes_text(memory.host)} of a host, of {bytes_text(limits.host)}")
    return " and ".join(missing) or None


def rival_part(advice: RivalAdvice) -> RivalPart:
    """Return what a document says of a rival."""
    rival, settings = advice.rival, advice.rival.settings
    return RivalPart(
        name=NAME,
        trainer=TRAINER,
        sequence_parallel_size=settings.sequence_parallel_size,
        data_parallel_size=settings.data_parallel_size,
        micro_batch_size=settings.micro_batch_size,
        on_host=list(settings.on_host),
        iteration_time_s=rival.time.total_s,
        breakdown=asdict(rival.time),
        time_ratio=advice.time_ratio,
        mfu_causal=advice.mfu_causal,
        device_bytes=rival.memory.device,
        host_bytes=rival.memory.host,
        why_not=why_it_does_not_fit(rival),
    )


FOUND_ORDER = "found-order"
"""Folder, in that of an answer, with the files that launch the winner with an order that was found."""

WORTH_SAYING = 0.02
"""Share of the time that leaving devices out must save before a note says so."""

WORTH_CHANGING = 0.01
"""How much longer, as a share, the winner takes than another strategy before a note advises to look at that one."""

CHEAPER = 0.1
"""Share of the device hours that leaving devices out must save before a note says so."""


@dataclass(frozen=True, kw_only=True)
class TooFull:
    """The fastest strategy that fits the devices and does not leave the headroom free."""

    entry: Ranked
    """The strategy and its price."""
    left_free: float
    """Share of the fullest device that it leaves free."""
    could_save: float | None
    """Share of the winner's time that it would save; None = nothing leaves the headroom free."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do with an answer."""

    memory_headroom: float = MEMORY_HEADROOM
    """Share of each device that every ranked strategy leaves free."""
    too_full: TooFull | None = None
    """A faster strategy without headroom; None = there is none."""
    fewer_devices: tuple[FewerDevices, ...] = ()
    """Parts of the cluster that were tried, largest first."""
    sensitivity: Sensitivity | None = None
    """Constants that decide who wins; None = there is no winner."""
    utilization: UtilizationCheck | None = None
    """A utilisation that nobody has published; None = the winner's is believable, or nothing is known."""
    distance: DistanceToFit | None = None
    """How far the model is from fitting; None = it fits, or no strategy keeps the other rules."""
    rivals: tuple[RivalAdvice, ...] = ()
    """What would be run in place of this trainer."""
    found_order: Ranked | None = None
    """The winner with an order of its ops that was searched for; None = none saves time."""
    found_order_saves: float = 0.0
    """Share of the winner's time that it saves."""


def advice_notes(advice: Advice, problem: SearchProblem) -> list[str]:
    """Return the advice in words, a line each, what matters most first."""
    lines = [
        _fewer_devices(advice.fewer_devices, problem),
        None if advice.found_order is None else _found_order(advice.found_order, advice.found_order_saves),
        None if advice.too_full is None else _too_full(advice.too_full, problem),
        None if advice.utilization is None else _utilization(advice.utilization),
        None if advice.sensitivity is None else _sensitivity(advice.sensitivity),
        # What fits but for the memory to keep free needs no more than the devices have.
        None if advice.distance is None or advice.too_full is not None else _shortage(advice.distance),
    ]
    return [line for line in lines if line is not None]


def _fewer_devices(found: tuple[FewerDevices, ...], problem: SearchProblem) -> str | None:
    """Return that a part of the cluster is faster than all of it, or much cheaper for each token; None if none is."""
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
        f"fewer devices are cheaper: {_on_part(best, problem)}, {best.time_ratio:.2f} times as long as on all, for "
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


def _found_order(entry: Ranked, saves: float) -> str:
    """Return what an order that is searched for takes, and where its files are."""
    assert entry.prediction is not None
    vocabulary = entry.strategy.vocabulary_stages
    flags = f"--pipeline-schedule {OPTIMISED}{' --vocabulary-stages' if vocabulary else ''}"
    parts = " and the output layer in parts on all pipeline ranks" if vocabulary else ""
    return (
        f"with an order of ops that is found for it{parts} ({flags}) rank 1 takes "
        f"{time_text(entry.prediction.iteration_time_s)}, {saves:.0%} less: --output DIR writes it into "
        f"DIR/{FOUND_ORDER}; the trainer looks for the order before its first iteration"
    )


def _too_full(full: TooFull, problem: SearchProblem) -> str | None:
    """Return what keeping memory free costs; None if that is next to nothing."""
    assert full.entry.prediction is not None
    if full.could_save is not None and full.could_save < WORTH_CHANGING:
        return None
    saves = "" if full.could_save is None else f" and saves {full.could_save:.1%}"
    return (
        f"{strategy_text(full.entry.strategy)} takes {time_text(full.entry.prediction.iteration_time_s)}, but leaves "
        f"{full.left_free:.1%} of a device's memory free, less than the {100 * problem.memory_headroom:.3g} % asked "
        f"for: --memory-headroom {math.floor(1000 * full.left_free) / 1000:g} allows it{saves}"
    )


def _utilization(check: UtilizationCheck) -> str:
    """Return what an MFU that nobody has published rests on."""
    words = (
        f"rank 1 is predicted to reach an MFU of {check.predicted:.0%} ({check.predicted_causal:.0%} with causal "
        f"attention), and the best published for such devices is {check.published.share:.0%} "
        f"({check.published.causal_share:.0%}; {check.published.run})"
    )
    doubted = check.constant
    if doubted is None:
        return (
            f"{words}: it is higher because the usual MFU counts scores that causal attention never computes, and "
            "sequences are long; compare the causal MFU"
        )
    words = f"{words}; it rests on {_constant(doubted.name)} = {doubted.value:.3g}"
    if doubted.needed is None:
        return f"{words} most, which alone does not explain it: calibrate on trials"
    return f"{words}, and with {doubted.needed:.3g} it would be as published: calibrate on trials"


def _sensitivity(found: Sensitivity) -> str | None:
    """Return which constant decides who wins, in one line; None if nothing was compared."""
    if found.num_contenders < 2 and not found.changes:
        return None
    tried = f"{found.num_constants} constants, {found.num_contenders} strategies"
    if not found.changes:
        near = ""
        if found.nearest is not None and found.nearest.strategy is not None:
            near = f"; the first to change it is {_moved(found.nearest)}: {strategy_text(found.nearest.strategy)}"
        return f"no constant that is {CHANGE:.0%} off changes the winner ({tried}){near}"
    first, *others = found.changes
    if first.regret < WORTH_CHANGING and first.strategy is not None and not any(each.is_memory for each in others):
        return (
            f"no constant that is {CHANGE:.0%} off makes rank 1 more than {first.regret:.1%} slower than another "
            f"strategy; with {_moved(first)} that is {strategy_text(first.strategy)} ({tried})"
        )
    if first.strategy is None:
        effect = "rank 1 does not fit the devices any more, and none of the others does"
    elif first.is_memory:
        effect = (
            f"rank 1 does not fit the devices any more; {strategy_text(first.strategy)} does, and takes "
            f"{first.regret:.1%} longer"
        )
    else:
        effect = f"{strategy_text(first.strategy)} wins, and rank 1 takes {first.regret:.1%} longer"
    more = ""
    if others:
        listed = ", ".join(f"{each.constant} {each.change:+.0%} ({each.regret:.1%})" for each in others[:3])
        more = f"; so do {listed}{', ...' if len(others) > 3 else ''}"
    return f"the winner depends on {_moved(first)}: {effect}{more} ({tried})"


def _moved(other: OtherWinner) -> str:
    word = "higher" if other.change > 0 else "lower"
    return f"{_constant(other.constant)} {abs(other.change):.0%} {word}"


def _constant(name: str) -> str:
    """Return a constant with its meaning, up to the first stop."""
    meaning = _constant_texts().get(name, "").partition(";")[0].partition(":")[0].rstrip(".")
    return f"{name} ({meaning})" if meaning else name


def _shortage(distance: DistanceToFit) -> str:
    """Return the memory of the fullest device of the nearest strategy, by kind."""
    nearest = distance.nearest
    parts = sorted(asdict(nearest.memory).items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name.replace('_', ' ')} {bytes_text(number)}" for name, number in parts if number > 0)
    return (
        f"the nearest strategy, {strategy_text(nearest.strategy)}, needs on pipeline rank {nearest.rank}: {listed}; "
        f"together {bytes_text(nearest.memory.total)} of {bytes_text(nearest.usable_bytes)}"
    )


def distance_text(distance: DistanceToFit, problem: SearchProblem) -> str:
    """Return how far the model is from fitting and what would make it fit, in one line."""
    nearest = distance.nearest
    kept = f" ({100 * problem.memory_headroom:.3g} % kept free)" if problem.memory_headroom else ""
    return (
        f"the nearest needs {bytes_text(nearest.memory.total)} on a device, of {bytes_text(nearest.usable_bytes)} that "
        f"a {nearest.device.name} has{kept}; it would fit with {remedies_text(distance, problem)}"
    )


def remedies_text(distance: DistanceToFit, problem: SearchProblem) -> str:
    """Return what would make the model fit, any one of these."""
    remedies = [*(_remedy(each, problem) for each in distance.remedies if each.value != ""), _larger(distance)]
    if not any(each.kind == "constraint" and each.value for each in distance.remedies):
        remedies += ["no flag that fixes a dimension" for each in distance.remedies if each.value == ""]
    return " or ".join(remedies)


def _remedy(remedy: Remedy, problem: SearchProblem) -> str:
    if remedy.kind == "constraint":
        return f"--{str(remedy.value).replace('_', '-')} free"
    if remedy.kind == "devices":
        nodes = int(remedy.value) * len(problem.cluster.nodes) // problem.cluster.num_devices
        return f"{remedy.value} such devices ({nodes} nodes)"
    return f"--{remedy.kind.replace('_', '-')} {remedy.value}"


def _larger(distance: DistanceToFit) -> str:
    """Return the devices that the nearest strategy fits, and the smallest of the library that is as large."""
    needed = distance.nearest.device_bytes
    example = smallest_device_with(needed)
    such = "" if example is None else f", such as {example.name}"
    return f"devices of {bytes_text(math.ceil(needed / 1e9) * 1e9)}{such}"


@cache
def _constant_texts() -> dict[str, str]:
    """Meaning of each constant of the cost model, in lower case as within a sentence."""
    texts = field_texts(HardwareEfficiency) | field_texts(MemoryOverheads)
    texts = {name: text[:1].lower() + text[1:] for name, text in texts.items()}
    of_profile = field_texts(ProfileFactors).items()
    return texts | {name: f"on the profile, {text[:1].lower()}{text[1:]}" for name, text in of_profile}


def advice_part(advice: Advice) -> AdvicePart:
    """Return what a document says of advice."""
    return AdvicePart(
        memory_headroom=advice.memory_headroom,
        too_full=None if advice.too_full is None else _too_full_part(advice.too_full),
        fewer_devices=[_fewer_devices_part(part) for part in advice.fewer_devices],
        sensitivity=None if advice.sensitivity is None else _sensitivity_part(advice.sensitivity),
        utilization=None if advice.utilization is None else _utilization_part(advice.utilization),
        distance_to_fit=None if advice.distance is None else _distance_part(advice.distance),
        rivals=[rival_part(each) for each in advice.rivals],
        found_order=None
        if advice.found_order is None
        else _found_order_part(advice.found_order, advice.found_order_saves),
    )


def _found_order_part(entry: Ranked, saves: float) -> FoundOrderPart:
    assert entry.prediction is not None
    return FoundOrderPart(
        strategy=entry.strategy.to_json(),
        iteration_time_s=entry.prediction.iteration_time_s,
        peak_memory_bytes=entry.prediction.peak_memory_bytes,
        could_save=saves,
    )


def _too_full_part(full: TooFull) -> TooFullPart:
    assert full.entry.prediction is not None
    return TooFullPart(
        strategy=full.entry.strategy.to_json(),
        iteration_time_s=full.entry.prediction.iteration_time_s,
        left_free=full.left_free,
        could_save=full.could_save,
    )


def _fewer_devices_part(part: FewerDevices) -> FewerDevicesPart:
    assert part.entry.prediction is not None
    return FewerDevicesPart(
        num_devices=part.cluster.num_devices,
        nodes=[node.name for node in part.cluster.nodes],
        strategy=part.entry.strategy.to_json(),
        iteration_time_s=part.entry.prediction.iteration_time_s,
        time_ratio=part.time_ratio,
        cost_ratio=part.cost_ratio,
    )


def _sensitivity_part(found: Sensitivity) -> SensitivityPart:
    return SensitivityPart(
        changes=[_other_winner_part(each) for each in found.changes],
        nearest=None if found.nearest is None else _other_winner_part(found.nearest),
        num_constants=found.num_constants,
        num_contenders=found.num_contenders,
    )


def _other_winner_part(other: OtherWinner) -> OtherWinnerPart:
    return OtherWinnerPart(
        constant=other.constant,
        change=other.change,
        strategy=None if other.strategy is None else other.strategy.to_json(),
        regret=other.regret,
        is_memory=other.is_memory,
    )


def _utilization_part(check: UtilizationCheck) -> UtilizationPart:
    doubted = check.constant
    return UtilizationPart(
        predicted=check.predicted,
        predicted_causal=check.predicted_causal,
        published=check.published.share,
        published_causal=check.published.causal_share,
        published_run=check.published.run,
        constant=None if doubted is None else doubted.name,
        value=None if doubted is None else doubted.value,
        needed=None if doubted is None else doubted.needed,
    )


def _distance_part(distance: DistanceToFit) -> DistancePart:
    nearest = distance.nearest
    return DistancePart(
        strategy=nearest.strategy.to_json(),
        pipeline_rank=nearest.rank,
        memory={**asdict(nearest.memory), "total": nearest.memory.total},
        device=nearest.device.name,
        usable_bytes=nearest.usable_bytes,
        device_bytes=nearest.device_bytes,
        remedies=[
            RemedyPart(kind=each.kind, value=each.value, strategy=each.found.strategy.to_json())
            for each in distance.remedies
        ],
    )
