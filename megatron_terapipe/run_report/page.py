"""The report as one HTML page: its charts, its sections, and the document."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape

from deepspeed_ext.plan.draw import render_comparison
from megatron_terapipe.page.chart import Chart, Curve, Level, Point, chart_figure, thinning_note
from megatron_terapipe.page.document import (
    MEMORY_NAMES,
    Bar,
    colours,
    facts,
    html_document,
    legend,
    section,
    stacked_bars,
    strip,
    timelines,
)
from megatron_terapipe.run_report.comparison import COMPUTE, ON_CPU, Promise
from megatron_terapipe.run_report.figures import KINDS, first_iterations, slow_from, told
from megatron_terapipe.run_report.metrics_file import TrainingRun
from megatron_terapipe.run_report.report import RunReport
from megatron_terapipe.run_report.text import about, glance, heading, strategy_line, title_of
from megatron_terapipe.search.answer.figures import bytes_text, time_text
from megatron_terapipe.training.records import IterationMetrics

Value = Callable[[IterationMetrics], float | None]

GIGABYTE = 1e9
CLIPPED_FROM = 3.0
"""Parts of the bound of slow iterations above which the chart of times ends."""


def charts(runs: Sequence[TrainingRun], promises: Sequence[Promise | None]) -> dict[str, Chart]:
    """Return the charts of some runs, by names for files; those of which nothing was recorded are left out.

    Args:
        promises: what the search promised of each.
    """
    restarts = [float(piece.first) for run in runs for piece in run.pieces[1:]]
    found = dict(_charts(runs, promises))
    return {
        name: replace(chart, marks=restarts) for name, chart in found.items() if any(c.points for c in chart.curves)
    }


def _charts(runs: Sequence[TrainingRun], promises: Sequence[Promise | None]) -> Iterator[tuple[str, Chart]]:
    single = len(runs) == 1
    promise = promises[0] if single else None
    predicted = None if promise is None else promise.predicted
    yield "loss", Chart(title="Loss", curves=list(_losses(runs)))
    low, high = (predicted.interval_s or (predicted.iteration_time_s,) * 2) if predicted else (0.0, 0.0)
    levels = [Level("promised", predicted.iteration_time_s, low, high)] if predicted else []
    yield (
        "iteration_time",
        Chart(
            title="Time of an iteration",
            unit="s",
            curves=_curves(runs, lambda each: each.iteration_time_s),
            levels=levels,
            shaded=first_iterations(runs[0]) if single else (),
            from_zero=True,
            top=_top(runs, high),
            note="shaded: first iterations after a start, no part of the figures" if single else "",
        ),
    )
    sequences = predicted.tokens_per_s if predicted else 0.0
    levels = [Level("promised", sequences, sequences, sequences)] if predicted else []
    tokens = _curves(runs, lambda each: each.tokens_per_second)
    yield "throughput", Chart(title="Tokens a second", curves=tokens, levels=levels, from_zero=True)
    mfu = _curves(runs, lambda each: None if each.mfu is None else 100 * each.mfu)
    yield "mfu", Chart(title="MFU", unit="%", curves=mfu, from_zero=True)
    yield "grad_norm", Chart(title="Norm of the gradient", curves=_curves(runs, _norm), logarithmic=True)
    yield "learning_rate", Chart(title="Learning rate", curves=_curves(runs, lambda each: each.learning_rate))
    scales = _curves(runs, lambda each: each.loss_scale)
    yield "loss_scale", Chart(title="Loss scale", curves=scales, logarithmic=True)
    if len({each.global_batch_size for run in runs for each in run.iterations}) > 1:
        sizes = _curves(runs, lambda each: float(each.global_batch_size))
        yield "batch_size", Chart(title="Global batch size", unit="sequences", curves=sizes, from_zero=True)
    yield (
        "memory",
        Chart(
            title="Peak memory so far" if single else "Peak memory of the fullest stage",
            unit="GB",
            curves=_memory_of_stages(runs[0]) if single else _curves(runs, _fullest),
            levels=_promised_memory(promise),
            from_zero=True,
        ),
    )


def _curves(runs: Sequence[TrainingRun], value: Value) -> list[Curve]:
    """A curve for each run, over the iterations that have the value."""
    names = [run.name if len(runs) > 1 else "" for run in runs]
    return [
        Curve(name, _points(run, value), number) for number, (name, run) in enumerate(zip(names, runs, strict=True))
    ]


def _points(run: TrainingRun, value: Value) -> list[Point]:
    found = ((float(each.iteration), value(each)) for each in run.iterations)
    return [(place, y) for place, y in found if y is not None]


def _losses(runs: Sequence[TrainingRun]) -> Iterator[Curve]:
    for number, run in enumerate(runs):
        single = len(runs) == 1
        yield Curve("training" if single else run.name, _points(run, lambda each: each.lm_loss), number)
        validation = [(float(each.iteration), each.lm_loss) for each in run.evaluations()]
        if validation:
            name = "validation" if single else f"{run.name}, validation"
            yield Curve(name, validation, number + len(runs), dotted=True)


def _norm(metrics: IterationMetrics) -> float | None:
    return metrics.grad_norm


def _fullest(metrics: IterationMetrics) -> float | None:
    return max(metrics.peak_memory_bytes) / GIGABYTE if metrics.peak_memory_bytes else None


def _memory_of_stages(run: TrainingRun) -> list[Curve]:
    num_stages = max((len(each.peak_memory_bytes or ()) for each in run.iterations), default=0)

    def of_stage(stage: int) -> Value:
        def value(metrics: IterationMetrics) -> float | None:
            peaks = metrics.peak_memory_bytes
            return peaks[stage] / GIGABYTE if peaks is not None and stage < len(peaks) else None

        return value

    # More than eight curves are not told apart.
    shown = range(num_stages) if num_stages <= 8 else (0, num_stages // 2, num_stages - 1)
    return [Curve(f"stage {stage}", _points(run, of_stage(stage)), number) for number, stage in enumerate(shown)]


def _promised_memory(promise: Promise | None) -> list[Level]:
    if promise is None or not promise.predicted.memory_per_rank:
        return []
    totals = [memory["total"] / GIGABYTE for memory in promise.predicted.memory_per_rank]
    return [Level("promised, least to most of a stage", max(totals), min(totals), max(totals))]


def _top(runs: Sequence[TrainingRun], high: float) -> float | None:
    """Where the chart of times ends: one slow iteration shall not flatten all others."""
    top = max(max(CLIPPED_FROM * slow_from([each.iteration_time_s for each in run.steady]), high) for run in runs)
    return top if any(each.iteration_time_s > top for run in runs for each in run.iterations) else None


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


def charts_of(reports: list[RunReport]) -> dict[str, Chart]:
    """Return the charts of some reports, by names for files."""
    return charts([each.run for each in reports], [each.promise for each in reports])


def render_report(reports: list[RunReport]) -> str:
    """Return the page of some reports."""
    title = title_of(reports)
    body = [f"<header><h1>{escape(title)}</h1></header>"]
    if len(reports) == 1:
        body.append(f'<p class="sub">{escape(heading(reports[0].run.start))}</p>')
        body.append(section("", at_a_glance(reports[0])))
    else:
        body.append(section("Runs", runs_table(reports)))
    body += _if_any("Not known", missing(reports))
    drawn = charts_of(reports).values()
    note = thinning_note(drawn)
    figures = "".join(chart_figure(chart) for chart in drawn)
    said = f'<p class="sub">{escape(note)}</p>' if note else ""
    body.append(section("Curves over iterations", f'{said}<div class="charts">{figures}</div>'))
    for report in reports:
        name = f" ({report.run.name})" if len(reports) > 1 else ""
        body += _if_any(f"What the search promised, and what came{name}", promised(report))
        body += _if_any(f"Where an iteration goes{name}", times(report))
        body += _if_any(f"Memory of each stage{name}", memory(report))
        body += _if_any(f"Timeline, measured and simulated{name}", timeline(report), kind="timelines")
        body += _if_any(f"What happened{name}", what_happened(report))
        body.append(section(f"The run{name}", described(report)))
    return html_document(title, "\n".join(body))


def _if_any(title: str, content: str, *, kind: str = "") -> Iterator[str]:
    if content:
        yield section(title, content, kind=kind)
