"""The report as one self-contained HTML page: the winner, its reasons and costs, and the rejected strategies."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw.html import Panel
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Timeline
from megatron_terapipe.page.document import (
    MEMORY_NAMES,
    Bar,
    chart,
    colours,
    facts,
    html_document,
    section,
    stacked_bars,
    timelines,
)
from megatron_terapipe.search.answer.answer import TIME_NAMES, compare, runners_up, why_before
from megatron_terapipe.search.answer.json_documents import RankDocument, RankedEntry
from megatron_terapipe.search.answer.screen import LEFT, decision_texts, heading, interval_text, rows_of, share_text
from megatron_terapipe.search.price.links import ClusterTable, RankGroups
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.texts import bytes_text, numbers_text, strategy_text, time_text

MOST_ROWS = 30  # strategies that a page lists


OpCostsOf = Callable[[Strategy], OpCosts]


def render_page(document: RankDocument, problem: SearchProblem, op_costs: OpCostsOf, *, command: str = "") -> str:
    """Return the report; `command`: launches the winner; empty = none does."""
    priced, title = document.priced, f"{document.model.name} on {document.cluster.name or 'the cluster'}"
    notes_of = [*(f"{each.line}. {each.more}".rstrip() for each in document.advice), *document.notes]
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes_of)
    notes = [section("Notes", f"<ul>{listed}</ul>")] if listed else []
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        f'<p class="sub">{escape(document.answer)}</p>',
        f'<p class="sub">{escape(heading(document))}</p>',
    ]
    if priced:
        body += [section("", _winner(priced[0])), *notes]
        if command:
            body.append(section("How to run it", f"<pre>{escape(command)}</pre>"))
        for other, over in zip(runners_up(priced), ("the runner-up", "the best of another kind"), strict=False):
            body.append(section(f"Why it wins over {over}", _why(priced[0], other)))
    else:
        reason = escape(document.why_none or "no strategy can run; below is why")
        body += [section("", f'<p class="winner">{reason[:1].upper()}{reason[1:]}</p>'), *notes]
    body.append(section("Ranking", _ranking(document)))
    if priced:
        body.append(section("Where an iteration goes", _times(priced[:10])))
        body.append(section("Memory of each pipeline rank", _memory(problem, priced[0])))
    body += _timelines(priced, op_costs)
    search, rejected = document.search, Counter(document.search.rejected)
    bars = [Bar(rule, {"rejected": float(count)}, f"{count:,}") for rule, count in rejected.most_common()]
    text = (
        f"Of {search.considered:,} combinations of settings, {search.considered - search.priced:,} break a rule or "
        f"equal others, and {search.priced:,} were priced: {search.considered - rejected.total():,} of them can run."
    )
    drawn = stacked_bars(bars, colours(["rejected"]), lambda _, bar: bar.figure)
    body.append(section("Rejected strategies", f'<p class="sub">{text}</p>{drawn}'))
    return html_document(title, "\n".join(body))


def _winner(entry: RankedEntry) -> str:
    prediction, strategy = entry.price, entry.strategy
    interval = ""
    if prediction.interval_s is not None:
        low, high = prediction.interval_s
        interval = f", {prediction.interval_coverage:.0%} within {time_text(low)} to {time_text(high)}"
    figures = [
        (time_text(prediction.iteration_time_s), f"an iteration{interval}"),
        (f"{prediction.tokens_per_s:,.0f}", f"tokens a second, {prediction.tokens_per_s_per_device:,.0f} a device"),
    ]
    figures += [(text, name) for name, text in decision_texts(entry.decision).items()]
    if prediction.mfu is not None:
        figures.append((share_text(prediction.mfu), "MFU: share of the devices' peak, with full attention"))
        figures.append((share_text(prediction.mfu_causal), "causal MFU: only scores that are computed"))
    figures.append((f"{prediction.bubble_ratio:.1%}", "bubble ratio"))
    if prediction.memory_per_rank:
        figures.append((bytes_text(prediction.peak_memory_bytes), "on the fullest device"))
    lengths = ""
    if strategy.token_slices is not None:
        lengths = f'<p class="sub">token slices: {escape(numbers_text(strategy.token_slices))}</p>'
    return f'<p class="winner">{escape(strategy_text(strategy))}</p>{facts(figures)}{lengths}'


def _why(first: RankedEntry, second: RankedEntry) -> str:
    changed, lines = compare(first, second)
    changes = "".join(
        f'<tr><td class="left">{escape(name)}</td><td>{escape(here)}</td><td>{escape(there)}</td></tr>'
        for name, here, there in changed
    )
    sentences = "".join(f"<li>{escape(each)}</li>" for each in lines)
    return (
        f'<div class="columns"><div><ul>{sentences}</ul></div><div class="wide"><table class="changes">'
        f'<tr><th class="left"></th><th>rank 1</th><th>rank {second.rank}</th></tr>{changes}</table></div></div>'
    )


def _ranking(document: RankDocument) -> str:
    entries = document.entries[:MOST_ROWS]
    names, rows = rows_of(entries)
    head = "".join(f'<th class="{"left" if name in LEFT else ""}">{escape(name)}</th>' for name in names)
    kinds = {name: "left why" if name == "why not" else "left" if name in LEFT else "" for name in names}
    lines = []
    for entry, row in zip(entries, rows, strict=True):
        kind = "out" if not entry.feasible else "first" if entry.rank == 1 else ""
        cells = (f'<td class="{each}">{escape(row.get(name, ""))}</td>' for name, each in kinds.items())
        lines.append(f'<tr class="{kind}">{"".join(cells)}</tr>')
    more = len(document.entries) - len(entries)
    below = [*why_before(document.priced), *([f"{more} more are in the JSON"] if more > 0 else [])]
    rest = "".join(f'<p class="sub">{escape(line[:1].upper() + line[1:])}.</p>' for line in below)
    return f'<div class="wide"><table class="ranking"><tr>{head}</tr>{"".join(lines)}</table></div>{rest}'


def _times(entries: list[RankedEntry]) -> str:
    """Return a bar for each strategy, of the parts of its iteration in seconds."""
    palette = colours(list(TIME_NAMES.values()))
    bars = []
    for entry in entries:
        prediction = entry.price
        parts = {TIME_NAMES[name]: seconds for name, seconds in prediction.breakdown.items()}
        figure = f"{time_text(prediction.iteration_time_s)} {interval_text(prediction)}"
        bars.append(Bar(f"{entry.rank}: {strategy_text(entry.strategy)}", parts, figure))
    return chart(bars, palette, lambda s, bar: f"{time_text(s)} ({s / sum(bar.parts.values()):.1%})")


def _memory(problem: SearchProblem, entry: RankedEntry) -> str:
    """Return a bar for each pipeline rank, of the parts of its memory in bytes."""
    if not entry.price.memory_per_rank:
        return "<p>Not predicted.</p>"
    palette = colours(list(MEMORY_NAMES.values()))
    bars, strategy = [], entry.strategy
    devices = RankGroups(ClusterTable.of(problem.cluster), strategy.layout, strategy.placement).smallest
    ranks = zip(entry.price.memory_per_rank, devices, _layers_of_ranks(problem, strategy), strict=True)
    for index, (rank, device, layers) in enumerate(ranks):
        parts = {words: rank[name] for name, words in MEMORY_NAMES.items()}
        label = f"pipeline rank {index}, {layers}"
        if len({node.device for node in problem.cluster.nodes}) > 1:
            label += f", {device.name}"
        figure = f"{bytes_text(rank['total'])} of {bytes_text(device.memory_bytes)}"
        bars.append(Bar(label, parts, figure, limit=device.memory_bytes))
    return chart(bars, palette, lambda amount, _: bytes_text(amount))


def _layers_of_ranks(problem: SearchProblem, strategy: Strategy) -> list[str]:
    """Return the layers of each pipeline rank, counted as a stage partition counts them."""
    ranks = strategy.pipeline_parallel_size
    partition = problem.workload.partition(strategy.stage_partition, strategy.num_stages)
    words: list[list[str]] = [[] for _ in range(ranks)]
    for stage, (first, end) in enumerate(pairwise(partition.bounds)):
        words[stage % ranks].append(f"{first}-{end - 1}" if end - first > 1 else f"{first}" if end > first else "none")
    return [f"layers {', '.join(each)}" for each in words]


def _timelines(priced: Sequence[RankedEntry], op_costs: OpCostsOf) -> Iterator[str]:
    """Yield the section with the timelines of the winner and of the one that differs from it more, if any is drawn."""
    panels, notes = [], []
    for entry in [*priced[:1], *runners_up(priced)[-1:]]:
        for timeline, note in timeline_of(entry.strategy, op_costs(entry.strategy)):
            panels.append(Panel(f"rank {entry.rank}: {strategy_text(entry.strategy)}", timeline))
            notes += [f'<p class="sub">rank {entry.rank}: {note}</p>'] if note else []
    if panels:
        yield section("Timeline", "".join([*notes, timelines(panels, "predicted timeline")]), kind="timeline")


MOST_OPS = 12_000  # ops that are drawn at most: a page of them is 2 MB and opens at once


def timeline_of(strategy: Strategy, costs: OpCosts) -> Iterator[tuple[Timeline, str]]:
    """Yield the simulated timeline of a strategy, and a note if it is not drawn whole; nothing for a found order."""
    if strategy.schedule not in SCHEDULES:
        return
    each = strategy.num_stages * strategy.num_token_slices * (3 if costs.weight_gradient is not None else 2)
    # Enough to fill the pipeline and to see it steady.
    fewest = min(strategy.num_micro_batches, 2 * strategy.pipeline_parallel_size)
    drawn = max(fewest, min(strategy.num_micro_batches, MOST_OPS // each))
    shape = PipelineShape(strategy.num_stages, drawn, strategy.num_token_slices, strategy.num_model_chunks)
    timeline = simulate(rank_orders(schedule_named(strategy.schedule), shape), shape, costs)
    is_whole = drawn == strategy.num_micro_batches
    note = "" if is_whole else f"{drawn} of {strategy.num_micro_batches} micro-batches are drawn"
    yield replace(timeline, unit="s"), note
