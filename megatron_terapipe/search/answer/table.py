"""The table of a ranking, for terminals and for the page."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_terapipe.config.flops import granularity_of
from megatron_terapipe.console import output_console
from megatron_terapipe.dimensions import Dimension, ordered_for
from megatron_terapipe.search.answer.figures import (
    bytes_text,
    count_text,
    decision_texts,
    interval_text,
    share_text,
    time_text,
)
from megatron_terapipe.search.answer.json_documents import RankedEntry, Ranking
from megatron_terapipe.search.machine.terapipe import TERAPIPE
from megatron_terapipe.strategy import DIMENSIONS, Strategy

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLUMNS = ordered_for(DIMENSIONS, "column")  # dimensions of a strategy that have a column, and its name

DROPPED_FIRST = tuple(
    name
    for _, name in sorted(
        [
            (5, "bubble"),
            (5, "causal MFU"),
            (6, "variants"),
            (7, "interval"),
            *((each.dropped, name) for each, name in COLUMNS if each.dropped is not None),
        ]
    )
)
"""Columns that a narrow terminal does without, in this order; the page and the JSON have them."""

LEFT = (*(name for each, name in COLUMNS if each.is_text), "why not")

USUAL = {name: each.usual for each, name in COLUMNS if each.usual}
"""Columns that are left out where every row has this text."""

SHORT = 4  # letters of a name of a column that has to be explained are fewer
LONGEST = 23  # letters of a list of numbers; the JSON has all of it


def print_table(ranking: Ranking, console: "Console | None" = None) -> None:
    """Print the ranking, the strategies that cannot run below it, and the notes, as wide as the terminal."""
    console = console or output_console()
    entries = sorted(ranking.entries, key=lambda entry: entry.rank)
    console.print(heading(ranking), markup=False, highlight=False)
    shown, rows = _fitting(*rows_of(entries, ranking.model.seq_length), console.width)
    console.print(_table(entries, shown, rows))
    if rows and (explained := legend(shown)):
        console.print(f"columns: {explained}", markup=False, highlight=False)
    for note in ranking.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def legend(names: Sequence[str]) -> str:
    """Return the meanings of the short names of columns."""
    words = {name: each.name.removeprefix("num_").replace("_", " ") for each, name in COLUMNS}
    words |= {"mbs": "micro-batch size", "cut": "tokens of each token slice"}
    return ", ".join(
        f"{name} = {words[name]}" for name in names if name in words and len(name) < SHORT < len(words[name])
    )


def heading(ranking: Ranking) -> str:
    """Return the model, the batch and the cluster of a ranking in one line."""
    model, nodes = ranking.model, ranking.cluster.num_nodes
    batch = "" if ranking.global_batch_size is None else f", {ranking.global_batch_size} sequences a step"
    trainer = "" if ranking.software == TERAPIPE.name else f", trainer {ranking.software}"
    listed = " + ".join(f"{count} x {name}" for name, count in ranking.cluster.devices.items())
    return (
        f"{model.name} ({count_text(model.parameters)} parameters, {model.seq_length} tokens{batch}) on "
        f"{listed} in {nodes} node{'s' if nodes > 1 else ''}, {ranking.precision}{trainer}"
    )


def cells(entry: RankedEntry, seq_length: int) -> dict[str, str]:
    """Return the text of each column for an entry, by its name."""
    strategy, prediction = Strategy.from_json(entry.strategy), entry.predicted
    row = {"rank": str(entry.rank), **{name: _cell(each, strategy, seq_length) for each, name in COLUMNS}}
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


def rows_of(entries: Sequence[RankedEntry], seq_length: int) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns with any text, and the rows."""
    found = [cells(entry, seq_length) for entry in entries]
    names = list(dict.fromkeys(name for row in found for name in row))
    # Prices come before the reason, also where the first row has none.
    names.sort(key=lambda name: name == "why not")
    shown = [name for name in names if any(row.get(name, "") not in ("", USUAL.get(name)) for row in found)]
    return shown, [[row.get(name, "") for name in shown] for row in found]


def _fitting(names: list[str], rows: list[list[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """Return the columns that a line has room for; the reason, which wraps, counts no more than its title."""
    widths = {
        name: max(len(name), *(len(row[index]) for row in rows)) if rows and name != "why not" else len(name)
        for index, name in enumerate(names)
    }
    kept = list(names)
    for name in DROPPED_FIRST:
        if sum(widths[each] + 2 for each in kept) <= width:
            break
        if name in kept:
            kept.remove(name)
    places = [names.index(name) for name in kept]
    return kept, [[row[place] for place in places] for row in rows]


def _cell(dimension: Dimension, strategy: Strategy, seq_length: int) -> str:
    value = getattr(strategy, dimension.name)
    if dimension.name == "token_slices":
        return _cut(strategy, seq_length)
    if value is None:
        return dimension.none
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _short(value) if isinstance(value, tuple) else str(value)


def _cut(strategy: Strategy, seq_length: int) -> str:
    """Return the lengths of the token slices, or "even" if they are as equal as the places to cut at let them be."""
    if strategy.token_slices is None:
        return "even"
    step = granularity_of(seq_length, strategy.num_token_slices, strategy.granularity)
    is_even = max(strategy.token_slices) - min(strategy.token_slices) <= step
    return "even" if is_even else _short(strategy.token_slices)


def _short(value: tuple[int, ...]) -> str:
    text = ",".join(map(str, value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _table(entries: Sequence[RankedEntry], names: list[str], rows: list[list[str]]) -> "Table":
    import rich.box
    import rich.table
    import rich.text

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "why not")
    for entry, row in zip(entries, rows, strict=True):
        style = "dim" if not entry.feasible else "bold" if entry.rank == 1 else ""
        # As `Text`, so that brackets in a name are not markup.
        table.add_row(*map(rich.text.Text, row), style=style)
    return table
