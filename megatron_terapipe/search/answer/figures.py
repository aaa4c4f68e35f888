"""Figures that follow from a prediction, and the texts of times, sizes and speeds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_terapipe.config.flops import BACKWARD_PER_FORWARD, granularity_of
from megatron_terapipe.console import output_console
from megatron_terapipe.dimensions import Dimension, ordered_for
from megatron_terapipe.search.answer.json_documents import DecisionPart, PredictedPart, RankedEntry, Ranking, Speed
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import is_guess
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import DIMENSIONS, Strategy

GIGABYTE = 1e9


def model_flops(workload: Workload, *, causal: bool = False) -> float:
    """Return the FLOPs of one sequence, forward and backward, counted as the trainer's `iteration_flops` counts."""
    return (1.0 + BACKWARD_PER_FORWARD) * sum(layer.model_flops(causal=causal) for layer in workload.layers)


def speed_of(problem: SearchProblem, strategy: Strategy, iteration_time_s: float) -> Speed:
    """Return the published figures that follow from the seconds of an iteration.

    The MFU is defined by Chowdhery et al. (arXiv 2204.02311 appendix B), over the peak of the devices in use.
    """
    workload, nodes = problem.workload, problem.cluster.nodes
    tokens_per_s = strategy.num_sequences * workload.seq_length / iteration_time_s
    flops, causal_flops = (
        model_flops(workload, causal=causal) * strategy.num_sequences / iteration_time_s for causal in (False, True)
    )
    used = nodes_in_use(strategy, problem.cluster).items()
    peak = sum(count * nodes[index].device.peak_flops(problem.precision) for index, count in used)
    peak_is_known = not any(is_guess(node.device.name) for node in nodes)
    mfu, mfu_causal = (each / peak if peak else 0.0 for each in (flops, causal_flops))
    return Speed(
        iteration_time_s=iteration_time_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / strategy.world_size,
        tflops_per_device=flops / strategy.world_size / 1e12,
        tflops_per_device_causal=causal_flops / strategy.world_size / 1e12,
        mfu=mfu if peak_is_known else None,
        mfu_causal=mfu_causal if peak_is_known else None,
    )


def nodes_in_use(strategy: Strategy, cluster: Cluster) -> Counter[int]:
    """Return the number of devices with a rank of each node, by its index."""
    places = strategy.placement or range(strategy.world_size)
    return Counter(cluster.node_of_device[place] for place in places if place < cluster.num_devices)


def devices_of(cluster: Cluster, strategy: Strategy | None = None) -> dict[str, int]:
    """Return the number of devices of each kind; `strategy`: only those that have a rank."""
    found: Counter[str] = Counter()
    used = Counter(cluster.node_of_device) if strategy is None else nodes_in_use(strategy, cluster)
    for index, number in used.items():
        found[cluster.nodes[index].device.name] += number
    return dict(found)


def time_text(seconds: float) -> str:
    """Return seconds as text with three significant digits."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        # From 999.5 ms on, three digits are 1 s.
        if seconds * scale >= 0.9995 or unit == "us":
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:,.0f} {unit}"
    raise AssertionError


def interval_text(prediction: PredictedPart) -> str:
    """Return how far the time may be off, as `-4 +6 %`; empty if the prediction has no interval."""
    if prediction.interval_s is None or not prediction.iteration_time_s:
        return ""
    low, high = (100 * (bound / prediction.iteration_time_s - 1) for bound in prediction.interval_s)
    return f"{low:+.0f} {high:+.0f} %"


def share_text(share: float | None) -> str:
    """Return a share in per cent as text; empty where it is not known."""
    return "" if share is None else f"{share:.0%}"


def bytes_text(num_bytes: float) -> str:
    """Return bytes as text, in units of powers of 1000, as data sheets count them."""
    return _scaled(num_bytes, (1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"))


def count_text(number: float) -> str:
    """Return a large number as short text: `12.9 B`."""
    return _scaled(number, (1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (1.0, ""))


def _scaled(number: float, *units: tuple[float, str]) -> str:
    # From 999.5 M on, three digits are 1 B.
    scale, unit = next((each for each in units if number >= 0.9995 * each[0]), units[-1])
    return f"{number / scale:.3g}{unit}"


def decision_texts(decision: DecisionPart | None) -> dict[str, str]:
    """Return the figures of a training that were asked for, by the names of their columns."""
    if decision is None:
        return {}
    each = "" if decision.days is not None else "/M tokens"
    figures = {"days": decision.days, f"device hours{each}": decision.device_hours, f"price{each}": decision.cost}
    return {name: count_text(figure) for name, figure in figures.items() if figure is not None}


def numbers_text(numbers: Sequence[int]) -> str:
    """Return a list of whole numbers as text: `2 x 704, 640` where numbers repeat, `0 to 7` where they count on."""
    texts: list[str] = []
    start = 0
    while start < len(numbers):
        same, rising = 1, 1
        while numbers[start + same : start + same + 1] == numbers[start : start + 1]:
            same += 1
        while list(numbers[start + rising : start + rising + 1]) == [numbers[start] + rising]:
            rising += 1
        if rising > 3:
            texts.append(f"{numbers[start]} to {numbers[start] + rising - 1}")
        else:
            texts.append(f"{same} x {numbers[start]}" if same > 1 else str(numbers[start]))
        start += rising if rising > 3 else same
    return ", ".join(texts)


def strategy_text(strategy: Strategy | Mapping[str, Any]) -> str:
    """Return a strategy, or its JSON, in one line without usual values: `dp 4 · tp 8 · pp 2 · micro-batch 1 · 1f1b`."""
    if not isinstance(strategy, Strategy):
        strategy = Strategy.from_json(strategy)
    parts = [
        template.format(getattr(strategy, each.name))
        for each, template in ordered_for(DIMENSIONS, "phrase")
        if each.always or getattr(strategy, each.name) != each.default
    ]
    return " · ".join(parts)


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
    names, rows = rows_of(entries, ranking.model.seq_length)
    shown = _fitting(names, rows, console.width)
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
    batch = ""
    if ranking.global_batch_size is not None:
        batch = f", {ranking.global_batch_size} sequence{'s' if ranking.global_batch_size > 1 else ''} a step"
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


def rows_of(entries: Sequence[RankedEntry], seq_length: int) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns with any text, and the rows."""
    rows = [cells(entry, seq_length) for entry in entries]
    names = list(dict.fromkeys(name for row in rows for name in row))
    # Prices come before the reason, also where the first row has none.
    names.sort(key=lambda name: name == "why not")
    return [name for name in names if any(row.get(name, "") not in ("", USUAL.get(name)) for row in rows)], rows


def _fitting(names: list[str], rows: list[dict[str, str]], width: int) -> list[str]:
    """Return the columns that a line has room for; the reason, which wraps, counts no more than its title."""
    widths = {name: max(map(len, [name, *(row.get(name, "") for row in rows if name != "why not")])) for name in names}
    kept = list(names)
    for name in DROPPED_FIRST:
        if sum(widths[each] + 2 for each in kept) <= width:
            break
        if name in kept:
            kept.remove(name)
    return kept


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


def _table(entries: Sequence[RankedEntry], names: list[str], rows: list[dict[str, str]]) -> "Table":
    import rich.box
    import rich.table
    import rich.text

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "why not")
    for entry, row in zip(entries, rows, strict=True):
        style = "dim" if not entry.feasible else "bold" if entry.rank == 1 else ""
        # As `Text`, so that brackets in a name are not markup.
        table.add_row(*(rich.text.Text(row.get(name, "")) for name in names), style=style)
    return table
