"""Command `predict`: time and memory of strategies that a file names."""

import argparse
from dataclasses import replace

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, add_json_flag
from megatron_terapipe.search.answer.answer import ranking
from megatron_terapipe.search.answer.figures import add_training_flags, training_of
from megatron_terapipe.search.answer.flags import (
    add_batch_flag,
    add_progress_flag,
    add_question_flags,
    progress_bar,
    read_strategies,
)
from megatron_terapipe.search.answer.json_documents import PredictDocument
from megatron_terapipe.search.answer.output_files import write_document
from megatron_terapipe.search.answer.question import question_of
from megatron_terapipe.search.answer.screen import print_table
from megatron_terapipe.search.rank.search import predict_one, ranked_in_order, with_batch

HELP = "Predict time and memory of the strategies in a file. For strategies that cannot run, print the reason."

EXAMPLES = """\
examples:
  %(prog)s gpt3-13b examples/clusters/a100-64.json --strategies plan/strategy.json --global-batch-size 64
  %(prog)s gpt3-13b examples/clusters/a100-64.json --strategies strategies.jsonl --global-batch-size 64 --json -"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_question_flags(parser, software=True)
    add_training_flags(parser)
    group = parser.add_argument_group("strategies")
    group.add_argument(
        "--strategies",
        "--strategy",
        required=True,
        metavar="S.jsonl",
        help="one strategy, or one entry of a ranking, per line",
    )
    add_batch_flag(group, required=False, more=", for strategies without a batch size")
    add_progress_flag(group)
    add_json_flag(parser.add_argument_group("output"), "the answer")


def run(options: argparse.Namespace) -> int:
    """Price every strategy, print them in the order of their rank, and return 0; the JSON has the order of the file."""
    asked, notes = question_of(options)
    problem, costs, pricing, batch = asked.problem, asked.costs, asked.pricing, options.global_batch_size
    strategies = [with_batch(strategy, batch) for strategy in read_strategies(options.strategies)]
    training = training_of(options, problem.cluster)
    entries = []
    with progress_bar(options.progress) as progress:
        for index, strategy in enumerate(strategies):
            progress(index, len(strategies), "priced")
            entry = predict_one(strategy, problem, pricing, index)
            if entry.feasible:
                entry = replace(entry, prediction=costs.with_interval(strategy, entry.price, pricing))
            entries.append(entry)
    in_file = sorted(ranked_in_order(entries), key=lambda entry: entry.index)
    all_notes = (*notes, *costs.notes)
    document = PredictDocument(**ranking(problem, in_file, all_notes, global_batch_size=batch, training=training))
    write_document(options.json, document)
    if options.json != STANDARD_OUTPUT:
        print_table(document)
        for note in document.notes:
            print(f"- {note}")
    return 0
