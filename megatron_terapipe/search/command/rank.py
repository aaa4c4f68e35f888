"""Command `rank`: the best strategies of a model on a cluster, and why."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from deepspeed_ext.plan.text.json_flag import STANDARD_OUTPUT, add_json_flag
from deepspeed_ext.plan.text.text_files import write_text
from megatron_terapipe.config.training.batch import MOST_SEQUENCES
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.command.advice import advise
from megatron_terapipe.search.command.costs import Costs, costs_of
from megatron_terapipe.search.command.explain import explain_space, explain_strategy, nothing_fits
from megatron_terapipe.search.command.shared_flags import (
    add_cluster_flags,
    add_constraint_flags,
    add_cost_flags,
    add_headroom_flag,
    add_model_flags,
    add_software_flag,
    check_count,
    cluster_of,
    constraints_of,
    headroom_of,
    model_of,
    precision_of,
    progress_bar,
    read_one_strategy,
)
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.rank.grid.grid_prices import ProgressCallback
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.search import SearchResult, search
from megatron_terapipe.search.report.advice import advice_notes
from megatron_terapipe.search.report.answer import Answer
from megatron_terapipe.search.report.documents import rank_document
from megatron_terapipe.search.report.output_files import (
    OpCostsOf,
    how_to_run,
    script_command,
    winner_launch,
    write_answer,
    write_document,
    write_page,
)
from megatron_terapipe.search.report.rivals import rival_note
from megatron_terapipe.search.report.schema.schema import LaunchPart
from megatron_terapipe.search.report.table import print_table
from megatron_terapipe.search.software.library import find_software
from megatron_terapipe.search.space.choices import Choices, all_choices, check_runnable
from megatron_terapipe.search.space.problem import SearchProblem
from megatron_terapipe.search.trials.calibration.design import propose_strategies

CANDIDATES = 100
"""Best strategies among which trials are chosen; trials of much slower ones would say little about the winner."""

NUM_TRIALS = 8
"""Trials that are proposed; as many as `benchmarks.few_trials` compares with trials chosen at random."""


def write_proposals(
    path: str, problem: SearchProblem, choices: Choices, costs: Costs, progress: ProgressCallback | None
) -> str:
    """Choose trials, and write them a line each, as `trial --strategies` reads them.

    Returns:
        A note for the answer.

    Raises:
        ConfigError: if the file cannot be written.
    """
    found = search(problem, choices, costs.pricing_on, top=CANDIDATES, progress=progress)
    candidates = [entry.strategy for entry in found.entries]
    model = costs.pricing_on(problem.cluster).cost_model
    chosen = propose_strategies(model, candidates, costs.calibration, NUM_TRIALS)
    lines = [json.dumps(strategy.to_json()) + "\n" for strategy in chosen]
    write_text(path, "".join(lines), make_folder=True)
    return (
        f"{path} has {len(chosen)} of the {len(candidates)} best strategies, the trials of which would teach most, the "
        f"most telling first: run them with `terapipe search trial --strategies {path}`, then rank with "
        "--calibrate"
    )


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an answer."""
    group = parser.add_argument_group("output")
    add_json_flag(group, "the answer")
    group.add_argument("--html", metavar="FILE", help="write a report that opens in any browser")
    group.add_argument(
        "--output",
        metavar="DIR",
        help=(
            "write all files: ranking.json, report.html, and strategy.json, hostfile, ds_config.json and launch.sh "
            "for the winner"
        ),
    )


def show_answer(options: argparse.Namespace, answer: Answer, op_costs: OpCostsOf, *, top: int | None = None) -> None:
    """Print an answer and write what was asked for.

    Args:
        op_costs: times of the ops of a strategy, for timelines.
        top: lines of the table at most.

    Raises:
        ConfigError: if a file cannot be written.
    """
    launch, why_not = winner_launch(answer)
    command = "" if launch is None else launch.command(options.output or "DIR")
    if options.html is not None:
        write_page(options.html, answer, op_costs, command=command and how_to_run(options.output, command))
    if options.output is None:
        written = LaunchPart(command=command or None, files=[], why_not=why_not or None)
    else:
        written = write_answer(options.output, answer, op_costs)
    if options.json is not None:
        write_document(options.json, rank_document(answer, written))
    if options.json == STANDARD_OUTPUT:
        return
    print_table(answer, top=top)
    if written.files:
        print(f"\nwritten: {', '.join(written.files)}")
    if launch is None:
        print(f"\nno command to launch it: {why_not}")
    elif written.files:
        print(f"\nto run the winner, from any directory:\n  {script_command(options.output)}")
        print(f"which runs, where pretrain_gpt.py is:\n  {command}")
    else:
        print("\nto run the winner: add --output DIR, which writes the files and prints the command")


HELP = "Find the best strategies of a model on a cluster: search them, price them on their schedules, and rank them."

EXAMPLES = """\
examples:
  %(prog)s gpt3-13b examples/clusters/a100-64.json --global-batch-size 64
  %(prog)s llama2-7b hostfile --device A100-80GB --global-batch-size 64 --output plan
  %(prog)s model.json hostfile --device H100 --global-batch-size 64 --schedule 1f1b --num-token-slices 1,4,8 --explain

Read on: docs/how-to/search.md."""

