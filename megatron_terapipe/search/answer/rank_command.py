"""Command `rank`: the best strategies of a model on a cluster, with reasons and advice.

run -> search -> advise -> RankDocument -> write_files, show_answer; --explain: explain_space, explain_strategy
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, add_json_flag
from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.console import output_console, print_text
from megatron_terapipe.search.answer.answer import compare, entries_of, ranking, value_text
from megatron_terapipe.search.answer.figures import add_training_flags, training_of
from megatron_terapipe.search.answer.flags import (
    MANY,
    above_zero,
    add_batch_flag,
    add_constraint_flags,
    add_headroom_flag,
    add_progress_flag,
    add_question_flags,
    progress_bar,
    read_one_strategy,
)
from megatron_terapipe.search.answer.json_documents import RankDocument, SearchPart, WhatIfPart
from megatron_terapipe.search.answer.other_trainers import other_trainers
from megatron_terapipe.search.answer.output_files import script_command, write_document, write_files
from megatron_terapipe.search.answer.question import Question, question_of
from megatron_terapipe.search.answer.screen import print_notes, print_table
from megatron_terapipe.search.answer.what_if import if_nothing_fits, what_ifs
from megatron_terapipe.search.learn.cluster_calibrations import propose_strategies
from megatron_terapipe.search.rank.grid_prices import COARSE_SUMS, FITS, HEADROOM, NEEDS_NO_HOSTS
from megatron_terapipe.search.rank.rules import DUPLICATES, USES_DEVICES, ProgressCallback
from megatron_terapipe.search.rank.search import ROUNDING, SearchResult, predict_one, search, with_batch
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from megatron_terapipe.texts import bytes_text, strategy_text, time_text

HELP = "Find the best strategies of a model on a cluster: search them, price them on their schedules, and rank them."

EXAMPLES = """\
examples:
  %(prog)s gpt3-13b examples/clusters/a100-64.json --global-batch-size 64
  %(prog)s llama2-7b hostfile --device A100-80GB --global-batch-size 64 --output plan
  %(prog)s model.json hostfile --device H100 --global-batch-size 64 --schedule 1f1b --num-token-slices 1,4,8 --explain
