"""Alternatives to the winner of a ranking: an order of its ops, a combination not measured yet, parts of the cluster.

`with_found_order`: a search compares the schedules that have a closed form. Only the winner is then priced with
`optimised`, and where the model has an output layer of its own also with that layer in parts, one on each pipeline rank
(`--vocabulary-stages`): up to 32 K tokens it is 13 to 19 % faster in simulation, from 512 K tokens on hardly at all.

`with_interleaved_slices`: a combination that rankings leave out until it was measured (`rules.UNPROVEN`), on the
winner's layout.

`on_fewer_devices`: every strategy of a ranking uses all devices. Slow links, slow devices or a small batch may make
some of them useless. The parts that are tried are the fastest kinds of devices of a mixed cluster, and a half, a
quarter, ... of its nodes down to one. Each gets a short search near the winner: enough to see whether it is worth a
search of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.config.model import why_vocabulary_stays_whole
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.terapipe import TERAPIPE
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.simulated_time import num_searched_ops
from megatron_terapipe.search.price.stages import pipeline_shape
from megatron_terapipe.search.rank.grid_prices import ProgressCallback, no_progress
from megatron_terapipe.search.rank.ranked import Ranked, priced
from megatron_terapipe.search.rank.search import search
from megatron_terapipe.search.rank.space import Choices, SearchProblem, all_choices
from megatron_terapipe.strategy import DIMENSIONS, Strategy

MOST_OPS = 10_000  # ops of an order that is searched for: more would take longer than all the rest of a search
WORTH_FINDING = 0.01  # share of the winner's time that an order must save


def with_found_order(
    winner: Ranked, problem: SearchProblem, constraints: Mapping[str, tuple[Any, ...]], pricing: Pricing
) -> Ranked | None:
    """Return the winner with the fastest order that is found for it; None if none saves a hundredth of its time."""
    found = []
    for strategy in _candidates(winner.strategy, problem, constraints):
        try:
            found.append(priced(strategy, pricing, problem.memory_headroom))
        except (ConfigError, PlanError):
            continue  # no layers for so many stages, or no order within the memory
    best = min(filter(None, found), key=lambda entry: entry.sort_key(0.0), default=None)
    if best is None or best.iteration_time_s > (1 - WORTH_FINDING) * winner.iteration_time_s:
        return None
    return best


def _candidates(
    winner: Strategy, problem: SearchProblem, constraints: Mapping[str, tuple[Any, ...]]
) -> Iterator[Strategy]:
    """Yield the strategy with `optimised`, then with vocabulary stages, too; nothing where flags name a schedule."""
    if (
        "schedule" in constraints
        or winner.pipeline_parallel_size == 1
        or winner.offload
        or num_searched_ops(pipeline_shape(winner)) > MOST_OPS
        or problem.software.name != TERAPIPE.name
    ):
        return
    yield replace(winner, schedule=OPTIMISED)
    model = problem.workload.config
    pipeline_ranks, tensor_ranks = winner.pipeline_parallel_size, winner.tensor_parallel_size
    if model is None or why_vocabulary_stays_whole(model, pipeline_ranks=pipeline_ranks, tensor_ranks=tensor_ranks):
        return
    # Stages that were balanced around a whole output layer are not balanced without it.
    given = winner.stage_partition if "stage_partition" in constraints else "uniform"
    if given != "parameters":
        yield replace(winner, schedule=OPTIMISED, vocabulary_stages=True, stage_partition=given)


EFFORT = 0.1  # effort of the search on a part, or for one alternative


def with_interleaved_slices(
    winner: Ranked,
    problem: SearchProblem,
    constraints: Mapping[str, tuple[Any, ...]],
    pricing_on: Callable[[Cluster], Pricing],
) -> Ranked | None:
    """Return the best interleaved schedule with token slices on the winner's layout, where rankings leave it out.

    None if it saves less than a hundredth of the winner's time.
    """
    choices = all_choices(problem).constrained(constraints)
    several = {
        name: tuple(each for each in choices[name] if each > 1) for name in ("num_model_chunks", "num_token_slices")
    }
    if (
        problem.may_interleave_slices
        or "interleaved" not in choices["schedule"]
        or winner.strategy.pipeline_parallel_size == 1
    ):
        return None
    same = {each.name: (getattr(winner.strategy, each.name),) for each in DIMENSIONS if each.ranks}
    only = Choices({**choices.values, **same, **several, "schedule": ("interleaved",)})
    allowed = replace(problem, interleaves_token_slices=True)
    entries = search(allowed, only, pricing_on, top=1, effort=EFFORT, refine=False).entries
    if not entries or entries[0].iteration_time_s > (1 - WORTH_FINDING) * winner.iteration_time_s:
        return None
    return entries[0]


LEAST_COMPUTE = 0.6
"""Compute of the best strategy on a part, relative to the winner, at least: it may recompute less and cut into larger
pieces. A part that would take longer than the winner even so is not searched for its time."""


def on_fewer_devices(
    winner: Ranked,
    problem: SearchProblem,
    constraints: Mapping[str, tuple[Any, ...]],
    pricing_on: Callable[[Cluster], Pricing],
    progress: ProgressCallback = no_progress,
) -> list[tuple[Cluster, Ranked]]:
    """Return the parts of the cluster that may be faster or cheaper than all of it, and the best strategy on each."""
    found: list[tuple[Cluster, Ranked]] = []
    nearest, larger = winner, problem.cluster
    for number in sizes_of_parts(problem.cluster):
        part = problem.cluster.at_most(number)
        # The first half gives the cost of a token; smaller parts are searched if they may be faster.
        is_half = larger is problem.cluster and 2 * number >= problem.cluster.num_devices
        same_kinds = {node.device for node in part.nodes} == {node.device for node in larger.nodes}
        least_s = LEAST_COMPUTE * nearest.price.breakdown.compute_s * larger.num_devices / number
        if same_kinds and not is_half and least_s >= winner.iteration_time_s:
            continue
        smaller = replace(problem, cluster=part)
        choices = all_choices(smaller).constrained({**_near(nearest.strategy, constraints), **constraints})
        entries = search(smaller, choices, pricing_on, top=1, effort=EFFORT, refine=False, progress=progress).entries
        if entries:
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
