"""Flags that say where an answer goes, and what prints and writes it."""

import argparse

from megatron_terapipe.search.report.answer import Answer, answer_json
from megatron_terapipe.search.report.files import (
    TERMINAL,
    OpCostsOf,
    winner_launch,
    write_answer,
    write_json,
    write_page,
)
from megatron_terapipe.search.report.table import print_table


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an answer."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", metavar="FILE", help="write the ranking as JSON; - is the terminal, instead of a table"
    )
    group.add_argument("--html", metavar="FILE", help="write a report that opens in any browser")
    group.add_argument(
        "--output",
        metavar="DIR",
        help="write everything: ranking.json, report.html, and strategy.json, hostfile, ds_config.json and launch.sh "
        "for the winner",
    )


def show_answer(options: argparse.Namespace, answer: Answer, op_costs: OpCostsOf, *, top: int | None = None) -> None:
    """Print an answer and write what was asked for.

    Args:
        options: with the flags of `add_output_flags`.
        answer: what was found.
        op_costs: times of the ops of a strategy, for timelines.
        top: lines of the table at most.

    Raises:
        ConfigError: if a file cannot be written.
    """
    if options.json is not None:
        write_json(options.json, answer_json(answer.entries))
    launch, why_not = winner_launch(answer)
    command = "" if launch is None else launch.command(options.output or "DIR")
    if options.html is not None:
        # A page alone has no files beside it that its command could name.
        hint = "" if options.output else "# with --output DIR, which writes the files:\n"
        write_page(options.html, answer, op_costs, command=command and hint + command)
    paths = () if options.output is None else write_answer(options.output, answer, op_costs).paths
    if options.json == TERMINAL:
        return
    print_table(answer, top=top)
    if paths:
        print(f"\nwritten: {', '.join(paths)}")
    if launch is None:
        print(f"\nno command to launch it: {why_not}")
    elif paths:
        print(f"\nto run the winner:\n  {command}")
    else:
        print("\nto run the winner: add --output DIR, which writes the files and prints the command")
