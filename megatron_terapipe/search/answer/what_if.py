"""The same question with one change, answered again: each a name, a changed question and a line.

    Question.changed     the same question with other flags, or another model, cluster, batch or trainer
    what_ifs             the changes that are worth saying: an order that is found, less headroom, fewer devices,
                         other constants (`sensitivity.py`)
    distance.py          the changes with which a strategy fits, where none does

A search compares the schedules that have a closed form. Only the winner is then priced with `optimised`, and where the
model has an output layer of its own also with that layer in parts, one on each pipeline rank (`--vocabulary-stages`):
up to 32 K tokens it is 13 to 19 % faster in simulation, from 512 K tokens on hardly at all.

Every strategy of a ranking uses all devices. Slow links, slow devices or a small batch may make some of them useless.
The parts of a cluster that are tried are the fastest kinds of devices of a mixed one, and a half, a quarter, ... of its
nodes down to one. Each gets a short search near the winner: enough to see whether it is worth a search of its own.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.config.model import why_vocabulary_stays_whole
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.decisions import NOT_ASKED, Training
from megatron_terapipe.search.answer.figures import TOLERANCE, best_published, devices_of, speed_of
from megatron_terapipe.search.answer.json_documents import WhatIfPart
from megatron_terapipe.search.answer.question import Question
from megatron_terapipe.search.answer.sensitivity import other_constants
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.makespan import num_searched_ops
from megatron_terapipe.search.price.stages import pipeline_shape
from megatron_terapipe.search.rank.rules import ProgressCallback, no_progress
from megatron_terapipe.search.rank.search import Ranked, SearchResult, priced
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.texts import strategy_text, time_text


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
    yield WhatIfPart(
        name=name,
        value=value,
        strategy=entry.strategy.to_json(),
        iteration_time_s=entry.iteration_time_s,
        change=saves,
        line=f"{words} takes {time_text(entry.iteration_time_s)}, {saves:.0%} less{remedy}",
        more=f"The strategy: {strategy_text(entry.strategy)}. {more}".rstrip(),
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
    free = 0.0 if entry is None else left_free(entry, asked.pricing)
    value = math.floor(1000 * free) / 1000
    yield from _faster(
        "memory_headroom",
        f"an iteration with {free:.1%} of memory kept free",
        entry,
        winner,
        remedy=f": --memory-headroom {value:g}",
        value=value,
    )


def left_free(entry: Ranked, pricing: Pricing) -> float:
    """Return the share of the fullest device that a strategy leaves free."""
    held = zip(entry.price.memory, pricing.cost_model.groups(entry.strategy).smallest, strict=True)
    return 1 - max(memory.total / device.memory_bytes for memory, device in held)


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
        strategy=winner.strategy.to_json(),
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
    unpriced = " Devices of other kinds have other prices (--price)."
    yield WhatIfPart(
        name="fewer_devices",
        value=part.num_devices,
        strategy=entry.strategy.to_json(),
        iteration_time_s=entry.iteration_time_s,
        change=1 - ratio if is_faster else 1 - cost,
        line=f"{part.num_devices:,} of {whole.num_devices:,} devices: {time_text(entry.iteration_time_s)}, "
        f"{f'{1 - ratio:.0%} less' if is_faster else f'{ratio:.2f} times rank 1'}, {saved}: "
        f"--devices-at-most {part.num_devices}",
        more=f"They are {' and '.join(sorted(devices_of(part)))}. The strategy: {strategy_text(entry.strategy)}."
        f"{'' if training.prices or whole.is_uniform else unpriced}",
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
