"""The report as one HTML page."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape

from deepspeed_ext.plan.draw import render_comparison
from megatron_terapipe.page.document import (
    MEMORY_NAMES,
    Bar,
    chart,
    colours,
    facts,
    html_document,
    legend,
    section,
    stacked_bars,
    strip,
    timelines,
)
from megatron_terapipe.run_report.comparison import COMPUTE, ON_CPU
from megatron_terapipe.run_report.figures import KINDS, told
from megatron_terapipe.run_report.report import RunReport
from megatron_terapipe.run_report.text import about, glance, heading, strategy_line, title_of
from megatron_terapipe.search.answer.figures import bytes_text, time_text

MOST_LISTED = 6
"""Incidents of a kind that are told one by one."""

LEGEND_OF_TIMES = ("compute", "waiting for other ranks", "transfers", "host", "sums and update")


def at_a_glance(report: RunReport) -> str:
    """Return what ran, and its figures."""
    line = strategy_line(report.run.start)
    first = f'<p class="winner">{escape(line)}</p>' if line else ""
    return first + facts(list(glance(report)))


def described(report: RunReport) -> str:
    """Return what a run is, and the command that started it."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in about(report) if text)
    start = report.run.start
    command = (
        "" if start is None else f"<details><summary>command</summary><pre>{escape(start.command)}</pre></details>"
    )
    return f'<dl class="about">{rows}</dl>{command}'


def runs_table(reports: Sequence[RunReport]) -> str:
    """Return the figures of several runs, a row each."""
    names = ("run", "model", "loss", "validation", "iteration", "tokens/s", "MFU", "bubble", "memory", "iterations")
    lines = ["".join(f'<th class="{"left" if place < 2 else ""}">{name}</th>' for place, name in enumerate(names))]
    for report in reports:
        figures = report.figures
        cells = (
            report.run.name,
            heading(report.run.start),
            "" if figures.loss is None else f"{figures.loss:.4g}",
            "" if figures.validation_loss is None else f"{figures.validation_loss:.4g}",
            time_text(figures.iteration_time_s.median),
            f"{figures.tokens_per_s.median:,.0f}",
            "" if figures.mfu is None else f"{figures.mfu:.1%}",
            "" if report.steps is None else f"{report.steps.bubble_ratio:.1%}",
            bytes_text(max(figures.peak_memory_bytes)) if figures.peak_memory_bytes else "",
            f"{figures.iterations:,}",
        )
        columns = enumerate(map(escape, cells))
        lines.append("".join(f'<td class="{"left" if place < 2 else ""}">{cell}</td>' for place, cell in columns))
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def missing(reports: Sequence[RunReport]) -> str:
    """Return what is not known, and how to record it; empty if nothing is missing."""
    lines = []
    for report in reports:
        before = f"{report.run.name}: " if len(reports) > 1 else ""
        lines += [f"<li>{escape(before + line)}</li>" for line in report.missing]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def promised(report: RunReport) -> str:
    """Return what the search promised beside what came."""
    prediction = report.prediction
    if prediction is None:
        return ""
    rows = "".join(
        f'<tr><td class="left">{escape(each.name)}</td><td>{escape(each.text(each.promised))}</td>'
        f"<td>{escape(each.text(each.came))}</td><td>{escape(each.difference_text)}</td>"
        f'<td class="left why">{escape(each.why)}</td></tr>'
        for each in report.compared
    )
    sentence = f"Rank {prediction.rank} of {prediction.path}, priced for {prediction.cluster}."
    others = "".join(f"<li>{escape(line)}</li>" for line in prediction.differences)
    differs = f"<p>What ran may not be what was priced:</p><ul>{others}</ul>" if others else ""
    return (
        f'<p class="sub">{escape(sentence)}</p>{differs}'
        '<div class="wide"><table class="kept"><tr><th class="left"></th>'
        '<th>promised</th><th>came</th><th>difference</th><th class="left">as far as it is known</th></tr>'
        f"{rows}</table></div>"
    )


def times(report: RunReport) -> str:
    """Return where an iteration goes: as the search predicts it, and as each rank measured it."""
    steps = report.steps
    if steps is None:
        return ""
    bars: list[Bar] = []
    if report.prediction is not None:
        parts = report.prediction.predicted.breakdown
        compute = sum(parts[name] for name in COMPUTE)
        update = sum(parts[name] for name in ("gradient_reduction_s", "shared_weight_s", "optimizer_s", "fixed_s"))
        waits = (compute, parts["bubble_s"], parts["transfer_s"] + parts["host_copy_s"], 0.0, update)
        total = time_text(report.prediction.predicted.iteration_time_s)
        bars.append(Bar("promised, busiest rank", dict(zip(LEGEND_OF_TIMES, waits, strict=True)), total))
    makespan = steps.comparison.measured.makespan
    rest = max(report.figures.iteration_time_s.median - makespan, 0.0)
    for rank, spent in enumerate(steps.comparison.rank_times):
        waits = (spent.busy, spent.dependency, spent.transfer, spent.host_overhead, rest)
        parts = dict(zip(LEGEND_OF_TIMES, waits, strict=True))
        bars.append(Bar(f"measured, pipeline rank {rank}", parts, time_text(makespan + rest)))
    note = (
        f"Measured: the median of {len(steps.comparison.steps)} steps; sums and update are the rest of the median "
        "iteration. Each part has its seconds where the pointer is."
    )
    palette = colours(LEGEND_OF_TIMES)
    drawn = stacked_bars(bars, palette, lambda amount, _: time_text(amount))
    return f'<p class="sub">{note}</p>{legend(LEGEND_OF_TIMES, palette)}{drawn}'


