"""`trial`: run the best strategies for real, record them, and learn from them."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, add_json_flag
from megatron_terapipe.config.batch import MOST_SEQUENCES
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import check_trainable
from megatron_terapipe.search.answer.figures import strategy_text
from megatron_terapipe.search.answer.flags import (
    add_cluster_flags,
    add_constraint_flags,
    add_cost_flags,
    add_headroom_flag,
    add_model_flags,
    check_count,
    constraints_of,
    headroom_of,
    problem_of,
    progress_bar,
    read_strategies,
)
from megatron_terapipe.search.answer.json_documents import TrialDocument
from megatron_terapipe.search.answer.output_files import write_document
from megatron_terapipe.search.answer.trial_runs import (
    Journal,
    PendingTrial,
    TrialSettings,
    default_trainer,
    print_trials,
    run_strategy,
    trial_document,
)
from megatron_terapipe.search.learn.costs import Costs, costs_of
from megatron_terapipe.search.rank.search import search
from megatron_terapipe.search.rank.space import SearchProblem, all_choices
from megatron_terapipe.strategy import Strategy

HELP = (
    "Run the best strategies of a search, or of a file, for a few iterations each, with DeepSpeed's "
    "launcher. Add a line for each run to a file of trials, calibrate on them, and print the errors of "
    "predictions before and after. Strategies that the file already contains are not run again, so an "
    "interrupted command continues where it stopped."
)

EXAMPLES = """\
examples:
  %(prog)s model.json cluster.json --global-batch-size 8 --top 3
  %(prog)s llama2-7b hostfile --device A100-80GB --global-batch-size 64 --rounds 3 --trials trials.jsonl

