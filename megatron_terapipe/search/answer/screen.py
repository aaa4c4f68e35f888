"""The screen of a command: the answer in words, the question, the table, and the notes that can change most.

All of it fits 100 columns, and the width of a terminal otherwise; the page, with the same columns, and the JSON have
the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_terapipe.console import output_console, plain_table, print_text
from megatron_terapipe.dimensions import Dimension, ordered_for
from megatron_terapipe.search.answer.answer import why_before
from megatron_terapipe.search.answer.json_documents import DecisionPart, RankDocument, RankedEntry, Ranking
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.price_document import PredictedPart
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from megatron_terapipe.texts import bytes_text, count_text, time_text

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ordered_for(DIMENSIONS, "column")  # dimensions of a strategy that have a column, and its name
LEFT = (*(name for each, name in COLUMNS if each.is_text), "why not")

USUAL = {name: each.usual for each, name in COLUMNS if each.usual}
"""Columns that are left out where every row has this text."""

DROPPED_FIRST = (
    *("sp", "ZeRO", "bubble", "causal MFU", "shard", "variants", "offload", "vocabulary", "dK dV", "kept"),
    *("tokens/s", "MFU", "device hours", "mbs", "V", "interval", "recompute"),
)
"""Columns that a narrow terminal does without, in this order; the page and the JSON have them."""

KEPT = ("recompute",)  # columns that stay where all rows have the same text
EXPLAINED = {"S": "token slices", "V": "model chunks", "mbs": "micro-batch size", "seq": "context-parallel ranks"}
MOST_NOTES = 5


def interval_text(prediction: PredictedPart) -> str:
    """Return how far the time may be off, as `-4 +6 %`; empty if the prediction has no interval."""
    if prediction.interval_s is None or not prediction.iteration_time_s:
        return ""
    low, high = (100 * (bound / prediction.iteration_time_s - 1) for bound in prediction.interval_s)
    return f"{low:+.0f} {high:+.0f} %"


def share_text(share: float | None) -> str:
    """Return a share in per cent as text; empty where it is not known."""
    return "" if share is None else f"{share:.0%}"


def decision_texts(decision: DecisionPart | None) -> dict[str, str]:
    """Return the figures of a training that were asked for, by the names of their columns."""
    if decision is None:
        return {}
    each = "" if decision.days is not None else "/M tokens"
    figures = {"days": decision.days, f"device hours{each}": decision.device_hours, f"price{each}": decision.cost}
    return {name: count_text(figure) for name, figure in figures.items() if figure is not None}


def heading(ranking: Ranking) -> str:
    """Return the model, the batch and the cluster of a ranking in one line."""
    model, nodes = ranking.model, ranking.cluster.num_nodes
    batch = "" if ranking.global_batch_size is None else f" x {ranking.global_batch_size}"
    trainer = "" if ranking.software == TERAPIPE.name else f", trainer {ranking.software}"
    listed = " + ".join(f"{count:,} x {name}" for name, count in ranking.cluster.devices.items())
    return (
        f"{model.name} ({count_text(model.parameters)}), {model.seq_length:,}{batch} tokens a step, on "
        f"{listed} in {nodes} node{'s' if nodes > 1 else ''}, {ranking.precision}{trainer}"
    )


def cells(entry: RankedEntry) -> dict[str, str]:
    """Return the text of each column for an entry, by its name."""
    prediction = entry.predicted
    row = {"rank": str(entry.rank), **{name: _cell(each, entry.strategy) for each, name in COLUMNS}}
    if prediction is not None:
        row |= {
            "time": time_text(prediction.iteration_time_s),
            "interval": interval_text(prediction),
            "tokens/s": f"{prediction.tokens_per_s:,.0f}",
            "MFU": share_text(prediction.mfu),
            "causal MFU": share_text(prediction.mfu_causal),
            "bubble": f"{prediction.bubble_ratio:.1%}",
            "memory": bytes_text(prediction.peak_memory_bytes) if prediction.memory_per_rank else "",
            **decision_texts(entry.decision),
        }
    return row | {"variants": f"{entry.variants:,}" if entry.variants else "", "why not": entry.reason or ""}


def rows_of(entries: Sequence[RankedEntry]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns with any text, and the rows."""
    rows = [cells(entry) for entry in entries]
    names = list(dict.fromkeys(name for row in rows for name in row))
    # Prices come before the reason, also where the first row has none.
    names.sort(key=lambda name: name == "why not")
    return [name for name in names if any(row.get(name, "") not in ("", USUAL.get(name)) for row in rows)], rows


def _cell(dimension: Dimension, strategy: Strategy) -> str:
    value = getattr(strategy, dimension.name)
    if value is None:
        return dimension.none
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"


def print_table(ranking: Ranking, console: "Console | None" = None) -> None:
    """Print the answer, the question and the ranking, with the strategies that cannot run last."""
    from rich.text import Text

    console = console or output_console()
    entries = sorted(ranking.entries, key=lambda entry: entry.rank)
    for line in (ranking.answer, heading(ranking)):
        print_text(console, line)
    if not entries:
        return
    names, rows = rows_of(entries)
    shared = _shared(names, rows)
    shown = _fitting([name for name in names if name not in shared and name != "why not"], rows, console.width)
    table = plain_table(shown, LEFT)
    for entry, row in zip(entries, rows, strict=True):
        style = "dim" if not entry.feasible else "bold" if entry.rank == 1 else ""
        # As `Text`, so that brackets in a name are not markup.
        table.add_row(*(Text(row.get(name, "")) for name in shown), style=style)
    console.print(table)
    legend = [f"{name}: {words}" for name, words in EXPLAINED.items() if name in shown or name in shared]
    lines = [f"all rows: {', '.join(f'{name} {text}' for name, text in shared.items())}"] if shared else []
    lines += [", ".join(legend)] if legend else []
    lines += [f"rank {entry.rank} cannot run: {entry.reason}" for entry in entries if not entry.feasible]
    for line in (*lines, *why_before(ranking.priced)):
        print_text(console, line)


def notes_of(document: RankDocument) -> list[str]:
    """Return a line for each kind of change that is worth saying, those first that can change most."""
    found: dict[str, str] = {}
    # Where nothing fits, the first line has what is nearest, and the error the changes with which a strategy fits.
    said = f"{document.answer}{document.why_none or ''}"
    for each in document.advice:
        if (each.change or each.iteration_time_s is not None) and each.line not in said:
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
