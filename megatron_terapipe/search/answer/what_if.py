"""Changes of a question (what-if): the same question with one change, the answer of a second search, and a line.

    Question.changed     the same question with other values of flags, or another model, cluster, batch or trainer
    with_found_order, with_interleaved_slices, on_fewer_devices     changes that may save time or device hours
    distance_to_fit      where nothing fits: the nearest strategy, and the single changes with which one fits
    advise               all of them, and `sensitivity.py` -> AdvicePart; `advice_notes` has a line for each

A search compares the schedules that have a closed form. Only the winner is then priced with `optimised`, and where the
model has an output layer of its own also with that layer in parts, one on each pipeline rank (`--vocabulary-stages`):
up to 32 K tokens it is 13 to 19 % faster in simulation, from 512 K tokens on hardly at all.

Every strategy of a ranking uses all devices. Slow links, slow devices or a small batch may make some of them useless.
The parts of a cluster that are tried are the fastest kinds of devices of a mixed one, and a half, a quarter, ... of its
nodes down to one. Each gets a short search near the winner: enough to see whether it is worth a search of its own.

The strategy nearest to fitting needs the smallest multiple of the memory of its fullest device. Each remedy is proven:
with it a strategy leaves the headroom free, counted exactly.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.config.model import why_vocabulary_stays_whole
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.decisions import NOT_ASKED, Training
from megatron_terapipe.search.answer.figures import bytes_text, devices_of, strategy_text, time_text
from megatron_terapipe.search.answer.json_documents import (
    AdvicePart,
    DistancePart,
    FewerDevicesPart,
    FoundOrderPart,
    RemedyKind,
    RemedyPart,
    TooFullPart,
)
from megatron_terapipe.search.answer.sensitivity import (
    check_utilization,
    network_note,
    sensitivity,
    sensitivity_note,
    utilization_note,
)
from megatron_terapipe.search.learn.costs import Costs
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import smallest_device_with
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.makespan import num_searched_ops
from megatron_terapipe.search.price.memory import SHARE_OF_HOST
from megatron_terapipe.search.price.stages import pipeline_shape
from megatron_terapipe.search.price.workload import IMBALANCE, gpt_workload
from megatron_terapipe.search.rank.grid_prices import FITS, HEADROOM, GridMemory, ProgressCallback, no_progress
from megatron_terapipe.search.rank.rules import LegalGrid, SearchCounts, legal_grids
from megatron_terapipe.search.rank.search import Ranked, SearchResult, priced, search
from megatron_terapipe.search.rank.space import Choices, SearchProblem, all_choices
from megatron_terapipe.strategy import DIMENSIONS, SOLVED, Strategy

EFFORT = 0.1  # effort of a second search


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question of a search."""

    problem: SearchProblem
    constraints: Mapping[str, tuple[Any, ...]]
    """Values that flags allow for dimensions, by name."""
    costs: Costs

    def changed(self, constraints: Mapping[str, tuple[Any, ...]] | None = None, **changes: Any) -> "Question":
        """Return the question with other constraints, or other fields of its problem."""
        problem = replace(self.problem, **changes)
        # A profile was measured with one trainer.
        profile = self.costs.profile if problem.software == self.problem.software else None
        return Question(
            problem=problem,
            constraints=self.constraints if constraints is None else constraints,
            costs=replace(self.costs, workload=problem.workload, software=problem.software, profile=profile),
        )

    @cached_property
    def choices(self) -> Choices:
        """The values of each dimension that are searched."""
        return all_choices(self.problem).constrained(self.constraints)

    @cached_property
    def pricing(self) -> Pricing:
        """Prices on the cluster in the order of its hostfile."""
        return self.costs.pricing_on(self.problem.cluster)

    def search(self, *, effort: float = EFFORT, progress: ProgressCallback = no_progress) -> SearchResult:
        """Return the best strategy, without solvers."""
        return search(
            self.problem, self.choices, self.costs.pricing_on, top=1, effort=effort, refine=False, progress=progress
        )