Read on: docs/how-to/search.md."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_model_flags(parser)
    add_cluster_flags(parser)
    add_cost_flags(parser)
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--global-batch-size", type=int, required=True, metavar="N", help="sequences of one optimizer step"
    )
    group.add_argument("--top", type=int, default=3, metavar="K", help="strategies of the search to run (default: 3)")
    add_headroom_flag(group)
    group.add_argument("--strategies", metavar="S.jsonl", help="run the strategies of this file instead, one per line")
    group.add_argument("--iterations", type=int, default=10, metavar="N", help="iterations of each run (default: 10)")
    group.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help=(
            "run every strategy so often, all of them in turn, and take the median: 3 where other work disturbs the "
            "machines (default: 1)"
        ),
    )
    group.add_argument(
        "--timeout-s", type=float, default=900.0, metavar="SECONDS", help="end a run that takes longer (default: 900)"
    )
    group.add_argument(
        "--trials",
        metavar="FILE",
        default="trials.jsonl",
        help="file that the results are added to (default: trials.jsonl)",
    )
    group.add_argument(
        "--keep", metavar="DIR", help="keep the strategy, log and metrics of each run in a folder of DIR"
    )
    group.add_argument("--trainer", metavar="FILE", help="path of pretrain_gpt.py (default: in this checkout)")
    group.add_argument(
        "--trainer-flags",
        metavar="WORDS",
        default="",
        help="more flags for the trainer in one text, such as '--data-path PREFIX'; without data, tokens are random",
    )
    add_json_flag(parser.add_argument_group("output"), "the answer")
    add_constraint_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Run and record trials, calibrate on them, compare, and return the exit code: 1 if no trial was measured."""
    check_count("--global-batch-size", options.global_batch_size, MOST_SEQUENCES)
    check_count("--top", options.top)
    check_count("--iterations", options.iterations, least=2)
    check_count("--rounds", options.rounds)
    headroom_of(options)
    if not options.timeout_s > 0:
        raise ConfigError(f"--timeout-s {options.timeout_s:g} is not above 0: give seconds")
    if options.trainer and not Path(options.trainer).is_file():
        raise ConfigError(f"--trainer {options.trainer} is not a file: name pretrain_gpt.py")
    # JSON on the terminal is the only text there.
    with redirect_stdout(sys.stderr) if options.json == STANDARD_OUTPUT else nullcontext():
        document = _run(options)
    write_document(options.json, document)
    return 0 if any(entry.iteration_time_s is not None for entry in document.entries) else 1


def _run(options: argparse.Namespace) -> TrialDocument:
    """Run the missing trials, print them with their predictions, and return the answer."""
    problem, notes = problem_of(options, options.global_batch_size)
    if problem.workload.config is None:
        raise ConfigError(f"{options.model} lists layers, which the trainer cannot build: give a model by its fields")
    costs = costs_of(options, problem)
    print(*(f"note: {note}" for note in (*notes, *costs.notes)), sep="\n", file=sys.stderr)
    journal = Journal(path=Path(options.trials), problem=problem)
    settings = TrialSettings(
        iterations=options.iterations,
        timeout_s=options.timeout_s,
        trainer=Path(options.trainer).absolute() if options.trainer else default_trainer(),
        flags=tuple(shlex.split(options.trainer_flags)),
        keep=Path(options.keep).absolute() if options.keep else None,
    )
    strategies = _strategies(options, problem, costs)
    pending = journal.pending(strategies, options.rounds)
    if len(pending) < len(strategies):
        print(f"{len(strategies) - len(pending)} of {len(strategies)} are in {options.trials} and are not run again")
    if pending:
        rounds = f", in {options.rounds} rounds of all of them" if options.rounds > 1 else ""
        number = f"{len(pending)} {'strategy' if len(pending) == 1 else 'strategies'}"
        print(
            f"running {number} for {options.iterations} iterations each{rounds}; a run also takes the time to start "
            f"DeepSpeed, and at most {options.timeout_s:g} s in all\n"
            f"each result is added to {options.trials}: an interrupted command continues where it stopped",
            flush=True,
        )
    try:
        _run_all(pending, journal, settings, costs, rounds=options.rounds)
    finally:
        # Results are shown after an interruption, too.
        document = trial_document(journal, costs, (*notes, *costs.notes))
        print_trials(document)
        if document.errors is not None:
            rank = "" if options.profile is None else f" --profile {options.profile}"
            train = "" if options.profile is None else f" --op-profile {options.profile}"
            print(
                f"next: terapipe search rank {options.model} {options.cluster} --global-batch-size "
                f"{options.global_batch_size}{rank} --calibrate {options.trials}\n"
                f"  or: pretrain_gpt.py --strategy auto --cluster {options.cluster}{train} "
                f"--op-calibration {options.trials}"
            )
    return document


def _strategies(options: argparse.Namespace, problem: SearchProblem, costs: Costs) -> list[Strategy]:
    """Return the strategies to run, the most promising first."""
    batch, num_devices = problem.global_batch_size, problem.cluster.num_devices
    if options.strategies:
        read = read_strategies(options.strategies)
        found = [replace(each, global_batch_size=each.global_batch_size or batch) for each in read]
        for each in found:
            if each.global_batch_size != batch:
                raise ConfigError(
                    f"{options.strategies} has a strategy of global_batch_size {each.global_batch_size}, and "
                    f"--global-batch-size is {batch}: trials of one file are compared, so give them one batch"
                )
            if each.world_size > num_devices:
                raise ConfigError(
                    f"{options.strategies} has a strategy for {each.world_size} devices, and the cluster has "
                    f"{num_devices}: leave it out"
                )
            assert problem.workload.config is not None
            check_trainable(each, problem.workload.config)
        return found
    constraints = constraints_of(options)
    problem = costs.problem_with(problem, constraints)
    choices = all_choices(problem).constrained(constraints)
    with progress_bar() as progress:
        result = search(problem, choices, costs.pricing_on, top=options.top, progress=progress)
    if not result.entries:
        raise ConfigError("no strategy can run: `terapipe search rank --explain` with the same flags explains it")
    return [entry.strategy for entry in result.entries]


def _run_all(
    pending: Sequence[PendingTrial], journal: Journal, settings: TrialSettings, costs: Costs, *, rounds: int
) -> None:
    """Run every strategy in its missing rounds, and record each run at once."""
    pricing = costs.pricing_on(journal.problem.cluster)
    queue = [each for number in range(rounds) for each in pending if len(each.runs) <= number]
    started = perf_counter()
    for done, (name, strategy, runs) in enumerate(queue):
        left = f", about {(perf_counter() - started) / done * (len(queue) - done):.0f} s left" if done else ""
        predicted = f"predicted {pricing.predict(strategy).iteration_time_s:.4g} s"
        print(f"{done + 1}/{len(queue)}{left}  {strategy_text(strategy)}  {predicted}", end="", flush=True)
        runs.append(run_strategy(strategy, journal.problem, settings, name=name))
        print(f", {runs[-1].in_words()}", flush=True)
        journal.write(strategy, runs, trial_id=name, rounds=rounds)
