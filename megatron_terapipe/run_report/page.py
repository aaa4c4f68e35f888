"""The report as one HTML page."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, inf

from deepspeed_ext.plan.draw import render_comparison
from deepspeed_ext.plan.draw.elements import oklch_to_hex
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
from megatron_terapipe.records import STARVED_BELOW, ExpertLoads, Saved, latest_loads, starved_text
from megatron_terapipe.run_report.comparison import COMPUTE, ON_CPU
from megatron_terapipe.run_report.curves import curves
from megatron_terapipe.run_report.figures import listed, strategy_line
from megatron_terapipe.run_report.report import RunReport, about, glance, heading, part_lines, title_of
from megatron_terapipe.texts import bytes_text, time_text

LEVELS = (
    (STARVED_BELOW, f"load below {STARVED_BELOW:g}", oklch_to_hex(0.38, 0.13, 264)),
    (0.5, f"{STARVED_BELOW:g} to 0.5", oklch_to_hex(0.62, 0.12, 255)),
    (0.8, "0.5 to 0.8", oklch_to_hex(0.80, 0.07, 250)),
    (1.25, "0.8 to 1.25", oklch_to_hex(0.92, 0.02, 100)),
    (2.0, "1.25 to 2", oklch_to_hex(0.82, 0.09, 60)),
    (4.0, "2 to 4", oklch_to_hex(0.68, 0.15, 42)),
    (inf, "4 or more", oklch_to_hex(0.50, 0.16, 28)),
)
"""Loads: upper bound, name and colour."""

MOST_COLUMNS = 60
"""Columns of a picture over time at most."""

_WIDTH, _ROW, _LEFT, _HEAD = 1000.0, 18.0, 70.0, 20.0
_LEAST_LABEL = 44.0
"""Pixels of a label of a column, at least."""


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], loads: Sequence[Sequence[float]]) -> str:
    """Return a table of loads as a titled SVG picture; a cell has its row, column and load under the pointer."""
    width = (_WIDTH - _LEFT) / len(columns)
    every = 1 << (ceil(_LEAST_LABEL / width) - 1).bit_length()

    def elements() -> Iterator[str]:
        for column in range(0, len(columns), every):
            x = _LEFT + (column + 0.5) * width
            yield f'<text class="soft" x="{x:.1f}" y="{_HEAD - 6}" text-anchor="middle">{columns[column]}</text>'
        for row, (name, of_row) in enumerate(zip(rows, loads, strict=True)):
            y = _HEAD + row * _ROW
            yield f'<text class="soft" x="{_LEFT - 8}" y="{y + _ROW - 5:.0f}" text-anchor="end">{name}</text>'
            for column, (of_column, load) in enumerate(zip(columns, of_row, strict=True)):
                colour = next(colour for bound, _, colour in LEVELS if load < bound or bound == inf)
                yield (
                    f'<rect x="{_LEFT + column * width:.2f}" y="{y:.0f}" width="{width:.2f}" height="{_ROW - 1:.0f}" '
                    f'fill="{colour}"><title>{name}, {of_column}: {load:.2f}</title></rect>'
                )

    height = _HEAD + _ROW * len(rows)
    return (
        f'<p>{title}</p><svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="{title}" font-size="11">{"".join(elements())}</svg>'
    )


def in_columns(lines: Sequence[ExpertLoads]) -> list[ExpertLoads]:
    """Return means of consecutive lines of the last line's layers and experts, `MOST_COLUMNS` at most."""
    last = lines[-1]
    alike = [each for each in lines if (each.layers, each.num_experts) == (last.layers, last.num_experts)]
    together = ceil(len(alike) / MOST_COLUMNS)
    return [ExpertLoads.mean(alike[start : start + together]) for start in range(0, len(alike), together)]


def expert_pictures(lines: Sequence[ExpertLoads]) -> str:
    """Return the loads of experts as HTML: of the last iterations, and of the busiest and least busy over time.

    Args:
        lines: in the order of iterations; the result is empty without any.
    """
    latest = latest_loads(lines)
    if latest is None:
        return ""
    rows, columns = [f"layer {layer}" for layer in latest.layers], in_columns(lines)

    def over_time(name: str, choose: Callable[[Sequence[float]], float]) -> str:
        loads = [[choose(each.loads[row]) for each in columns] for row in range(len(rows))]
        names = [f"{'iteration ' if column == 0 else ''}{each.iteration}" for column, each in enumerate(columns)]
        return heat_map(f"{name} expert of each layer, over iterations", rows, names, loads)

    starved = f"<p>{escape(starved_text(latest))}</p>" if latest.starved else ""
    note = (
        "The load of an expert is the number of its tokens over its even share: 1 is balanced. A column over "
        "iterations is the mean of those up to the given one."
    )
    palette = {name: colour for _, name, colour in LEVELS}
    experts = [f"{'expert ' if expert == 0 else ''}{expert}" for expert in range(latest.num_experts)]
    last = f"means of iterations {latest.iteration - latest.iterations + 1} to {latest.iteration}"
    return (
        f'<p class="sub">{note}</p>{starved}{legend(list(palette), palette)}'
        f"{heat_map(last, rows, experts, latest.loads)}"
        f"{over_time('busiest', max)}{over_time('least busy', min)}"
    )


MOST_LISTED = 6
"""Most incidents of a kind with a line of their own."""

LEGEND_OF_TIMES = ("compute", "waiting for other ranks", "transfers", "host", "sums and update")


def main_figures(report: RunReport) -> str:
    """Return the model, the strategy and the main figures."""
    lines = part_lines(report.run) or [strategy_line(report.run.start)]
    first = "".join(f'<p class="winner">{escape(line)}</p>' for line in lines if line)
    return f'<p class="sub">{escape(heading(report.run.start))}</p>{first}' + facts(list(glance(report)))


def description(report: RunReport) -> str:
    """Return the machine, versions and times of a run, and the command that started it."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in about(report) if text)
    command = f"<details><summary>command</summary><pre>{escape(report.run.start.command)}</pre></details>"
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
    on_cpu = report.run.start.machine.device == "cpu"
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
    """Return the incidents, in the order of time."""
    found = report.incidents
    if not found:
        return ""
    lines = "".join(
        f"<li><b>{escape(kind)}</b> {escape(text)}</li>"
        for kind, text in listed([each for each in found if each.kind != "save"], MOST_LISTED)
    )
    saves = [saved.seconds for piece in report.run.pieces for saved in piece.of(Saved)]
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
            (f"Curves{name}", curves(report.run), ""),
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
