"""Command `rank`: the best strategies of a model on a cluster, why, and what to change or doubt.

run -> search -> advise -> Answer -> show_answer; --explain: explain_space, explain_strategy
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, add_json_flag
from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.config.batch import MOST_SEQUENCES
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.advice import (
    Advice,
    RivalAdvice,
    TooFull,
    advice_notes,
    compare_rival,
    distance_text,
    remedies_text,
    rival_note,
)
from megatron_terapipe.search.answer.answer import Answer, compare, rank_document
from megatron_terapipe.search.answer.figures import bytes_text, strategy_text, time_text
from megatron_terapipe.search.answer.flags import (
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
from megatron_terapipe.search.answer.json_schema import LaunchPart
from megatron_terapipe.search.answer.output_files import (
    OpCostsOf,
    how_to_run,
    script_command,
    winner_launch,
    write_answer,
    write_document,
    write_page,
)
from megatron_terapipe.search.answer.table import print_table
from megatron_terapipe.search.answer.utilisation import check_utilization
from megatron_terapipe.search.learn.cluster_calibrations import propose_strategies
from megatron_terapipe.search.learn.costs import Costs, costs_of
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.terapipe import TERAPIPE
from megatron_terapipe.search.machine.trainers import find_software
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.prediction import Prediction
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.alternatives import on_fewer_devices, with_found_order
from megatron_terapipe.search.rank.distance_to_fit import distance_to_fit
from megatron_terapipe.search.rank.grid_prices import FITS, HEADROOM, ProgressCallback
from megatron_terapipe.search.rank.ranked import Ranked, predict_one
from megatron_terapipe.search.rank.rivals import best_rival, has_rival
from megatron_terapipe.search.rank.rules import DUPLICATE_RULES, USES_DEVICES
from megatron_terapipe.search.rank.search import ROUNDING, SearchResult, search
from megatron_terapipe.search.rank.sensitivity import sensitivity
from megatron_terapipe.search.rank.space import Choices, SearchProblem, all_choices, check_runnable
from megatron_terapipe.strategy import DIMENSIONS, Strategy


def fullness(entry: Ranked, pricing: Pricing) -> float:
    """Return the predicted share of memory that is used on the fullest device, in [0, 1] if it fits."""
    assert entry.prediction is not None
    held = zip(entry.prediction.memory, pricing.cost_model.groups(entry.strategy).devices, strict=True)
    return max(memory.total / min(device.memory_bytes for device in devices) for memory, devices in held)


def advise(
    result: SearchResult,
    problem: SearchProblem,
    constraints: Mapping[str, tuple[Any, ...]],
    costs: Costs,
    progress: ProgressCallback | None = None,
    *,
    rivals: bool = True,
) -> Advice:
    """Return the advice that goes with the result of a search."""
    pricing = costs.pricing_on(problem.cluster)
    compared = _rivals(result, problem, pricing) if rivals else ()
    full = None if result.too_full is None else _too_full(result.too_full, result, pricing)
    if not result.entries:
        short = result.counts.rejected[FITS] or result.counts.rejected[HEADROOM]

        def pricing_of(workload: Workload, cluster: Cluster) -> Pricing:
            return replace(costs, workload=workload).pricing_on(cluster)

        return Advice(
            memory_headroom=problem.memory_headroom,
            too_full=full,
            distance=distance_to_fit(problem, constraints, pricing_of) if short else None,
            rivals=compared,
        )
    winner = result.entries[0]
    order = with_found_order(winner, problem, constraints, pricing)
    return Advice(
        memory_headroom=problem.memory_headroom,
        too_full=full,
        fewer_devices=on_fewer_devices(winner, problem, constraints, costs.pricing_on, progress),
        sensitivity=sensitivity(result.contenders, pricing),
        utilization=check_utilization(winner, pricing.cost_model),
        rivals=compared,
        found_order=order,
        found_order_saves=0.0 if order is None else 1 - order.iteration_time_s / winner.iteration_time_s,
    )


def _rivals(result: SearchResult, problem: SearchProblem, pricing: Pricing) -> tuple[RivalAdvice, ...]:
    """Return what would be run in place of this trainer; nothing beside strategies of other trainers."""
    if problem.software.name != TERAPIPE.name or not has_rival(pricing):
        return ()
    rival = best_rival(pricing, problem.global_batch_size, headroom=problem.memory_headroom)
    winner = next(iter(result.entries), None)
    return () if rival is None else (compare_rival(rival, winner, problem.workload, problem.cluster),)


def _too_full(entry: Ranked, result: SearchResult, pricing: Pricing) -> TooFull:
    saves = None
    if result.entries and result.entries[0].prediction is not None and entry.prediction is not None:
        saves = 1 - entry.iteration_time_s / result.entries[0].iteration_time_s
    return TooFull(entry=entry, left_free=1 - fullness(entry, pricing), could_save=saves)


def explain_space(result: SearchResult) -> list[str]:
    """Return lines that say how many strategies each rule rejected."""
    rows = [(name, f"{number:,}") for name, number in result.counts.lines()]
    wide = max(len(name) for name, _ in rows)
    lines = [f"{name:<{wide}}  {number:>14}" for name, number in rows]
    lines += [f"  {strategy_text(entry.strategy)}: {entry.reason}" for entry in result.refused[:3]]
    return lines


def explain_strategy(
    strategy: Strategy,
    problem: SearchProblem,
    result: SearchResult,
    costs: Costs,
    *,
    choices: Choices,
    constraints: Mapping[str, tuple[Any, ...]],
) -> list[str]:
    """Return lines that say why a strategy did not win."""
    if strategy.global_batch_size is None and not problem.global_batch_size % (
        strategy.micro_batch_size * strategy.data_parallel_size
    ):
        strategy = replace(strategy, global_batch_size=problem.global_batch_size)
    pricing = costs.pricing_on(problem.cluster)
    entry = predict_one(strategy, problem, pricing)
    title = f"why not {strategy_text(strategy)}?"
    if not entry.feasible or entry.prediction is None:
        return [title, f"  It cannot run: {entry.reason}."]
    lines = [title, f"  It takes {time_text(entry.prediction.iteration_time_s)} and {_peak(entry.prediction)}."]
    too_full = pricing.why_it_does_not_fit(strategy, entry.prediction.memory, problem.memory_headroom)
    left_out = [
        *_other_question(strategy, problem, result),
        *_not_searched(strategy, choices, constraints),
        *([f"It leaves too little memory free ({too_full})."] if too_full is not None else []),
    ]
    lines += [f"  {reason}" for reason in left_out]
    if not result.entries:
        return lines
    winner = result.entries[0]
    assert winner.prediction is not None
    time_s, best_s = entry.prediction.iteration_time_s, winner.prediction.iteration_time_s
    if time_s < best_s * (1 - ROUNDING):
        words = f"  It is {1 - time_s / best_s:.1%} faster than the winner"
        lines.append(f"{words}." if left_out else f"{words}: the search did not come to it; more --effort does.")
    elif time_s <= best_s * (1 + ROUNDING):
        return [*lines, "  It is as fast as the winner."]
    comparison = compare(winner, entry)
    lines += [f"  {words}: the winner has {value}, and it {other}" for words, value, other in comparison.changes]
    if time_s > best_s:
        lines += ["  The winner beside it:", *(f"    {sentence}" for sentence in comparison.sentences)]
    return lines


def _other_question(strategy: Strategy, problem: SearchProblem, result: SearchResult) -> list[str]:
    """Return in what the strategy answers another question than the search."""
    found = []
    if strategy.world_size != problem.cluster.num_devices:
        found.append(
            f"It uses {strategy.world_size} of the {problem.cluster.num_devices} devices, and every strategy of the "
            "ranking uses all (--devices-at-most)."
        )
    if strategy.global_batch_size != problem.global_batch_size:
        found.append(f"Its batch of {strategy.global_batch_size} sequences is not the one that was searched for.")
    stages = {entry.strategy.zero_stage for entry in result.entries}
    if problem.precision == "bf16" and stages and strategy.zero_stage < min(stages):
        found.append("ZeRO 0 adds bf16 gradients up in bf16, with few digits: set --zero-stage 0 to search it.")
    return found


def _not_searched(strategy: Strategy, choices: Choices, constraints: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the values of a strategy that flags or the search itself leave out."""
    found = []
    for each in DIMENSIONS:
        value, values = getattr(strategy, each.name), choices.values.get(each.name)
        if each.name == "token_slices":
            # One flag gives one list; without it lengths are solved for.
            values = None if values is None else (values,)
        elif isinstance(value, tuple) and each.name not in constraints:
            continue  # layers of stages are solved for
        if values is None or value in values:
            continue
        if each.name in constraints:
            found.append(f"{each.flag} leaves it out: {_text(value)} is not {' or '.join(map(_text, values))}.")
        else:
            found.append(f"The search does not try {each.name} {_text(value)} where no flag asks for it: {each.flag}.")
    return found


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _peak(prediction: Prediction) -> str:
    return f"{bytes_text(prediction.peak_memory_bytes)} on the fullest rank"


