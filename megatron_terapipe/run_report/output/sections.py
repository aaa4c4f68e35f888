"""The sections of a report, each as HTML."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape

from deepspeed_ext.plan.render import render_comparison
from megatron_terapipe.page.bars import MEMORY_NAMES, Bar, colours, legend, stacked_bars
from megatron_terapipe.page.document import facts, timelines
from megatron_terapipe.page.strip import strip
from megatron_terapipe.run_report.incidents import KINDS, told
from megatron_terapipe.run_report.kept import COMPUTE, ON_CPU
from megatron_terapipe.run_report.output.words import about, glance, heading, strategy_line
from megatron_terapipe.run_report.report import RunReport
from megatron_terapipe.search.report.figures import bytes_text, time_text

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
    head = "".join(f'<th class="{"left" if name in ("run", "model") else ""}">{name}</th>' for name in names)
    lines = []
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
            "" if report.steps is None else f"{report.steps.measured:.1%}",
            bytes_text(max(figures.peak_memory_bytes)) if figures.peak_memory_bytes else "",
            f"{figures.iterations:,}",
        )
        lines.append(
            "".join(
                f'<td class="{"left" if place < 2 else ""}">{escape(cell)}</td>' for place, cell in enumerate(cells)
            )
        )
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def missing(reports: Sequence[RunReport]) -> str:
    """Return what is not known, and how to record it; empty if nothing is missing."""
    lines = []
    for report in reports:
        before = f"{report.run.name}: " if len(reports) > 1 else ""
        lines += [f"<li>{escape(before + line)}</li>" for line in report.missing]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def promised(report: RunReport) -> str:
    """Return what the search promised beside what came."""
    promise = report.promise
    if promise is None:
        return ""
    rows = "".join(
        f'<tr><td class="left">{escape(each.name)}</td><td>{escape(each.text(each.promised))}</td>'
        f"<td>{escape(each.text(each.came))}</td><td>{escape(each.difference_text)}</td>"
        f'<td class="left why">{escape(each.why)}</td></tr>'
        for each in report.kept
    )
    sentence = f"Rank {promise.rank} of {promise.path}, priced for {promise.cluster}."
    others = "".join(f"<li>{escape(line)}</li>" for line in promise.differences)
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
    palette = colours(LEGEND_OF_TIMES)
    bars: list[Bar] = []
    if report.promise is not None:
        parts = report.promise.predicted.breakdown
        compute = sum(parts[name] for name in COMPUTE)
        update = sum(parts[name] for name in ("gradient_reduction_s", "shared_weight_s", "optimizer_s", "fixed_s"))
        waits = (compute, parts["bubble_s"], parts["transfer_s"] + parts["host_copy_s"], 0.0, update)
        total = time_text(report.promise.predicted.iteration_time_s)
        bars.append(Bar("promised, busiest rank", dict(zip(LEGEND_OF_TIMES, waits, strict=True)), total))
    makespan = steps.comparison.measured.makespan
    rest = max(report.figures.iteration_time_s.median - makespan, 0.0)
    for rank, spent in enumerate(steps.comparison.rank_times):
        waits = (spent.busy, spent.dependency, spent.transfer, spent.host_overhead, rest)
        bars.append(
            Bar(
                f"measured, pipeline rank {rank}",
                dict(zip(LEGEND_OF_TIMES, waits, strict=True)),
                time_text(makespan + rest),
            )
        )
    written = {
        number: {name: time_text(amount) for name, amount in bar.parts.items()} for number, bar in enumerate(bars)
    }
    note = (
        f"Measured: the median of {steps.num_steps} steps; sums and update are the rest of the median iteration. Each "
        "part has its seconds where the pointer is."
    )
    return f'<p class="sub">{note}</p>' + legend(LEGEND_OF_TIMES, palette) + stacked_bars(bars, palette, written)


def memory(report: RunReport) -> str:
    """Return the memory of each stage, measured beside predicted."""
    peaks, promise = report.figures.peak_memory_bytes, report.promise
    if not peaks:
        return ""
    names = [*MEMORY_NAMES.values(), "measured"]
    palette = colours(names[:-1]) | {"measured": "#8b949e"}
    predicted = [] if promise is None else promise.predicted.memory_per_rank
    bars: list[Bar] = []
    for stage, peak in enumerate(peaks):
        if stage < len(predicted):
            parts = {name: predicted[stage][field] for field, name in MEMORY_NAMES.items()}
            bars.append(Bar(f"stage {stage}, promised", parts, bytes_text(predicted[stage]["total"])))
        bars.append(Bar(f"stage {stage}, measured", {"measured": float(peak)}, bytes_text(peak)))
    written = {
        number: {name: bytes_text(amount) for name, amount in bar.parts.items()} for number, bar in enumerate(bars)
    }
    shown = [name for name in names if any(bar.parts.get(name, 0.0) > 0 for bar in bars)]
    start = report.run.start
    on_cpu = start is not None and start.machine.device == "cpu"
    note = f'<p class="sub">{ON_CPU[:1].upper()}{ON_CPU[1:]}.</p>' if on_cpu else ""
    return note + legend(shown, palette) + stacked_bars(bars, palette, written)


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