def advise(
    asked: Question, result: SearchResult, progress: ProgressCallback = no_progress, training: Training = NOT_ASKED
) -> AdvicePart:
    """Return the advice that goes with the result of a search."""
    problem, winner = asked.problem, next(iter(result.entries), None)
    found: dict[str, Any] = {"memory_headroom": problem.memory_headroom}
    if result.too_full is not None:
        found["too_full"] = too_full_part(result.too_full, winner, asked.pricing)
    if winner is None:
        if result.counts.rejected[FITS] or result.counts.rejected[HEADROOM]:
            found["distance_to_fit"] = distance_to_fit(asked)
        return AdvicePart(**found)
    parts = on_fewer_devices(asked, winner, progress)
    return AdvicePart(
        **found,
        fewer_devices=[fewer_devices_part(part, entry, winner, problem, training) for part, entry in parts],
        sensitivity=sensitivity(result.contenders, asked.pricing, asked.costs.calibration),
        utilization=check_utilization(winner, problem),
        interleaved_slices=alternative_part(with_interleaved_slices(asked, winner), winner),
        found_order=alternative_part(with_found_order(asked, winner), winner),
    )


def advice_notes(advice: AdvicePart, problem: SearchProblem) -> list[str]:
    """Return the advice in words, a line each, the most important first."""
    lines = [
        _fewer_devices_note(advice.fewer_devices, problem.cluster),
        advice.found_order and _found_order_note(advice.found_order),
        advice.interleaved_slices and _interleaved_slices_note(advice.interleaved_slices),
        advice.too_full and _too_full_note(advice.too_full, problem),
        advice.utilization and utilization_note(advice.utilization),
        advice.sensitivity and sensitivity_note(advice.sensitivity),
        advice.sensitivity and network_note(advice.sensitivity),
        # A strategy that is only too full for the headroom fits the devices.
        advice.distance_to_fit and not advice.too_full and _shortage_note(advice.distance_to_fit),
    ]
    return [line for line in lines if line]


FOUND_ORDER = "found-order"
"""Folder, inside the folder of an answer, with the files that launch the winner with an order that was found."""

MOST_OPS = 10_000  # ops of an order that is searched for: more would take longer than all the rest of a search
WORTH_FINDING = 0.01  # share of the winner's time that an alternative must save


def with_found_order(asked: Question, winner: Ranked) -> Ranked | None:
    """Return the winner with the faster of the orders that are found for it; None where flags name a schedule."""
    problem, strategy = asked.problem, winner.strategy
    if (
        "schedule" in asked.constraints
        or strategy.pipeline_parallel_size == 1
        or strategy.offload
        or num_searched_ops(pipeline_shape(strategy)) > MOST_OPS
        or problem.software.name != TERAPIPE.name
    ):
        return None
    tried = [replace(strategy, schedule=OPTIMISED)]
    model, ranks = problem.workload.config, (strategy.pipeline_parallel_size, strategy.tensor_parallel_size)
    # Stages that were balanced around a whole output layer are not balanced without it.
    given = strategy.stage_partition if "stage_partition" in asked.constraints else "uniform"
    if (
        model is not None
        and given != "parameters"
        and not why_vocabulary_stays_whole(model, pipeline_ranks=ranks[0], tensor_ranks=ranks[1])
    ):
        tried.append(replace(tried[0], vocabulary_stages=True, stage_partition=given))
    found = []
    for each in tried:
        with suppress(ConfigError, PlanError):  # no layers for so many stages, or no order within the memory
            found.append(priced(each, asked.pricing, problem.memory_headroom))
    return min(filter(None, found), key=lambda entry: entry.sort_key(0.0), default=None)


def with_interleaved_slices(asked: Question, winner: Ranked) -> Ranked | None:
    """Return the best interleaved schedule with token slices on the winner's layout, where rankings leave it out.

    They do until a trial has it (`rules.UNPROVEN`).
    """
    several = {
        name: tuple(each for each in asked.choices[name] if each > 1)
        for name in ("num_model_chunks", "num_token_slices")
    }
    if (
        asked.problem.may_interleave_slices
        or "interleaved" not in asked.choices["schedule"]
        or winner.strategy.pipeline_parallel_size == 1
        or not all(several.values())
    ):
        return None
    layout = {each.name: (getattr(winner.strategy, each.name),) for each in DIMENSIONS if each.ranks}
    constraints = {**asked.constraints, **layout, **several, "schedule": ("interleaved",)}
    return next(iter(asked.changed(constraints, interleaves_token_slices=True).search().entries), None)


