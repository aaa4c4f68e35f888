"""Command `predict`: time and memory of strategies that a file names."""

import argparse
from dataclasses import replace

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, add_json_flag
from megatron_terapipe.config.batch import MOST_SEQUENCES
from megatron_terapipe.search.answer.answer import Answer, predict_document
from megatron_terapipe.search.answer.flags import (
    add_cluster_flags,
    add_cost_flags,
    add_model_flags,
    add_software_flag,
    check_count,
    cluster_of,
    model_of,
    precision_of,
    progress_bar,
    read_strategies,
)
from megatron_terapipe.search.answer.output_files import write_document
from megatron_terapipe.search.answer.table import print_table
from megatron_terapipe.search.learn.costs import costs_of
from megatron_terapipe.search.machine.trainers import find_software
from megatron_terapipe.search.rank.ranked import predict_one, ranked_in_order
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy

HELP = "Predict time and memory of the strategies in a file. For strategies that cannot run, print the reason."

EXAMPLES = """\
examples:
  %(prog)s gpt3-13b examples/clusters/a100-64.json --strategies plan/strategy.json --global-batch-size 64
  %(prog)s gpt3-13b examples/clusters/a100-64.json --strategies strategies.jsonl --global-batch-size 64 --json -

Read on: docs/how-to/search.md."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_model_flags(parser)
    add_cluster_flags(parser)
    add_cost_flags(parser)
    add_software_flag(parser)
    group = parser.add_argument_group("strategies")
    group.add_argument(
        "--strategies",
        "--strategy",
        required=True,
        metavar="S.jsonl",
        help="one strategy, or one entry of a ranking, per line",
    )
    group.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="sequences of one optimizer step, for strategies without a batch size",
    )
    group.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show progress (default: on a terminal)"
    )
    add_json_flag(parser.add_argument_group("output"), "the answer")


def run(options: argparse.Namespace) -> int:
    """Price every strategy, print them in the order of their rank, and return 0; the JSON has the order of the file."""
    check_count("--global-batch-size", options.global_batch_size, MOST_SEQUENCES)
    strategies = [_with_batch(strategy, options.global_batch_size) for strategy in read_strategies(options.strategies)]
    workload = model_of(options)
    cluster, notes = cluster_of(options)
    precision = precision_of(options, cluster)
    software = find_software(options.software)
    costs = costs_of(options, workload, cluster, precision, software)
    pricing = costs.pricing_on(cluster)
    problem = SearchProblem(
        workload=workload,
        cluster=cluster,
        global_batch_size=options.global_batch_size or 1,
        precision=precision,
        software=software,
    )
    entries = []
    with progress_bar(options.progress) as progress:
        for index, strategy in enumerate(strategies):
            if progress is not None:
                progress(index, len(strategies), "priced")
            entry = predict_one(strategy, problem, pricing, index)
            if entry.feasible and entry.prediction is not None:
                priced = costs.with_interval(strategy, entry.prediction, pricing)
                entry = replace(entry, prediction=priced)
            entries.append(entry)
    answer = Answer(
        workload=workload,
        cluster=cluster,
        precision=precision,
        software=problem.software.name,
        global_batch_size=options.global_batch_size,
        entries=ranked_in_order(entries),
        notes=(*notes, *costs.notes),
    )
    if options.json is not None:
        write_document(options.json, predict_document(answer))
    if options.json != STANDARD_OUTPUT:
        print_table(answer)
    return 0


def _with_batch(strategy: Strategy, global_batch_size: int | None) -> Strategy:
    """Return the strategy with the batch of a flag, if it has none itself and that one can be dealt evenly."""
    if strategy.global_batch_size is not None or global_batch_size is None:
        return strategy
    if global_batch_size % (strategy.micro_batch_size * strategy.data_parallel_size):
        return strategy
    return replace(strategy, global_batch_size=global_batch_size)
