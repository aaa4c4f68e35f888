"""The report as one HTML page."""

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
    timelines,
)
from megatron_terapipe.run_report.comparison import COMPUTE, ON_CPU
from megatron_terapipe.run_report.experts import expert_pictures
from megatron_terapipe.run_report.figures import listed
from megatron_terapipe.run_report.report import RunReport
from megatron_terapipe.run_report.text import about, glance, heading, strategy_line, title_of
from megatron_terapipe.search.answer.figures import bytes_text, time_text

MOST_LISTED = 6
"""Most incidents of a kind with a line of their own."""

LEGEND_OF_TIMES = ("compute", "waiting for other ranks", "transfers", "host", "sums and update")


def main_figures(report: RunReport) -> str:
    """Return the model, the strategy and the main figures."""
    line = strategy_line(report.run.start)
    first = f'<p class="winner">{escape(line)}</p>' if line else ""
    return f'<p class="sub">{escape(heading(report.run.start))}</p>{first}' + facts(list(glance(report)))


def description(report: RunReport) -> str:
    """Return the machine, versions and times of a run, and the command that started it."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in about(report) if text)
    start = report.run.start
    command = (
        "" if start is None else f"<details><summary>command</summary><pre>{escape(start.command)}</pre></details>"
    )
    return f'<dl class="about">{rows}</dl>{command}'


def missing(reports: Sequence[RunReport]) -> str:
    """Return the unknown figures with the flags that record them; empty if there are none."""
    lines = []
    for report in reports:
        before = f"{report.run.name}: " if len(reports) > 1 else ""
        lines += [f"<li>{escape(before + line)}</li>" for line in report.missing]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def predictions(report: RunReport) -> str:
    """Return the predicted and the measured figures."""
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
    differs = f"<p>The run differs from the priced strategy:</p><ul>{others}</ul>" if others else ""
    return (
        f'<p class="sub">{escape(sentence)}</p>{differs}'
        '<div class="wide"><table class="kept"><tr><th class="left"></th>'
        '<th>predicted</th><th>measured</th><th>difference</th><th class="left">known causes</th></tr>'
        f"{rows}</table></div>"
    )


def times(report: RunReport) -> str:
    """Return the parts of an iteration: predicted, and measured on each rank."""
    steps = report.steps
    if steps is None:
        return ""
    bars: list[Bar] = []
    if report.prediction is not None:
        parts = report.prediction.predicted.breakdown
        compute = sum(parts.get(name, 0.0) for name in COMPUTE)
        update = sum(parts[name] for name in ("gradient_reduction_s", "shared_weight_s", "optimizer_s", "fixed_s"))
        waits = (compute, parts["bubble_s"], parts["transfer_s"] + parts["host_copy_s"], 0.0, update)
        total = time_text(report.prediction.predicted.iteration_time_s)
        bars.append(Bar("predicted, busiest rank", dict(zip(LEGEND_OF_TIMES, waits, strict=True)), total))
    makespan = steps.comparison.measured.makespan
    rest = max(report.figures.iteration_time_s.median - makespan, 0.0)
    for rank, spent in enumerate(steps.comparison.rank_times):
        waits = (spent.busy, spent.dependency, spent.transfer, spent.host_overhead, rest)
        parts = dict(zip(LEGEND_OF_TIMES, waits, strict=True))
        bars.append(Bar(f"measured, pipeline rank {rank}", parts, time_text(makespan + rest)))
    note = (
        f"Measured: the median of {len(steps.comparison.steps)} steps; sums and update are the rest of the median "
        "iteration. Point at a part for its seconds."
    )
    palette = colours(LEGEND_OF_TIMES)
    drawn = stacked_bars(bars, palette, lambda amount, _: time_text(amount))
    return f'<p class="sub">{note}</p>{legend(LEGEND_OF_TIMES, palette)}{drawn}'


def memory(report: RunReport) -> str:
    """Return the memory of each stage, measured and predicted."""
    peaks, prediction = report.figures.peak_memory_bytes, report.prediction
    if not peaks:
        return ""
    palette = colours([*MEMORY_NAMES.values()]) | {"measured": "#8b949e"}
    predicted = [] if prediction is None else prediction.predicted.memory_per_rank
    bars: list[Bar] = []
    for stage, peak in enumerate(peaks):
        if stage < len(predicted):
            parts = {name: predicted[stage][field] for field, name in MEMORY_NAMES.items()}
            bars.append(Bar(f"stage {stage}, predicted", parts, bytes_text(predicted[stage]["total"])))
        bars.append(Bar(f"stage {stage}, measured", {"measured": float(peak)}, bytes_text(peak)))
    start = report.run.start
    on_cpu = start is not None and start.machine.device == "cpu"
    note = f'<p class="sub">{ON_CPU[:1].upper()}{ON_CPU[1:]}.</p>' if on_cpu else ""
    return note + chart(bars, palette, lambda amount, _: bytes_text(amount))


def timeline(report: RunReport) -> str:
    """Return the measured timeline and its simulation: to zoom on a screen, as a picture on paper."""
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


def incident_list(report: RunReport) -> str:
    """Return the incidents, kind by kind."""
    found = report.incidents
    if not found:
        return ""
    lines = "".join(
        f"<li><b>{escape(kind)}</b> {escape(text)}</li>"
        for kind, text in listed([each for each in found if each.kind != "save"], MOST_LISTED)
    )
    saves = [saved.seconds for piece in report.run.pieces for saved in piece.saves]
    if saves:
        waited = f"{len(saves)} checkpoints, for which training waited {time_text(sum(saves))} in all"
        lines += f"<li><b>save</b> {waited}, {time_text(max(saves))} at most</li>"
    return f"<ul>{lines}</ul>"


def render_report(reports: Sequence[RunReport]) -> str:
    """Return the page of some reports."""
    title = title_of(reports)
    body = [f"<header><h1>{escape(title)}</h1></header>"]
    contents: list[tuple[str, str, str]] = []
    for report in reports:
        name = f" ({report.run.name})" if len(reports) > 1 else ""
        contents += [
            (f"Run{name}" if name else "", main_figures(report), ""),
            (f"Predicted and measured{name}", predictions(report), ""),
            (f"Parts of an iteration{name}", times(report), ""),
            (f"Memory of each stage{name}", memory(report), ""),
            (f"Timeline, measured and simulated{name}", timeline(report), "timelines"),
            (f"Loads of experts{name}", expert_pictures(report.run.expert_loads()), ""),
            (f"Incidents{name}", incident_list(report), ""),
            (f"Start, end and command{name}", description(report), ""),
        ]
    contents.append(("Unknown", missing(reports), ""))
    body += [section(name, content, kind=kind) for name, content, kind in contents if content]
    return html_document(title, "\n".join(body))