def memory(report: RunReport) -> str:
    """Return the memory of each stage, measured beside predicted."""
    peaks, prediction = report.figures.peak_memory_bytes, report.prediction
    if not peaks:
        return ""
    palette = colours([*MEMORY_NAMES.values()]) | {"measured": "#8b949e"}
    predicted = [] if prediction is None else prediction.predicted.memory_per_rank
    bars: list[Bar] = []
    for stage, peak in enumerate(peaks):
        if stage < len(predicted):
            parts = {name: predicted[stage][field] for field, name in MEMORY_NAMES.items()}
            bars.append(Bar(f"stage {stage}, promised", parts, bytes_text(predicted[stage]["total"])))
        bars.append(Bar(f"stage {stage}, measured", {"measured": float(peak)}, bytes_text(peak)))
    start = report.run.start
    on_cpu = start is not None and start.machine.device == "cpu"
    note = f'<p class="sub">{ON_CPU[:1].upper()}{ON_CPU[1:]}.</p>' if on_cpu else ""
    return note + chart(bars, palette, lambda amount, _: bytes_text(amount))


def timeline(report: RunReport) -> str:
    """Return the measured timeline beside its simulation: to zoom on a screen, as a picture on paper."""
    steps = report.steps
    if steps is None:
        return ""
    if not steps.panels:
        return (
            '<p class="sub">It has too many ops for this page: '
            f"<code>terapipe plan --timeline {escape(str(steps.path))} --html timeline.html</code> draws it.</p>"
        )
    comparison = steps.comparison
    note = (
        f"Order and op times explain {comparison.efficiency:.1%} of the measured step; an op waits "
        f"{time_text(comparison.transfer)} for a transfer, and the host takes {time_text(comparison.host_overhead)} "
        "between ops (medians)."
    )
    picture = render_comparison([(panel.title, panel.timeline) for panel in steps.panels])
    return (
        f'<p class="sub">{escape(note)}</p><div class="screen">{timelines(steps.panels, "measured timeline")}</div>'
        f'<div class="paper">{picture}</div>'
    )


def what_happened(report: RunReport) -> str:
    """Return the incidents, on the axis of iterations and in words."""
    found = report.incidents
    if not found:
        return ""
    by_kind: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for kind in KINDS:
        for each in found:
            if each.kind == kind:
                by_kind[kind].append((float(each.first), f"{each.where}: {each.text}"))
    every = report.run.iterations
    marks = strip(by_kind, float(every[0].iteration), float(every[-1].iteration))
    lines = "".join(
        f"<li><b>{escape(kind)}</b> {escape(text)}</li>"
        for kind, text in told([each for each in found if each.kind != "save"], MOST_LISTED)
    )
    saves = [saved.seconds for piece in report.run.pieces for saved in piece.saves]
    if saves:
        waited = f"{len(saves)} checkpoints, for which training waited {time_text(sum(saves))} in all"
        lines += f"<li><b>save</b> {waited}, {time_text(max(saves))} at most</li>"
    return f"{marks}<ul>{lines}</ul>"


def render_report(reports: Sequence[RunReport]) -> str:
    """Return the page of some reports."""
    title = title_of(reports)
    body = [f"<header><h1>{escape(title)}</h1></header>"]
    if len(reports) == 1:
        body.append(f'<p class="sub">{escape(heading(reports[0].run.start))}</p>')
        body.append(section("", at_a_glance(reports[0])))
    else:
        body.append(section("Runs", runs_table(reports)))
    contents = [("Not known", missing(reports), "")]
    for report in reports:
        name = f" ({report.run.name})" if len(reports) > 1 else ""
        contents += [
            (f"What the search promised, and what came{name}", promised(report), ""),
            (f"Where an iteration goes{name}", times(report), ""),
            (f"Memory of each stage{name}", memory(report), ""),
            (f"Timeline, measured and simulated{name}", timeline(report), "timelines"),
            (f"What happened{name}", what_happened(report), ""),
            (f"The run{name}", described(report), ""),
        ]
    body += [section(name, content, kind=kind) for name, content, kind in contents if content]
    return html_document(title, "\n".join(body))