def alternative_part(entry: Ranked | None, winner: Ranked) -> FoundOrderPart | None:
    """Return an alternative to the winner; None if it saves too little of its time."""
    if entry is None or entry.iteration_time_s > (1 - WORTH_FINDING) * winner.iteration_time_s:
        return None
    return FoundOrderPart(
        strategy=entry.strategy.to_json(),
        iteration_time_s=entry.iteration_time_s,
        peak_memory_bytes=entry.price.peak_memory_bytes,
        could_save=1 - entry.iteration_time_s / winner.iteration_time_s,
    )


def _found_order_note(order: FoundOrderPart) -> str:
    """Return the time with a found order, and the folder of its files."""
    vocabulary = order.strategy["vocabulary_stages"]
    flags = f"--pipeline-schedule {OPTIMISED}{' --vocabulary-stages' if vocabulary else ''}"
    parts = " and the output layer in parts on all pipeline ranks" if vocabulary else ""
    return (
        f"with an order of ops that is found for it{parts} ({flags}) rank 1 takes "
        f"{time_text(order.iteration_time_s)}, {order.could_save:.0%} less: --output DIR writes it into "
        f"DIR/{FOUND_ORDER}; the trainer looks for the order before its first iteration"
    )


def _interleaved_slices_note(order: FoundOrderPart) -> str:
    return (
        f"{strategy_text(order.strategy)} is predicted to take {time_text(order.iteration_time_s)}, "
        f"{order.could_save:.0%} less, and is not ranked: interleaved schedules with token slices were published "
        "slower than 1F1B in three of four cases (by the authors of arXiv 2406.03488), and no trial on such devices "
        "has them; --schedule "
        f"interleaved --num-token-slices {order.strategy['num_token_slices']} ranks them"
    )


LEAST_COMPUTE = 0.6
"""Compute of the best strategy on a part, relative to the winner, at least: it may recompute less and cut into larger
pieces. A part that would take longer than the winner even so is not searched for its time."""


def on_fewer_devices(
    asked: Question, winner: Ranked, progress: ProgressCallback = no_progress
) -> list[tuple[Cluster, Ranked]]:
    """Return the parts of the cluster that may be faster or cheaper than all of it, and the best strategy on each."""
    found: list[tuple[Cluster, Ranked]] = []
    whole = asked.problem.cluster
    nearest, larger = winner, whole
    for number in sizes_of_parts(whole):
        part = whole.at_most(number)
        # The first half gives the cost of a token; smaller parts are searched if they may be faster.
        is_half = larger is whole and 2 * number >= whole.num_devices
        same_kinds = {node.device for node in part.nodes} == {node.device for node in larger.nodes}
        least_s = LEAST_COMPUTE * nearest.price.breakdown.compute_s * larger.num_devices / number
        if same_kinds and not is_half and least_s >= winner.iteration_time_s:
            continue
        constraints = {**_near(nearest.strategy, asked.constraints), **asked.constraints}
        if entries := asked.changed(constraints, cluster=part).search(progress=progress).entries:
            found.append((part, entries[0]))
            nearest, larger = entries[0], part
    return found


def sizes_of_parts(cluster: Cluster) -> list[int]:
    """Return the numbers of devices of the parts worth a look, largest first.

    On a mixed cluster the slowest kind is left out, then the next slowest, and so on. Equal nodes are halved down to
    one, by numbers that divide them or are powers of two; the devices of a cluster of one node likewise.
    """
    speeds = sorted({node.device.half_flops for node in cluster.nodes})
    sizes = [
        sum(node.num_devices for node in cluster.nodes if node.device.half_flops > slowest) for slowest in speeds[:-1]
    ]
    fastest = [node for node in cluster.nodes if node.device.half_flops == speeds[-1]]
    per_node = fastest[0].num_devices
    if len(fastest) > 1:
        sizes += [per_node * number for number in _halvings(len(fastest))]
    elif len(cluster.nodes) == 1:
        sizes += _halvings(per_node)
    return sizes


