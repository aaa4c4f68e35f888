"""The files of an answer: its JSON, its page, and what launches the winner."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.render.html import Panel
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.text.json_flag import write_json
from deepspeed_ext.plan.text.text_files import write_text
from deepspeed_ext.plan.timeline import Timeline
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.report.advice import FOUND_ORDER
from megatron_terapipe.search.report.answer import Answer
from megatron_terapipe.search.report.comparison import rivals
from megatron_terapipe.search.report.documents import document_text, rank_document
from megatron_terapipe.search.report.figures import strategy_text
from megatron_terapipe.search.report.launch import Launch, launch_of
from megatron_terapipe.search.report.page import Extras, render_page
from megatron_terapipe.search.report.schema.schema import Document, LaunchPart
from megatron_terapipe.search.software.terapipe import TERAPIPE
from megatron_terapipe.strategy import Strategy

MOST_OPS = 12_000
"""Ops that are drawn at most: a page of them is 2 MB and opens at once."""


def timeline_of(strategy: Strategy, costs: OpCosts) -> tuple[Timeline, str] | None:
    """Return the simulated timeline of a strategy, to draw it.

    Args:
        costs: times of its ops in seconds.

    Returns:
        The timeline, with fewer micro-batches where all of them are too many to draw, and a line that says so (empty
        otherwise); None if the schedule is none of those that have a name.
    """
    if strategy.schedule not in SCHEDULES:
        return None
    num_stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
    each = num_stages * strategy.num_token_slices * (3 if costs.weight_gradient is not None else 2)
    # Enough to fill the pipeline and to see it steady.
    fewest = min(strategy.num_micro_batches, 2 * strategy.pipeline_parallel_size)
    drawn = max(fewest, min(strategy.num_micro_batches, MOST_OPS // each))
    shape = PipelineShape(num_stages, drawn, strategy.num_token_slices, strategy.num_model_chunks)
    timeline = simulate(rank_orders(schedule_named(strategy.schedule), shape), shape, costs)
    note = (
        ""
        if drawn == strategy.num_micro_batches
        else f"{drawn} of {strategy.num_micro_batches} micro-batches are drawn"
    )
    return replace(timeline, unit="s"), note


OpCostsOf = Callable[[Strategy], OpCosts]


def write_document(path: str, document: Document) -> None:
    """Write the answer that `--json` asks for.

    Raises:
        UserError: if it cannot be written.
    """
    write_json(path, document_text(document))


def winner_launch(answer: Answer) -> tuple[Launch | None, str]:
    """Return what launches the winner, or None and why nothing does."""
    if not answer.priced:
        return None, "no strategy can run"
    if answer.software != TERAPIPE.name:
        return None, f"these are strategies of {answer.software}, which nothing here launches"
    try:
        return launch_of(answer.priced[0].strategy, answer.workload.config, answer.cluster, answer.precision), ""
    except ConfigError as error:
        return None, str(error)


def found_order_launch(answer: Answer) -> Launch | None:
    """Return what launches the winner with the order that was found for it; None where there is none, or no launch."""
    found = answer.advice.found_order
    if found is None or winner_launch(answer)[0] is None:
        return None
    return launch_of(found.strategy, answer.workload.config, answer.cluster, answer.precision)


def script_command(directory: str) -> str:
    """Return the command of the script in a directory, which can be given from everywhere."""
    return shlex.join(["bash", str(Path(directory) / "launch.sh")])


def how_to_run(directory: str | None, command: str) -> str:
    """Return what a page says of running the winner.

    Args:
        directory: where its files are; None = they were not written, and --output DIR writes them.
    """
    written = "" if directory is not None else "# with --output DIR, which writes the files:\n"
    return f"{written}{script_command(directory or 'DIR')}\n# or, where pretrain_gpt.py is:\n{command}"


def write_answer(directory: str, answer: Answer, op_costs: OpCostsOf) -> LaunchPart:
    """Write `ranking.json`, `report.html` and, for the winner, what launches it; return what was written.

    Args:
        directory: where to; made where there is none.
        op_costs: times of the ops of a strategy, for the timelines.

    Raises:
        ConfigError: if a file cannot be written.
    """
    ranking, page = (str(Path(directory) / name) for name in ("ranking.json", "report.html"))
    launch, why_not = winner_launch(answer)
    command = None if launch is None else launch.command(directory)
    write_page(page, answer, op_costs, command="" if command is None else how_to_run(directory, command))
    files = [ranking, page, *([] if launch is None else launch.write(directory))]
    if (other := found_order_launch(answer)) is not None:
        files += other.write(str(Path(directory) / FOUND_ORDER))
    written = LaunchPart(command=command, files=files, why_not=why_not or None)
    write_document(ranking, rank_document(answer, written))
    return written


def write_page(path: str, answer: Answer, op_costs: OpCostsOf, *, command: str = "") -> None:
    """Write the page alone.

    Args:
        op_costs: times of the ops of a strategy, for the timelines.
        command: what launches the winner; empty = nothing does.

    Raises:
        ConfigError: if it cannot be written.
    """
    panels, notes = [], []
    # The winner, and below it the one that differs from it more.
    for entry in [*answer.priced[:1], *rivals(answer.priced)[-1:]]:
        drawn = timeline_of(entry.strategy, op_costs(entry.strategy))
        if drawn is None:
            continue
        title = f"rank {entry.rank}: {strategy_text(entry.strategy)}"
        panels.append(Panel(title, drawn[0]))
        if drawn[1]:
            notes.append(f"rank {entry.rank}: {drawn[1]}")
    write_text(
        path,
        render_page(answer, Extras(command=command, panels=panels, panels_note="; ".join(notes))),
        make_folder=True,
    )
