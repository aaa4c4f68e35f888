"""The same question with one change, answered again: each a name, a changed question and a line.

    Question.changed     the same question with other flags, or another model, cluster, batch or trainer
    what_ifs             the changes that are worth saying: an order that is found, less headroom, fewer devices,
                         other constants of the cost model
    if_nothing_fits      the strategy nearest to fitting, and the changes with which one fits

A search compares the schedules that have a closed form. Only the winner is then priced with `optimised`, and where the
model has an output layer of its own also with that layer in parts, one on each pipeline rank (`--vocabulary-stages`):
up to 32 K tokens it is 13 to 19 % faster in simulation, from 512 K tokens on hardly at all.

Every strategy of a ranking uses all devices. Slow links, slow devices or a small batch may make some of them useless.
The parts of a cluster that are tried are the fastest kinds of devices of a mixed one, and a half, a quarter, ... of its
nodes down to one. Each gets a short search near the winner: enough to see whether it is worth a search of its own.

Constants are moved both ways by their uncertainty: the standard deviation of their logarithm, after calibration or
before (`Prior`). The contenders, the best strategies of different layouts, are priced in closed form; where another one
is more than 1 % faster, both are simulated. With a measured profile its factors are moved instead. The bandwidth of
network cards, of which a data sheet may be wrong by a factor, is moved by `FACTOR` where no trials on several nodes
determine it.

Where nothing fits, each change gets a short search, too, and is proven: the strategy leaves the headroom free, counted
exactly. The nearest strategy fits devices with the smallest multiple of their memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.config.model import why_vocabulary_stays_whole
from megatron_terapipe.devices import Device
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.figures import NOT_ASKED, TOLERANCE, Training, best_published, devices_of, speed_of
from megatron_terapipe.search.answer.json_documents import WhatIfPart
from megatron_terapipe.search.answer.question import Question
from megatron_terapipe.search.learn.calibration import NETWORK, Calibration
from megatron_terapipe.search.learn.fit import times_with
from megatron_terapipe.search.learn.priors import Prior, most_of, moved
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import smallest_device_with
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.cost_model import CostModel, Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, ProfileFactors
from megatron_terapipe.search.price.makespan import num_searched_ops
from megatron_terapipe.search.price.memory import RankMemory
from megatron_terapipe.search.price.stages import pipeline_shape
from megatron_terapipe.search.price.workload import IMBALANCE, gpt_workload
from megatron_terapipe.search.rank.grid_prices import FITS, HEADROOM
from megatron_terapipe.search.rank.rules import ProgressCallback, no_progress
from megatron_terapipe.search.rank.search import NEARLY_AS_FAST, ROUNDING, Ranked, SearchResult, priced
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.texts import (
    bandwidth_text,
    bytes_text,
    difference_text,
    layout_text,
    strategy_text,
    time_text,
)


def what_ifs(
    asked: Question, result: SearchResult, progress: ProgressCallback = no_progress, training: Training = NOT_ASKED
) -> list[WhatIfPart]:
    """Return the changes that are worth saying for the winner of a search."""
    winner = result.entries[0]
    return [
        *with_found_order(asked, winner),
        *with_less_headroom(asked, result.too_full, winner),
        *on_fewer_devices(asked, winner, progress, training),
        *at_published_mfu(asked.problem, winner),
        *with_more_effort(result),
        *other_constants(result.contenders, asked.pricing.cost_model, asked.costs.calibration),
    ]


WORTH_SAYING = 0.01  # share of the winner's time that a change must save


def _faster(
    name: str, words: str, entry: Ranked | None, winner: Ranked, *, remedy: str, more: str = "", value: Any = None
) -> Iterator[WhatIfPart]:
    """Yield the answer if it is worth saying; `entry`: None = no strategy can run with this change."""
    if entry is None or entry.iteration_time_s > (1 - WORTH_SAYING) * winner.iteration_time_s:
        return
    saves = 1 - entry.iteration_time_s / winner.iteration_time_s
    line = f"{words} takes {time_text(entry.iteration_time_s)}, {saves:.0%} less{remedy}"
    yield answered(name, entry, line, change=saves, value=value, more=more)


def answered(name: str, entry: Ranked, line: str, *, change: float, value: Any = None, more: str = "") -> WhatIfPart:
    """Return the answer to a changed question, by its best strategy."""
    return WhatIfPart(
        name=name,
        value=value,
        strategy=entry.strategy,
        iteration_time_s=entry.iteration_time_s,
        change=change,
        line=line,
        more=f"{more} The strategy: {strategy_text(entry.strategy)}.".lstrip(),
    )


FOUND_ORDER = "found-order"
"""Folder, inside the folder of an answer, with the files that launch the winner with an order that was found."""

MOST_OPS = 10_000  # ops of an order that is searched for: more would take longer than all the rest of a search


def with_found_order(asked: Question, winner: Ranked) -> Iterator[WhatIfPart]:
    """Yield the winner with the faster of the orders that are found for it, unless flags name a schedule."""
    problem, strategy = asked.problem, winner.strategy
    if (
        "schedule" in asked.constraints
        or strategy.pipeline_parallel_size == 1
        or strategy.offload
        or num_searched_ops(pipeline_shape(strategy)) > MOST_OPS
        or problem.software.name != TERAPIPE.name
    ):
        return
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
    best = min(filter(None, found), key=lambda entry: entry.sort_key(0.0), default=None)
    in_parts = best is not None and best.strategy.vocabulary_stages
    yield from _faster(
        "found_order",
        "an order of ops found for rank 1",
        best,
        winner,
        remedy=f": --output DIR adds DIR/{FOUND_ORDER}",
        more=f"Its flags are --pipeline-schedule {OPTIMISED}{' --vocabulary-stages' if in_parts else ''}; the trainer "
        "looks for the order before its first iteration.",
    )


def with_less_headroom(asked: Question, entry: Ranked | None, winner: Ranked) -> Iterator[WhatIfPart]:
    """Yield the fastest strategy that fits the devices and leaves less than the headroom free."""
    free, value = (0.0, 0.0) if entry is None else left_free(entry, asked.pricing)
    words, flag = f"an iteration with {free:.1%} of memory kept free", f": --memory-headroom {value:g}"
    yield from _faster("memory_headroom", words, entry, winner, remedy=flag, value=value)


def left_free(entry: Ranked, pricing: Pricing) -> tuple[float, float]:
    """Return the share of the fullest device that a strategy leaves free, and the headroom that asks for it."""
    _, memory, device = fullest(entry, pricing)
    free = 1 - memory.total / device.memory_bytes
    return free, math.floor(1000 * free) / 1000


def fullest(entry: Ranked, pricing: Pricing) -> tuple[int, RankMemory, Device]:
    """Return the pipeline rank of a strategy whose device is fullest, its memory and that device."""
    held = enumerate(zip(entry.price.memory, pricing.cost_model.groups(entry.strategy).smallest, strict=True))
    return max(((rank, *each) for rank, each in held), key=lambda each: each[1].total / each[2].memory_bytes)


def at_published_mfu(problem: SearchProblem, winner: Ranked) -> Iterator[WhatIfPart]:
    """Yield the winner at the best published MFU, where it is predicted to be above it."""
    published, speed = best_published(problem.cluster), speed_of(problem, winner.strategy, winner.iteration_time_s)
    if (
        published is None
        or speed.mfu is None
        or speed.mfu_causal is None
        or speed.mfu <= published.share + TOLERANCE
        # Else only the count differs, which has scores that are not computed.
        or speed.mfu_causal <= published.causal_share
    ):
        return
    time_s = winner.iteration_time_s * speed.mfu_causal / published.causal_share
    yield WhatIfPart(
        name="published_mfu",
        value=published.share,
        strategy=winner.strategy,
        iteration_time_s=time_s,
        change=time_s / winner.iteration_time_s - 1,
        line=f"an MFU of {speed.mfu:.0%} was never published; at the best, {published.share:.0%}, rank 1 takes "
        f"{time_text(time_s)}",
        more=f"The best for such devices is {published.run}. The prediction is probably too optimistic: calibrate it.",
    )


def with_more_effort(result: SearchResult) -> Iterator[WhatIfPart]:
    """Yield the time that a longer search could save, where strategies that may win were not simulated."""
    if result.could_save > WORTH_SAYING:
        line = (
            f"a strategy that was not simulated could be {result.could_save:.1%} faster at most: more --effort finds it"
        )
        yield WhatIfPart(name="effort", change=result.could_save, line=line)


MUCH_FASTER = 0.02  # share of the time that leaving devices out must save
MUCH_CHEAPER = 0.1  # share of the device hours, or of the price, that it must save if it takes longer


def on_fewer_devices(
    asked: Question, winner: Ranked, progress: ProgressCallback = no_progress, training: Training = NOT_ASKED
) -> Iterator[WhatIfPart]:
    """Yield the part of the cluster that is faster than all of it, or else much cheaper for each token."""
    whole, found = asked.problem.cluster, []
    for part, entry in best_on_parts(asked, winner, progress):
        ratio = entry.iteration_time_s / winner.iteration_time_s
        price, on_all = (training.hourly_price(devices_of(each)) for each in (part, whole))
        hours = ratio * part.num_devices / whole.num_devices
        found.append((ratio, hours, ratio * price / on_all if price and on_all else hours, part, entry))
    is_faster = min((each[0] for each in found), default=1.0) <= 1 - MUCH_FASTER
    best = min(found, key=lambda each: each[0] if is_faster else each[2], default=None)
    if best is None or not (is_faster or min(best[1:3]) <= 1 - MUCH_CHEAPER):
        return
    ratio, hours, cost, part, entry = best
    saved = f"at {cost:.2f} of the price" if training.prices else f"for {1 - hours:.0%} fewer device hours"
    compared = f"{1 - ratio:.0%} less" if is_faster else f"{ratio:.2f} times rank 1"
    used = f"{part.num_devices:,} of {whole.num_devices:,} devices: {time_text(entry.iteration_time_s)}"
    unpriced = "" if training.prices or whole.is_uniform else " Devices of other kinds have other prices (--price)."
    yield answered(
        "fewer_devices",
        entry,
        f"{used}, {compared}, {saved}: --devices-at-most {part.num_devices}",
        change=1 - (ratio if is_faster else cost),
        value=part.num_devices,
        more=f"They are {' and '.join(sorted(devices_of(part)))}.{unpriced}",
    )


def best_on_parts(
    asked: Question, winner: Ranked, progress: ProgressCallback = no_progress
) -> Iterator[tuple[Cluster, Ranked]]:
    """Yield parts of the cluster and the best strategy on each, as long as smaller ones are not slower."""
    nearest = winner
    for number in sizes_of_parts(asked.problem.cluster):
        part = asked.problem.cluster.at_most(number)
        constraints = {**_near(nearest.strategy, asked.constraints), **asked.constraints}
        entries = asked.changed(constraints, cluster=part).search(progress=progress).entries
        if not entries:
            continue
        yield part, entries[0]
        if part.is_uniform and entries[0].iteration_time_s > winner.iteration_time_s:
            return
        nearest = entries[0]


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


HIGHEST = 0.99  # share of its limit that a constant such as an efficiency is moved to at most

FACTOR = 4.0
"""By how much the bandwidth of a node may differ from the data sheet, either way: nodes with one card in place of
eight, cards at a quarter of the rate, networks that are shared."""


def other_constants(contenders: Sequence[Ranked], model: CostModel, calibration: Calibration) -> Iterator[WhatIfPart]:
    """Yield the constants with which another contender is better than the first, those with the largest regret first.

    The network is left out where trials determine it, or where there is one node.
    """
    constants, strategies = model.constants, [entry.strategy for entry in contenders]
    widths, moves = widths_of(constants, calibration), []
    if isinstance(constants, HardwareEfficiency) and len(model.cluster.nodes) > 1 and not calibration.knows_network:
        widths = {name: width for name, width in widths.items() if name not in NETWORK}
        steps = (-math.log(FACTOR), math.log(FACTOR))
        moves = [("network", step, moved(constants, dict.fromkeys(NETWORK, step))) for step in steps]
    moves += moves_of(constants, widths)
    closed = times_with([model] * len(strategies), strategies, [constants, *(after for *_, after in moves)])
    times = closed[1:] * ([entry.iteration_time_s for entry in contenders] / closed[0])
    found = []
    for (name, logarithm, after), row in zip(moves, times, strict=True):
        best = int(np.argmin(row))
        if row[best] >= row[0] / (1 + NEARLY_AS_FAST):
            continue
        then, first, other = model.with_constants(after), strategies[0], strategies[best]
        winner, better = (then.predict_time(one) for one in (first, other))
        regret, factor = winner.iteration_time_s / better.iteration_time_s - 1, math.expm1(logarithm)
        if regret <= NEARLY_AS_FAST:
            continue
        if name == "network":
            given = min(node.network.bandwidth * node.num_network_cards for node in model.cluster.nodes)
            words = f"{bandwidth_text(given * (1 + factor))} a node, not {bandwidth_text(given)}"
            meaning = "The data sheet of a network may be wrong by a factor."
        else:
            (declared,) = (each for each in fields(after) if each.name == name)
            words, meaning = f"{declared.metadata['words']} {factor:+.0%}", field_texts(type(after))[name]
        # Some differ only in the schedule or recomputation.
        changed = layout_text(other) if other.layout != first.layout else difference_text(other, first)
        part = answered(
            "network" if name == "network" else "constant",
            replace(contenders[best], prediction=better),
            f"{words}: {changed} is {regret:.0%} faster than rank 1",
            change=1 - better.iteration_time_s / winner.iteration_time_s,
            value=factor if name == "network" else name,
            more=f"{'On the profile: ' if isinstance(after, ProfileFactors) else ''}{meaning}",
        )
        found.append(part)
    yield from sorted(found, key=lambda each: -each.change)


def widths_of(constants: Any, calibration: Calibration) -> dict[str, float]:
    """Return the standard deviation of the logarithm of each constant: of the calibration, else of its prior."""
    prior, intervals = Prior.of(constants), calibration.intervals
    found = dict(zip(prior.names, prior.widths.tolist(), strict=True))
    fitted = zip(intervals.parameter_names, np.sqrt(np.diag(intervals.covariance)).tolist(), strict=True)
    found |= {name: width for name, width in fitted if name in found}
    return found


def moves_of(constants: Any, widths: Mapping[str, float]) -> Iterator[tuple[str, float, Any]]:
    """Yield (name, change of its logarithm, all constants with it) of each constant that is moved by its width.

    Shares stay shares. A row of factors moves as one.
    """
    for each in fields(constants):
        value = getattr(constants, each.name)
        names = [name for name in widths if name.partition("[")[0] == each.name]
        for sign in (1, -1) if names else ():
            logarithm = sign * widths[names[0]]
            if not isinstance(value, tuple):
                logarithm = min(logarithm, math.log(HIGHEST * most_of(each.name) / value))
            if sign * logarithm > 0:
                yield each.name, logarithm, moved(constants, dict.fromkeys(names, logarithm))


def if_nothing_fits(asked: Question, result: SearchResult) -> Iterator[WhatIfPart]:
    """Yield the nearest strategy, and then the changes with which one fits; nothing if other rules are broken."""

    def fits(name: str, value: int | float | str, line: str, entry: Ranked) -> WhatIfPart:
        more = f"An iteration then takes {time_text(entry.iteration_time_s)}."
        return answered(name, entry, line, change=1.0, value=value, more=more)

    headroom = asked.problem.memory_headroom
    if result.too_full is not None:
        _, share = left_free(result.too_full, asked.pricing)
        yield fits("memory_headroom", share, f"--memory-headroom {share:g}", result.too_full)
    if not (result.counts.rejected[FITS] or result.counts.rejected[HEADROOM]):
        return
    times, nearest = nearest_to_fitting(asked)
    if nearest is None:
        return
    rank, memory, device = fullest(nearest, asked.pricing)
    if result.too_full is None:
        parts = sorted(asdict(memory).items(), key=lambda part: -part[1])
        listed = ", ".join(f"{name.replace('_', ' ')} {bytes_text(number)}" for name, number in parts if number > 0)
        yield WhatIfPart(
            name="nearest",
            value=memory.total,
            strategy=nearest.strategy,
            change=1.0,
            line=f"the nearest needs {bytes_text(memory.total)} of a device, and {device.name} has "
            f"{bytes_text(memory.total / times)} ({100 * headroom:.3g}% kept free)",
            more=f"It is {strategy_text(nearest.strategy)}, and needs on pipeline rank {rank}: {listed}.",
        )
    found: set[str] = set()
    for name, value, words, changed in _changes(asked):
        # Of each kind the smallest is enough; of flags each that is free, or else all of them.
        if name in found and not (name == "constraint" and value):
            continue
        for entry in changed.search().entries:
            found.add(name)
            yield fits(name, value, words, entry)
    needed = times * device.memory_bytes
    enough = smallest_device_with(needed)
    such = "" if enough is None else f", such as {enough.name}"
    yield fits("device_memory", needed, f"devices of {bytes_text(math.ceil(needed / 1e9) * 1e9)}{such}", nearest)


MOST_TIMES_THE_MEMORY = 2.0**16
CLOSE = 1.001  # multiple of a memory that is too small up to which only a strategy that needs less is looked for


def nearest_to_fitting(asked: Question) -> tuple[float, Ranked | None]:
    """Return the smallest multiple of the devices' memory with which a strategy fits, and this strategy.

    None if other rules are broken.
    """
    cluster, headroom, found = asked.problem.cluster, asked.problem.memory_headroom, None
    usable_share = asked.pricing.memory_model.overheads.usable_share * (1 - headroom)
    too_little, enough, times = 1.0, math.inf, 2.0
    while too_little < times < MOST_TIMES_THE_MEMORY:
        nodes = (
            replace(node, device=replace(node.device, memory_bytes=times * node.device.memory_bytes))
            for node in cluster.nodes
        )
        for entry in asked.changed(cluster=replace(cluster, nodes=tuple(nodes))).search().entries:
            _, memory, device = fullest(entry, asked.pricing)
            enough, found = memory.total / (usable_share * device.memory_bytes), entry
            break
        else:
            too_little = times
        times = 2 * times if found is None else math.sqrt(too_little * enough)
        if enough < CLOSE * too_little:
            times = enough * (1 - ROUNDING)
    return enough, found


TIMES_THE_NODES = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16)  # clusters that are tried, in nodes of the one that is too small
LEAST_SEQ_LENGTH = 128  # tokens below which no sequence is proposed


def _changes(asked: Question) -> Iterator[tuple[str, int | str, str, Question]]:
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