def _halvings(number: int) -> list[int]:
    """Return about a half, a quarter, ... of a number, down to 1: divisors of it, or powers of two."""
    found, left = [], number
    while left > 1:
        left = max(each for each in range(1, left // 2 + 1) if number % each == 0 or each & (each - 1) == 0)
        found.append(left)
    return found


def _near(strategy: Strategy, constraints: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Return constraints that keep a search short: the plain values of a dimension, and the values of a strategy."""
    ranks = strategy.tensor_parallel_size
    near: dict[str, tuple[Any, ...]] = {
        "schedule": tuple(dict.fromkeys(("1f1b", strategy.schedule))),
        "num_model_chunks": tuple(sorted({1, strategy.num_model_chunks})),
        "tensor_parallel_size": tuple(size for size in (ranks // 2, ranks, 2 * ranks) if size),
    }
    if "token_slices" not in constraints:
        near["num_token_slices"] = tuple(sorted({1, strategy.num_token_slices}))
    return near


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


WORTH_SAYING = 0.02  # share of the time that leaving devices out must save before a note advises it
CHEAPER = 0.1  # share of the device hours that leaving devices out must save before a note advises it


def _fewer_devices_note(found: Sequence[FewerDevicesPart], cluster: Cluster) -> str | None:
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
        f"{time_text(best.iteration_time_s)} ({strategy_text(best.strategy)}), {best.time_ratio:.2f} times as long as "
        f"on all, for {1 - best.cost_ratio:.0%} fewer device hours a token"
        f"{f', {kinds}' if len(best.device_hours_ratio) > 1 else ''}"
        f"{'' if best.price_ratio is None else f', at {best.price_ratio:.2f} times the price'}: "
        f"add {remedy}--devices-at-most {best.num_devices} to rank them"
    )


WORTH_CHANGING = 0.01
"""How much longer, as a share, the winner takes than one without headroom before a note advises to look at that one."""


def too_full_part(entry: Ranked, winner: Ranked | None, pricing: Pricing) -> TooFullPart:
    """Return the fastest strategy without headroom; `winner`: None = no strategy leaves the headroom free."""
    held = zip(entry.price.memory, pricing.cost_model.groups(entry.strategy).smallest, strict=True)
    return TooFullPart(
        strategy=entry.strategy.to_json(),
        iteration_time_s=entry.iteration_time_s,
        left_free=1 - max(memory.total / device.memory_bytes for memory, device in held),
        could_save=None if winner is None else 1 - entry.iteration_time_s / winner.iteration_time_s,
    )


def _too_full_note(full: TooFullPart, problem: SearchProblem) -> str | None:
    """Return the cost of the headroom; None if it is small."""
    if full.could_save is not None and full.could_save < WORTH_CHANGING:
        return None
    saves = "" if full.could_save is None else f" and saves {full.could_save:.1%}"
    return (
        f"{strategy_text(full.strategy)} takes {time_text(full.iteration_time_s)}, but leaves "
        f"{full.left_free:.1%} of a device's memory free, less than the {100 * problem.memory_headroom:.3g} % asked "
        f"for: --memory-headroom {math.floor(1000 * full.left_free) / 1000:g} allows it{saves}"
    )


COUNTED_EXACTLY = 8  # strategies with the lowest bounds of memory whose memory is counted on their schedule
TIMES_THE_NODES = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16)  # clusters that are tried, in nodes of the one that is too small
LEAST_SEQ_LENGTH = 128  # tokens below which no sequence is proposed

LEAST = {"recompute": ("full", "selective", "none"), "zero_stage": (3, 1, 0), "zero_shard_size": (None,)}
"""Values of dimensions by the memory that they need, the least first."""


def distance_to_fit(asked: Question) -> DistancePart | None:
    """Return how far the nearest strategy is from fitting; None if none keeps the other rules."""
    nearest = nearest_to_fitting(asked)
    return None if nearest is None else nearest.model_copy(update={"remedies": list(_remedies(asked))})


def nearest_to_fitting(asked: Question) -> DistancePart | None:
    """Return the strategy with the least full device, without remedies; None if none keeps the other rules."""
    candidates: list[tuple[float, Strategy]] = []
    for found in legal_grids(asked.problem, _leanest(asked.choices, asked.constraints), SearchCounts()):
        candidates += _least_full(found, asked)
        candidates = sorted(candidates, key=lambda pair: pair[0])[:COUNTED_EXACTLY]
    distances = [_distance(strategy, asked) for _, strategy in candidates]
    return min(distances, key=lambda distance: distance.fullness, default=None)


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


def _distance(strategy: Strategy, asked: Question) -> DistancePart:
    """Return the memory of the fullest pipeline rank of a strategy."""
    pricing = asked.pricing
    usable_share = pricing.memory_model.overheads.usable_share * (1 - asked.problem.memory_headroom)
    held = list(zip(pricing.memory(strategy), pricing.cost_model.groups(strategy).smallest, strict=True))
    on_device = max((memory.total - memory.optimizer) / device.memory_bytes for memory, device in held)
    on_host = max(memory.optimizer for memory, _ in held)
    has_room = all(
        node.num_devices * on_host <= SHARE_OF_HOST * node.host.memory_bytes for node in pricing.cluster.nodes
    )
    usable = [usable_share * device.memory_bytes for _, device in held]
    rank = max(range(len(held)), key=lambda each: held[each][0].total / usable[each])
    memory, device = held[rank]
    return DistancePart(
        strategy=strategy.to_json(),
        pipeline_rank=rank,
        memory={**asdict(memory), "total": memory.total},
        device=device.name,
        usable_bytes=usable[rank],
        device_bytes=memory.total / usable_share,
        fits_with_optimizer_on_host=has_room and on_device <= usable_share,
        remedies=[],
    )


class Remedy(NamedTuple):
    """A change with which a strategy may fit."""

    kind: RemedyKind
    value: int | str
    """As `RemedyPart` has it."""
    question: Question


def _remedies(asked: Question) -> Iterator[RemedyPart]:
    """Yield each change with which a strategy fits; of those that grow step by step the smallest."""
    for _, changes in groupby(_changes(asked), key=lambda each: (each.kind, each.kind == "constraint" and each.value)):
        for kind, value, changed in changes:
            found = nearest_to_fitting(changed)
            if found is not None and found.fullness <= 1:
                yield RemedyPart(kind=kind, value=value, strategy=found.strategy)
                break


def _changes(asked: Question) -> Iterator[Remedy]:
    """Yield questions without a flag, with rounded gradients, more and more nodes, shorter sequences, smaller batches.

    All nodes of a mixed cluster grow by the same factor. A model that is a list of layers keeps its sequences.
    """
    problem, constraints = asked.problem, asked.constraints
    for name in constraints:
        others = {other: values for other, values in constraints.items() if other != name}
        yield Remedy("constraint", name, asked.changed(others))
    if len(constraints) > 1:
        yield Remedy("constraint", "", asked.changed({}))
    if problem.software.can_run("key_value_gradients", "bf16") and "bf16" not in constraints.get(
        "key_value_gradients", ()
    ):
        # No search rounds them unasked, since a run's numbers change.
        yield Remedy("key_value_gradients", "bf16", asked.changed({**constraints, "key_value_gradients": ("bf16",)}))
    nodes = problem.cluster.nodes
    for times in TIMES_THE_NODES:
        whole = round(times * len(nodes))
        if whole > len(nodes) and (problem.cluster.is_uniform or times == int(times)):
            cluster = replace(problem.cluster, nodes=tuple(nodes[index % len(nodes)] for index in range(whole)))
            yield Remedy("devices", cluster.num_devices, asked.changed(cluster=cluster))
    config, length = problem.workload.config, problem.workload.seq_length
    imbalance = IMBALANCE if problem.workload.experts is None else problem.workload.experts.imbalance
    while config is not None and (length := length // 2) >= LEAST_SEQ_LENGTH:
        shorter = gpt_workload(replace(config, seq_length=length), imbalance=imbalance)
        yield Remedy("seq_length", length, asked.changed(workload=shorter))
    for part in (2, 4, 8):
        if problem.global_batch_size % part == 0:
            batch = problem.global_batch_size // part
            yield Remedy("global_batch_size", batch, asked.changed(global_batch_size=batch))


def _shortage_note(distance: DistancePart) -> str:
    """Return the memory of the fullest device of the nearest strategy, by kind."""
    parts = sorted((each for each in distance.memory.items() if each[0] != "total"), key=lambda part: -part[1])
    listed = ", ".join(f"{name.replace('_', ' ')} {bytes_text(number)}" for name, number in parts if number > 0)
    return (
        f"the nearest strategy, {strategy_text(distance.strategy)}, needs on pipeline rank {distance.pipeline_rank}: "
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