"""

LEAST_TOP = 10
"""Strategies that are searched for however few are listed, so that a short list has the same winner and advice."""

NOTHING = "nothing"  # value of `--explain` without a file

CANDIDATES = 100
"""Best strategies among which trials are chosen; trials of much slower ones hardly concern the winner."""

NUM_TRIALS = (
    8  # trials that are proposed; as many as `benchmarks.search_peers few` compares with trials chosen at random
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_question_flags(parser, software=True)
    add_training_flags(parser)
    group = parser.add_argument_group("search")
    add_batch_flag(group)
    group.add_argument("--top", type=MANY, default=10, metavar="K", help="rows to list (default: 10)")
    group.add_argument(
        "--all-variants", action="store_true", help="list all strategies, not only the best of each parallel layout"
    )
    group.add_argument(
        "--effort", type=above_zero, default=1.0, metavar="X", help="amount of simulation; 1 takes seconds (default: 1)"
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
        help="also find the best strategies of other trainers on the same devices (default: on)",
    )
    add_progress_flag(group)
    group.add_argument(
        "--propose-trials",
        metavar="FILE.jsonl",
        help=(
            "write the few strategies whose trials would reduce the uncertainty of predictions most, for trial "
            "--strategies"
        ),
    )
    add_constraint_flags(parser)
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


def run(options: argparse.Namespace) -> int:
    """Search, print the answer, and return the exit code: 1 if no strategy can run."""
    question, notes = question_of(options)
    problem, costs = question.problem, question.costs
    training = training_of(options, problem.cluster)
    explained = None if options.explain in (None, NOTHING) else read_one_strategy(options.explain, "--explain")
    with progress_bar(options.progress) as progress:
        result = search(
            problem,
            question.choices,
            costs.pricing_on,
            top=max(options.top, LEAST_TOP),
            effort=options.effort,
            all_variants=options.all_variants,
            progress=progress,
        )
        result = replace(result, entries=result.entries[: options.top])
        if result.entries:
            advice, why_none = what_ifs(question, result, progress, training), None
        else:
            advice = list(if_nothing_fits(question, result))
            why_none = nothing_fits(result, advice, problem)
        proposed = ""
        if result.entries and options.propose_trials is not None:
            proposed = write_proposals(options.propose_trials, question, progress)
    # Placements of strategies are in terms of the cluster in the order of its hostfile.
    pricing = question.pricing
    entries = [
        replace(entry, prediction=costs.with_interval(entry.strategy, entry.price, pricing)) for entry in result.entries
    ]
    if options.rivals:
        advice += other_trainers(question, entries[0] if entries else None)
    uncalibrated = "no calibration on this cluster: intervals are wide, because data sheets are uncertain"
    assumed = [*notes] if options.calibrate or options.calibration else [*notes, uncalibrated]
    counts = result.counts
    fields = ranking(
        problem,
        entries,
        (*costs.notes, *assumed),
        global_batch_size=problem.global_batch_size,
        constraints=question.constraints,
        training=training,
    )
    for each in advice if not entries else ():
        fields["answer"] = f"nothing fits: {each.line}" if each.name == "nearest" else fields["answer"]
    document = RankDocument(
        **fields,
        advice=sorted(advice, key=lambda each: -each.change),
        search=SearchPart(
            considered=counts.total,
            rejected={name: number for name, number in counts.rejected.items() if number},
            priced=counts.priced,
            simulated=counts.simulated,
            proven=result.proven and bool(result.entries),
            could_save=result.could_save,
        ),
        why_none=why_none,
    )
    op_costs = pricing.cost_model.pipeline_costs
    document = write_files(document, problem, op_costs, directory=options.output, html=options.html)
    show_answer(options, document, [*costs.notes], proposed)
    lines = [] if options.explain is None else explain_space(result)
    if explained is not None:
        lines += explain_strategy(explained, question, result)
    # JSON on the terminal is the only text there.
    out = sys.stderr if options.json == STANDARD_OUTPUT else sys.stdout
    console = output_console(file=out)
    for line in lines:
        print_text(console, line, indent="    ")
    if document.why_none:
        print(f"error: {document.why_none}", file=sys.stderr)
        return 1
    return 0


def nothing_fits(result: SearchResult, advice: list[WhatIfPart], problem: SearchProblem) -> str:
    """Return why no strategy remains: the rule that the last ones broke, and the remedy."""
    doubles = {COARSE_SUMS, NEEDS_NO_HOSTS, *(rule.name for rule in DUPLICATES)}
    rejected = [(name, number) for name, number in result.counts.rejected.items() if number and name not in doubles]
    if not rejected:
        return "no strategy can run: no layout of the ranks has the sizes that flags fix; drop one of these flags"
    remedies = " or ".join(each.line for each in advice if each.name != "nearest")
    remedies = f": one would with {remedies}" if remedies else ""
    last, number = rejected[-1]
    if result.too_full is not None:
        return (
            f"no strategy can run: {result.counts.rejected[HEADROOM]:,} fit the devices, but none keeps as much memory "
            f"free as --memory-headroom asks for{remedies}"
        )
    if last in (FITS, HEADROOM):
        number = result.counts.rejected[FITS] + result.counts.rejected[HEADROOM]
        return (
            f"no strategy can run: all {number:,} that keep the other rules need more memory than the devices have"
            f"{remedies.replace('would with', 'would fit with')}"
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


def show_answer(options: argparse.Namespace, document: RankDocument, costs: list[str], proposed: str) -> None:
    """Write the JSON, and print the table, the notes and the commands that launch the winner.

    Args:
        costs: notes on the sources of prices.
        proposed: a note on the trials that were proposed; empty = none were asked for.
    """
    write_document(options.json, document)
    if options.json == STANDARD_OUTPUT:
        return
    launch = document.launch
    print_table(document)
    print_notes(document, costs, explained=options.explain is not None)
    if proposed:
        print(f"\n{proposed}")
    if launch.files:
        print("\nwritten:", *launch.files, sep="\n  ")
    if launch.command is None and document.entries:
        print(f"\nno command to launch it: {launch.why_not}")
    elif launch.command is not None and launch.files:
        print(f"\nto run the winner, from any directory:\n  {script_command(options.output)}")
        print(f"which runs:\n  {launch.command}")
    elif launch.command is not None:
        print()
        hint = "to run the winner: add --output DIR, which writes the files and prints the command"
        print_text(output_console(), hint, indent="  ")
    if options.explain is None:
        print("for all notes and assumptions in full sentences: add --explain")


def explain_space(result: SearchResult) -> list[str]:
    """Return how many strategies each rule rejected, a line each, and three that their exact price rejected."""
    lines = [f"{number:>14,}  {name}" for name, number in result.counts.lines()]
    return lines + [f"{strategy_text(entry.strategy)}: {entry.reason}" for entry in result.refused[:3]]


def explain_strategy(strategy: Strategy, asked: Question, result: SearchResult) -> list[str]:
    """Return why a strategy did not win, in lines."""
    problem, pricing = asked.problem, asked.pricing
    strategy = with_batch(strategy, problem.global_batch_size)
    entry = predict_one(strategy, problem, pricing)
    title = f"why not {strategy_text(strategy)}?"
    if not entry.feasible or entry.prediction is None:
        return [title, f"  It cannot run: {entry.reason}."]
    peak = bytes_text(entry.prediction.peak_memory_bytes)
    left_out = [*_left_out(strategy, asked)]
    if too_full := pricing.why_it_does_not_fit(strategy, entry.prediction.memory, problem.memory_headroom):
        left_out.append(f"It leaves too little memory free ({too_full}).")
    lines = [f"It takes {time_text(entry.iteration_time_s)} and {peak} on the fullest rank.", *left_out]
    if result.entries:
        ratio = entry.iteration_time_s / result.entries[0].iteration_time_s
        changes, sentences = compare(*entries_of(problem, [result.entries[0], entry]))
        lines += [f"{words}: the winner has {value}, and it {other}" for words, value, other in changes]
        if ratio < 1 - ROUNDING:
            why = "" if left_out else "; the search did not come to it, or a rule of --explain leaves it out"
            lines.append(f"It is {1 - ratio:.1%} faster than the winner{why}.")
        else:
            lines += ["The winner compared with it:", *(f"  {sentence}" for sentence in sentences)]
    return [title, *(f"  {line}" for line in lines)]


def _left_out(strategy: Strategy, asked: Question) -> Iterator[str]:
    """Yield the values of a strategy that the question, its flags or the search leave out."""
    number, constraints = asked.problem.cluster.num_devices, asked.constraints
    if strategy.world_size != number:
        yield f"It uses {strategy.world_size} of the {number} devices, and the ranking all (--devices-at-most)."
    if strategy.global_batch_size != asked.problem.global_batch_size:
        yield f"Its batch of {strategy.global_batch_size} sequences is not the one that was searched for."
    for each in DIMENSIONS:
        value, values = getattr(strategy, each.name), asked.choices.values.get(each.name)
        if each.name == "token_slices":
            # One flag gives one list; without it lengths are solved for.
            values = None if values is None else (values,)
        elif isinstance(value, tuple) and each.name not in constraints:
            continue  # layers of stages are solved for
        if values is None or value in values:
            continue
        if each.name in constraints:
            allowed = " or ".join(value_text(value) for value in values)
            yield f"{each.flag} leaves it out: {value_text(value)} is not {allowed}."
        else:
            yield f"The search tries {each.name} {value_text(value)} only with a flag: {each.flag}."


def write_proposals(path: str, asked: Question, progress: ProgressCallback) -> str:
    """Choose trials, and write them a line each, as `trial --strategies` reads them; return a note for the answer."""
    costs = asked.costs
    found = search(asked.problem, asked.choices, costs.pricing_on, top=CANDIDATES, all_variants=True, progress=progress)
    candidates = [entry.strategy for entry in found.entries]
    chosen = propose_strategies(asked.pricing.cost_model, candidates, costs.calibration, NUM_TRIALS)
    lines = [json.dumps(strategy.to_json()) + "\n" for strategy in chosen]
    write_text(path, "".join(lines), make_folder=True)
    return (
        f"{path} has {len(chosen)} of the {len(candidates)} best strategies, with the trials that reduce uncertainty "
        f"most, in this order: run them with `terapipe search trial --strategies {path}`, then rank with --calibrate"
    )
