"""The screen of a command: the answer in words, the question, the table, and the notes that can change most.

All of it fits 100 columns, and the width of a terminal otherwise; the page and the JSON have the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_terapipe.console import output_console, print_text
from megatron_terapipe.search.answer.answer import why_before
from megatron_terapipe.search.answer.figures import COLUMNS, LEFT, heading, rows_of
from megatron_terapipe.search.answer.json_documents import RankDocument, RankedEntry, Ranking

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DROPPED_FIRST = (
    *("sp", "ZeRO", "bubble", "causal MFU", "shard", "variants", "offload", "vocabulary", "dK dV", "kept"),
    *("tokens/s", "MFU", "device hours", "mbs", "V", "interval", "recompute"),
)
"""Columns that a narrow terminal does without, in this order; the page and the JSON have them."""

KEPT = ("recompute",)  # columns that stay where all rows have the same text
EXPLAINED = {"S": "token slices", "V": "model chunks", "mbs": "micro-batch size", "seq": "context-parallel ranks"}
MOST_NOTES = 5


def print_table(ranking: Ranking, console: "Console | None" = None) -> None:
    """Print the answer, the question and the ranking, with the strategies that cannot run last."""
    console = console or output_console()
    entries = sorted(ranking.entries, key=lambda entry: entry.rank)
    for line in (ranking.answer, heading(ranking)):
        print_text(console, line)
    if not entries:
        return
    names, rows = rows_of(entries)
    shared = _shared(names, rows)
    shown = _fitting([name for name in names if name not in shared and name != "why not"], rows, console.width)
    console.print(_table(entries, shown, rows))
    legend = [f"{name}: {words}" for name, words in EXPLAINED.items() if name in shown or name in shared]
    lines = [f"all rows: {', '.join(f'{name} {text}' for name, text in shared.items())}"] if shared else []
    lines += [", ".join(legend)] if legend else []
    lines += [f"rank {entry.rank} cannot run: {entry.reason}" for entry in entries if not entry.feasible]
    for line in (*lines, *why_before(ranking.priced)):
        print_text(console, line)


def notes_of(document: RankDocument) -> list[str]:
    """Return a line for each kind of change that is worth saying, those first that can change most."""
    found: dict[str, str] = {}
    for each in document.advice:
        # Where nothing fits, the error has the changes with which one does.
        if each.iteration_time_s is not None or (document.priced and each.change):
            found.setdefault(each.name, each.line)
    return list(found.values())


def print_notes(
    document: RankDocument, costs: Sequence[str] = (), *, explained: bool = False, console: "Console | None" = None
) -> None:
    """Print the notes that can change most, a line each.

    Args:
        costs: notes on the sources of prices, which follow where there is room.
        explained: print all in full sentences, which for `costs` are in the document.
    """
    console = console or output_console()
    lines = [*notes_of(document), *costs][:MOST_NOTES]
    if explained:
        lines = [*(f"{each.line}. {each.more}".rstrip() for each in document.advice), *document.notes]
    for line in lines:
        print_text(console, f"- {line}", indent="  ")


def _shared(names: Sequence[str], rows: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the columns of a strategy that have the same text in all of several rows, and this text."""
    if len(rows) < 2:
        return {}
    texts = {name: {row.get(name, "") for row in rows} for _, name in COLUMNS if name in names and name not in KEPT}
    return {name: text for name, (text, *others) in ((name, sorted(of)) for name, of in texts.items()) if not others}


def _fitting(names: list[str], rows: list[dict[str, str]], width: int) -> list[str]:
    """Return the columns that a line has room for."""
    widths = {name: max(map(len, [name, *(row.get(name, "") for row in rows)])) for name in names}
    kept = list(names)
    for name in DROPPED_FIRST:
        if sum(widths[each] + 2 for each in kept) <= width:
            break
        if name in kept:
            kept.remove(name)
    return kept


def _table(entries: Sequence[RankedEntry], names: list[str], rows: list[dict[str, str]]) -> "Table":
    import rich.box
    import rich.table
    import rich.text

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for entry, row in zip(entries, rows, strict=True):
        style = "dim" if not entry.feasible else "bold" if entry.rank == 1 else ""
        # As `Text`, so that brackets in a name are not markup.
        table.add_row(*(rich.text.Text(row.get(name, "")) for name in names), style=style)
    return table
