"""Command `rank`: the best strategies of a model on a cluster, and why."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cluster import Cluster
from megatron_terapipe.search.command.costs import Costs, costs_of
from megatron_terapipe.search.command.doubts import memory_note, smaller_cluster_note
from megatron_terapipe.search.command.explanations import explain_space, explain_strategy
from megatron_terapipe.search.command.inputs import (
    add_cluster_flags,
    add_cost_flags,
    add_model_flags,
    cluster_of,
    model_of,
    precision_of,
)
from megatron_terapipe.search.command.outputs import add_output_flags, show_answer
from megatron_terapipe.search.command.pins import add_pin_flags, pins_of
from megatron_terapipe.search.command.progress import progress_bar
from megatron_terapipe.search.command.proposals import write_proposals
from megatron_terapipe.search.command.strategies import read_one_strategy
from megatron_terapipe.search.ranking.ranked import Ranked
from megatron_terapipe.search.ranking.search import SearchResult, search
from megatron_terapipe.search.ranking.space_prices import FITS
from megatron_terapipe.search.report.answer import Answer
from megatron_terapipe.search.report.files import TERMINAL
from megatron_terapipe.search.space import Problem, all_choices
from megatron_terapipe.search.space.duplicates import DUPLICATE_RULES

NAME = "rank"
HELP = "The best strategies of a model on a cluster: searched, priced on their schedules, and ranked."

NOTHING = "nothing"
"""Value of `--explain` without a file."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_model_flags(parser)
    add_cluster_flags(parser)
    add_cost_flags(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--global-batch-size", type=int, required=True, metavar="N", help="sequences of one optimizer step"
    )
    group.add_argument("--top", type=int, default=10, metavar="K", help="strategies to list (default: 10)")
    group.add_argument(
        "--effort", type=float, default=1.0, metavar="X", help="how much is simulated; 1 takes seconds (default: 1)"
    )
    group.add_argument(
        "--explain",
        nargs="?",
        const=NOTHING,
        metavar="STRATEGY.json",
        help="say how many strategies each rule rejected; with a file, why that strategy did not win",
    )
    group.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show progress (default: on a terminal)"
    )
    group.add_argument(
        "--propose-trials",
        metavar="FILE.jsonl",
        help="write the few strategies whose trials would make predictions surest, for trial --strategies",
    )
    add_pin_flags(parser)
    add_output_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Search, and print what was found."""
    _check(options)
    workload = model_of(options)
    cluster, notes = cluster_of(options)
    precision = precision_of(options, cluster)
    problem = Problem(
        workload=workload, cluster=cluster, global_batch_size=options.global_batch_size, precision=precision
    )
    pins = pins_of(options)
    choices = all_choices(problem).pinned(pins)
    costs = costs_of(options, workload, cluster, precision)
    asked = None if options.explain in (None, NOTHING) else read_one_strategy(options.explain)
    start = time.perf_counter()
    with progress_bar(options.progress) as progress:
        result = search(problem, choices, costs.pricing_on, top=options.top, effort=options.effort, progress=progress)
        doubts = [] if not result.entries else [memory_note(result.entries, costs.pricing_on(cluster))]
        if result.entries and len({node.device for node in cluster.nodes}) > 1:
            doubts.append(smaller_cluster_note(result.entries[0], problem, pins, costs.pricing_on, progress))
        if result.entries and options.propose_trials is not None:
            doubts.append(write_proposals(options.propose_trials, problem, choices, costs, progress))
    answer = Answer(
        workload=workload,
        cluster=cluster,
        precision=precision,
        global_batch_size=options.global_batch_size,
        entries=with_intervals(result.entries, costs, cluster),
        considered=result.funnel.total,
        rejections={name: number for name, number in result.funnel.rejected.items() if number},
        search_s=time.perf_counter() - start,
        notes=(*notes, *costs.notes, *how_sure(result), *filter(None, doubts)),
    )
    # Strategies say by their placement where ranks stand, and the cost model reads it.
    show_answer(options, answer, costs.pricing_on(cluster).cost_model.pipeline_costs)
    lines = [] if options.explain is None else explain_space(result)
    if asked is not None:
        lines += explain_strategy(asked, problem, result, costs)
    # JSON on the terminal stands alone there.
    out = sys.stderr if options.json == TERMINAL else sys.stdout
    print("\n".join(lines), file=out, end="\n" if lines else "")
    if not result.entries:
        print(f"error: {nothing_fits(result)}", file=sys.stderr)
        return 1
    return 0


def with_intervals(entries: Sequence[Ranked], costs: Costs, cluster: Cluster) -> list[Ranked]:
    """The same with the interval of every price."""
    pricing = costs.pricing_on(cluster)
    return [
        replace(entry, prediction=costs.with_interval(entry.strategy, entry.prediction, pricing))
        if entry.prediction is not None
        else entry
        for entry in entries
    ]


def how_sure(result: SearchResult) -> list[str]:
    """Whether something that was left out could win."""
    if not result.entries:
        return []
    counted = f"{result.funnel.priced:,} strategies priced in closed form, {result.funnel.simulated} simulated"
    if result.proven:
        return [f"{counted}: none of the others can be faster under this model"]
    return [f"{counted}: one of the others could be {result.could_save:.1%} faster at most; more --effort tells"]


def nothing_fits(result: SearchResult) -> str:
    """Why no strategy is left, and what to change: the last rule of the funnel is the one that the last ones broke."""
    doubles = {rule.name for rule in DUPLICATE_RULES}
    rejected = [(name, number) for name, number in result.funnel.rejected.items() if number and name not in doubles]
    if not rejected:
        return "no strategy can run: no layout of the ranks has the sizes that are pinned; unpin one"
    last, number = rejected[-1]
    if last == FITS:
        nearest = f" (for one: {result.refused[0].reason})" if result.refused else ""
        return (
            f"no strategy can run: all {number:,} that keep the other rules need more memory than the devices "
            f"have{nearest}; take more devices or larger ones, or unpin a dimension"
        )
    return (
        f"no strategy can run: the last {number:,} break the rule '{last}'; unpin a dimension, or take another batch "
        "or number of devices (--explain counts every rule)"
    )


def _check(options: argparse.Namespace) -> None:
    for name in ("global_batch_size", "top"):
        if getattr(options, name) < 1:
            words = f"--{name.replace('_', '-')} {getattr(options, name)}"
            raise ConfigError(f"{words} is not a whole number from 1: give one")
    if not 0 < options.effort < math.inf:
        raise ConfigError(f"--effort {options.effort} is not above 0 and finite: give 1, or more for a longer search")