def nothing_fits(result: SearchResult, advice: Advice, problem: SearchProblem) -> str:
    """Return why no strategy is left, and what to change: the rule that the last ones broke, and the remedy."""
    doubles = {rule.name for rule in DUPLICATE_RULES}
    rejected = [(name, number) for name, number in result.counts.rejected.items() if number and name not in doubles]
    if not rejected:
        return "no strategy can run: no layout of the ranks has the sizes that flags fix; drop one of these flags"
    if result.too_full is not None:
        with_room = "" if advice.distance is None else f"; one would with {remedies_text(advice.distance, problem)}"
        return (
            f"no strategy can run: {result.counts.rejected[HEADROOM]:,} fit the devices, but none keeps as much memory "
            f"free as --memory-headroom asks for{with_room}"
        )
    nearest = "" if advice.distance is None else f": {distance_text(advice.distance, problem)}"
    last, number = rejected[-1]
    if last in (FITS, HEADROOM):
        return (
            f"no strategy can run: all {number:,} that keep the other rules need more memory than the devices have"
            f"{nearest}"
        )
    if last == USES_DEVICES:
        devices = problem.cluster.num_devices
        return (
            f"no strategy can run: the parallel sizes that flags fix do not divide the {devices} devices: give "
            f"divisors of {devices}, or use fewer devices with --devices-at-most"
        )
    return (
        f"no strategy can run: the last {number:,} break the rule '{last}'; drop a flag that fixes a dimension, or "
        "take another batch or fewer devices with --devices-at-most (--explain counts every rule)"
    )


CANDIDATES = 100
"""Best strategies among which trials are chosen; trials of much slower ones would say little about the winner."""

NUM_TRIALS = 8
"""Trials that are proposed; as many as `benchmarks.search_peers` compares with trials chosen at random."""


def write_proposals(
    path: str, problem: SearchProblem, choices: Choices, costs: Costs, progress: ProgressCallback | None
) -> str:
    """Choose trials, and write them a line each, as `trial --strategies` reads them."""
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
    """Print an answer and write what was asked for."""
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
            problem, choices, costs.pricing_on, top=top, effort=options.effort, other_layouts=True, progress=progress
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