LEAST_TOP = 10
"""Strategies that are searched for however few are listed, so that a short list has the same winner and advice."""

NOTHING = "nothing"
"""Value of `--explain` without a file."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_model_flags(parser)
    add_cluster_flags(parser)
    add_cost_flags(parser)
    add_software_flag(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--global-batch-size", type=int, required=True, metavar="N", help="sequences of one optimizer step"
    )
    group.add_argument("--top", type=int, default=10, metavar="K", help="strategies to list (default: 10)")
    group.add_argument(
        "--effort", type=float, default=1.0, metavar="X", help="amount of simulation; 1 takes seconds (default: 1)"
    )
    add_headroom_flag(group)
    group.add_argument(
        "--explain",
        nargs="?",
        const=NOTHING,
        metavar="STRATEGY.json",
        help="print how many strategies each rule rejected; with a file, print why that strategy did not win",
    )
    group.add_argument(
        "--rivals",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="for sequences from 32,768 tokens, price ZeRO-3 with Ulysses beside the ranking (default: on)",
    )
    group.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show progress (default: on a terminal)"
    )
    group.add_argument(
        "--propose-trials",
        metavar="FILE.jsonl",
        help=(
            "write the few strategies whose trials would reduce the uncertainty of predictions most, for trial "
            "--strategies"
        ),
    )
    add_constraint_flags(parser)
    add_output_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Search, print what was found, and return the exit code: 1 if no strategy can run."""
    _check(options)
    workload = model_of(options)
    cluster, notes = cluster_of(options)
    precision = precision_of(options, cluster)
    software = find_software(options.software)
    problem = SearchProblem(
        workload=workload,
        cluster=cluster,
        global_batch_size=options.global_batch_size,
        precision=precision,
        software=software,
        memory_headroom=headroom_of(options),
    )
    constraints = constraints_of(options)
    check_runnable(constraints, software)
    choices = all_choices(problem).constrained(constraints)
    costs = costs_of(options, workload, cluster, precision, software)
    asked = None if options.explain in (None, NOTHING) else read_one_strategy(options.explain)
    start = time.perf_counter()
    with progress_bar(options.progress) as progress:
        top = max(options.top, LEAST_TOP)
        result = search(
            problem,
            choices,
            costs.pricing_on,
            top=top,
            effort=options.effort,
            other_layouts=True,
            progress=progress,
        )
        result = replace(result, entries=result.entries[: options.top])
        advice = advise(result, problem, constraints, costs, progress, rivals=options.rivals)
        proposed = []
        if result.entries and options.propose_trials is not None:
            proposed.append(write_proposals(options.propose_trials, problem, choices, costs, progress))
    answer = Answer(
        workload=workload,
        cluster=cluster,
        precision=precision,
        software=problem.software.name,
        global_batch_size=options.global_batch_size,
        constraints=constraints,
        entries=with_intervals(result.entries, costs, cluster),
        counts=result.counts,
        proven=result.proven and bool(result.entries),
        could_save=result.could_save,
        search_s=time.perf_counter() - start,
        advice=advice,
        notes=(
            *(*advice_notes(advice, problem), *notes, *costs.notes, *how_sure(result), *proposed),
            *map(rival_note, advice.rivals),
        ),
        why_none="" if result.entries else nothing_fits(result, advice, problem),
    )
    # Strategies say by their placement where ranks stand, and the cost model reads it.
    show_answer(options, answer, costs.pricing_on(cluster).cost_model.pipeline_costs)
    lines = [] if options.explain is None else explain_space(result)
    if asked is not None:
        lines += explain_strategy(asked, problem, result, costs, choices=choices, constraints=constraints)
    # JSON on the terminal stands alone there.
    out = sys.stderr if options.json == STANDARD_OUTPUT else sys.stdout
    print("\n".join(lines), file=out, end="\n" if lines else "")
    if answer.why_none:
        print(f"error: {answer.why_none}", file=sys.stderr)
        return 1
    return 0


def with_intervals(entries: Sequence[Ranked], costs: Costs, cluster: Cluster) -> list[Ranked]:
    """Return the entries with the interval of every price.

    Args:
        cluster: the cluster, in the order of its hostfile.
    """
    pricing = costs.pricing_on(cluster)
    return [
        replace(entry, prediction=costs.with_interval(entry.strategy, entry.prediction, pricing))
        if entry.prediction is not None
        else entry
        for entry in entries
    ]


def how_sure(result: SearchResult) -> list[str]:
    """Return a note that says whether a strategy that was not simulated could win; empty if nothing was found."""
    if not result.entries:
        return []
    counted = f"{result.counts.priced:,} strategies priced in closed form, {result.counts.simulated} simulated"
    if result.proven:
        return [f"{counted}: none of the others can be faster under this model"]
    return [f"{counted}: one of the others could be {result.could_save:.1%} faster at most; more --effort tells"]


def _check(options: argparse.Namespace) -> None:
    check_count("--global-batch-size", options.global_batch_size, MOST_SEQUENCES)
    check_count("--top", options.top)
    if not 0 < options.effort < math.inf:
        raise ConfigError(f"--effort {options.effort} is not above 0 and finite: give 1, or more for a longer search")
