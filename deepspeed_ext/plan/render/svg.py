"""Draws timelines as SVG: stages down, time to the right.

    stage 0 [F0.0][F0.1]......[B0.1]      hue: micro-batch       lightness: token slice
    stage 1       [F0.0][F0.1][B0.1]      hatching: backward     bare track: idle
            0     1     2     3    4

Colours are given as attributes, for any viewer, and a style sheet changes them where the reader prefers dark. The
picture brings its own background, so that it is legible on any page.
"""

from collections.abc import Iterator, Sequence
from math import floor, log10
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.render.palette import op_colour
from deepspeed_ext.plan.timeline import Timeline

_WIDTH = 1120
_MARGIN = 28
_PLOT_LEFT = 100
_PLOT_RIGHT = 1020
_ROW_GAP = 4
_MAX_MICRO_BATCHES_IN_LEGEND = 8
_SMALLEST_LABEL = 8.0  # below it, colour and hatching speak for the op

_INK, _SOFT = 'class="ink" fill="#1f2328"', 'class="soft" fill="#636c76"'
_TRACK, _GRID = 'class="track" fill="#eef0f3"', 'class="grid" stroke="#d8dde3"'
_LABEL = 'fill="#1f2328"'  # on an op, which keeps its colour in the dark
_MIDDLE = 'dominant-baseline="central"'
_CENTRED = f'text-anchor="middle" {_MIDDLE}'

_STYLE = """<style>
text { font-family: Inter, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #30363d; } .ink { fill: #e6edf3; } .soft { fill: #9198a1; }
.track { fill: #1c222b; } .grid { stroke: #30363d; }
}
</style>"""
_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M-1.5,1.5 l3,-3 M0,6 l6,-6 M4.5,7.5 l3,-3" stroke="#1f2328" stroke-opacity="0.28" stroke-width="1.5"/>'
    "</pattern></defs>"
)


class _Scale(NamedTuple):
    """From time since the first op to pixels."""

    makespan: float

    def x(self, time: float) -> float:
        return _PLOT_LEFT + (time / self.makespan if self.makespan else 0.0) * (_PLOT_RIGHT - _PLOT_LEFT)


def render_svg(timeline: Timeline, title: str) -> str:
    """Draw one timeline, with its bubble ratio and its peak of live token slices.

    Args:
        timeline: what to draw.
        title: what it shows, for example the name of the schedule.

    Returns:
        An SVG document.
    """
    scale = _Scale(timeline.makespan)
    row_height = _row_height(timeline.shape.num_stages)
    top = 104
    bottom = top + _rows_height(timeline, row_height)
    shape = timeline.shape
    summary = (
        f"{_count(shape.num_stages, 'stage')} · {_count(shape.num_micro_batches, 'micro-batch')} · "
        f"{_count(shape.num_token_slices, 'token slice')}"
    )
    facts = [
        ("bubble ratio", f"{timeline.bubble_ratio:.1%}"),
        ("makespan", _with_unit(timeline.makespan, timeline.unit)),
        ("peak live token slices", str(max(timeline.peak_live_token_slices))),
    ]
    body = [
        _text(_MARGIN, 40, title, f'{_INK} font-size="19" font-weight="600"'),
        _text(_MARGIN, 62, summary, f'{_SOFT} font-size="13"'),
        *_facts(facts, 46),
        _text(_PLOT_RIGHT + 36, top - 12, "peak live", f'{_SOFT} font-size="11" text-anchor="middle"'),
        *_grid(scale, top, bottom),
        *_axis(scale, timeline.unit, bottom),
        *_rows(timeline, scale, top, row_height),
        *_peaks(timeline, top, row_height),
        *_legend(shape, bottom + 62),
    ]
    return _document(body, bottom + 86, title, _description(title, timeline))


def render_comparison(panels: Sequence[tuple[str, Timeline]]) -> str:
    """Draw timelines below each other on one time axis, each against the first.

    Args:
        panels: title and timeline of each, in the same unit.

    Returns:
        An SVG document.

    Raises:
        PlanError: if there is no panel, or their units differ.
    """
    units = {timeline.unit for _, timeline in panels}
    if len(units) != 1:
        raise PlanError(
            f"{len(panels)} timelines in {len(units)} units on one axis: give at least one, all in one unit"
        )
    scale = _Scale(max(timeline.makespan for _, timeline in panels))
    row_height = _row_height(max(timeline.shape.num_stages for _, timeline in panels))
    reference = panels[0][1].makespan
    body: list[str] = []
    top = 68.0
    for title, timeline in panels:
        total = timeline.shape.num_micro_batches * timeline.shape.num_token_slices
        facts = (
            f"bubble {timeline.bubble_ratio:.1%}  ·  makespan {_with_unit(timeline.makespan, timeline.unit)}  ·  "
            f"peak live token slices {max(timeline.peak_live_token_slices)} of {total}"
        )
        body.append(_text(_MARGIN, top - 20, title, f'{_INK} font-size="16" font-weight="600"'))
        body.append(_text(_PLOT_RIGHT, top - 20, facts, f'{_INK} font-size="13" text-anchor="end"'))
        bottom = top + _rows_height(timeline, row_height)
        body += _grid(scale, top, bottom)
        body += _rows(timeline, scale, top, row_height)
        body += _saving(timeline, reference, scale, top, bottom)
        top = bottom + 68
    legend_shape = max((timeline.shape for _, timeline in panels), key=lambda shape: shape.num_token_slices)
    body += _axis(scale, units.pop(), bottom)
    body += _legend(legend_shape, bottom + 62)
    name = " / ".join(title for title, _ in panels)
    return _document(body, bottom + 86, name, " ".join(_description(title, timeline) for title, timeline in panels))


def _rows(timeline: Timeline, scale: _Scale, top: float, row_height: float) -> Iterator[str]:
    """A track per stage, as long as the timeline, with the stage's ops on it."""
    for stage, spans in enumerate(timeline.spans):
        y = top + stage * (row_height + _ROW_GAP)
        size = f'font-size="{min(13.0, row_height * 0.62):g}"'
        yield _text(
            _PLOT_LEFT - 14, y + row_height / 2, f"stage {stage}", f'{_SOFT} {size} text-anchor="end" {_MIDDLE}'
        )
        track = scale.x(timeline.makespan) - _PLOT_LEFT
        yield _rect(_PLOT_LEFT, y, track, row_height, f'rx="3" {_TRACK}')
        for op, start, end in spans:
            x, width = scale.x(start - timeline.start), scale.x(end - timeline.start) - scale.x(start - timeline.start)
            tooltip = f"{op}: {start - timeline.start:.6g} to {_with_unit(end - timeline.start, timeline.unit)}"
            yield from _block(op, timeline.shape, (x, y, width, row_height), tooltip)


def _block(op: Op, shape: PipelineShape, box: tuple[float, float, float, float], tooltip: str) -> Iterator[str]:
    """One op: filled, hatched if it is a backward, and labelled where there is room."""
    x, y, width, height = box
    gap = min(0.75, width * 0.08)  # neighbours stay apart, however thin
    x, width = x + gap, max(width - 2 * gap, 0.5)
    corner = f'rx="{min(3.0, width / 4):.3g}"'
    yield f"<g><title>{escape(tooltip)}</title>"
    yield _rect(
        x, y, width, height, f'{corner} fill="{op_colour(op.micro_batch, op.token_slice, shape.num_token_slices)}"'
    )
    if op.kind is OpKind.BACKWARD:
        yield _rect(x, y, width, height, f'{corner} fill="url(#hatch)"')
    label = f"{op.kind.value}{op.micro_batch}" + (f".{op.token_slice}" if shape.num_token_slices > 1 else "")
    size = min(12.0, height * 0.48, (width - 4) / _text_width(label))
    if size >= _SMALLEST_LABEL:
        yield _text(x + width / 2, y + height / 2, label, f'{_LABEL} font-size="{size:.3g}" {_CENTRED}')
    yield "</g>"


def _text_width(text: str) -> float:
    """Width of a text, in its font size; digits and capitals are about alike in the fonts we name."""
    return sum(0.32 if character in ".,· " else 0.62 for character in text)


def _saving(timeline: Timeline, reference: float, scale: _Scale, top: float, bottom: float) -> Iterator[str]:
    """Mark where a timeline ends before the reference, and by how much."""
    end, reference_end = scale.x(timeline.makespan), scale.x(reference)
    if reference_end - end < 70:
        return
    middle = (top + bottom) / 2
    yield (
        f'<path d="M{end + 8:.4g},{middle:.4g} H{reference_end - 1:.4g} M{end + 15:.4g},{middle - 5:.4g} l-7,5 l7,5" '
        f'fill="none" stroke-width="1.5" stroke="#8b949e"/>'
    )
    label = f"{1 - timeline.makespan / reference:.0%} less time"
    yield _text(
        (end + reference_end) / 2 + 4, middle - 14, label, f'{_INK} font-size="14" font-weight="600" {_CENTRED}'
    )


def _peaks(timeline: Timeline, top: float, row_height: float) -> Iterator[str]:
    """The column of live token slices at the peak of each stage."""
    size = min(13.0, row_height * 0.62)
    for stage, peak in enumerate(timeline.peak_live_token_slices):
        y = top + stage * (row_height + _ROW_GAP) + row_height / 2
        yield _text(_PLOT_RIGHT + 36, y, str(peak), f'{_INK} font-size="{size:g}" {_CENTRED}')


def _grid(scale: _Scale, top: float, bottom: float) -> Iterator[str]:
    """Lines at round times."""
    for time in _round_times(scale.makespan):
        yield f'<path d="M{scale.x(time):.5g},{top - 6:.5g} V{bottom + 6:.5g}" {_GRID}/>'


def _axis(scale: _Scale, unit: str, bottom: float) -> Iterator[str]:
    """Numbers of the grid lines."""
    for time in _round_times(scale.makespan):
        yield _text(scale.x(time), bottom + 21, f"{time:g}", f'{_SOFT} font-size="11" text-anchor="middle"')
    name = f"time ({unit})" if unit else "time"
    yield _text(_PLOT_RIGHT + 36, bottom + 21, name, f'{_SOFT} font-size="11" text-anchor="middle"')


def _round_times(makespan: float) -> list[float]:
    """About ten multiples of 1, 2 or 5 times a power of ten, from 0 on."""
    if makespan <= 0:
        return [0.0]
    power = 10.0 ** floor(log10(makespan / 10))
    step = next(factor * power for factor in (1, 2, 5, 10) if makespan / (factor * power) <= 12)
    return [index * step for index in range(floor(makespan / step + 1e-9) + 1)]


def _legend(shape: PipelineShape, y: float) -> Iterator[str]:
    """What hue, lightness and hatching stand for."""
    x: float = _PLOT_LEFT
    shown = min(shape.num_micro_batches, _MAX_MICRO_BATCHES_IN_LEGEND)
    entries = [("micro-batch", [(op_colour(micro_batch, 0, 1), str(micro_batch)) for micro_batch in range(shown)])]
    if shape.num_token_slices > 1:
        # As many steps of lightness as the eye tells apart; between first and last they stand for several each.
        steps = min(shape.num_token_slices, 5)
        labels = [str(step) if step < steps - 1 else str(shape.last_token_slice) for step in range(steps)]
        if steps < shape.num_token_slices:
            labels[1:-1] = [""] * (steps - 2)
        entries.append(("token slice", [(op_colour(0, step, steps), label) for step, label in enumerate(labels)]))
    for name, chips in entries:
        yield _text(x, y, name, f'{_SOFT} font-size="12" {_MIDDLE}')
        x += len(name) * 6.6 + 8
        for fill, label in chips:
            yield _rect(x, y - 9, 24, 18, f'rx="3" fill="{fill}"')
            yield _text(x + 12, y, label, f'{_LABEL} font-size="11" {_CENTRED}')
            x += 26
        if name == "micro-batch" and shown < shape.num_micro_batches:
            yield _text(x + 4, y, "…", f'{_SOFT} font-size="12" {_MIDDLE}')
            x += 16
        x += 24
    neutral = op_colour(0, 0, 1)
    for name, fills in (
        ("forward", [f'fill="{neutral}"']),
        ("backward", [f'fill="{neutral}"', 'fill="url(#hatch)"']),
        ("idle", [_TRACK]),
    ):
        for fill in fills:
            yield _rect(x, y - 9, 30, 18, f'rx="3" {fill}')
        yield _text(x + 38, y, name, f'{_SOFT} font-size="12" {_MIDDLE}')
        x += 38 + len(name) * 6.6 + 22


def _facts(facts: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    """Figures in the upper right corner, each over its name."""
    x: float = _WIDTH - _MARGIN
    for name, value in reversed(facts):
        yield _text(x, y - 4, value, f'{_INK} font-size="18" font-weight="600" text-anchor="end"')
        yield _text(x, y + 14, name, f'{_SOFT} font-size="11" text-anchor="end"')
        x -= max(11 * _text_width(name), 18 * _text_width(value)) + 20


def _document(body: Sequence[str], height: float, title: str, description: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
        f'height="{height:g}" role="img" aria-label={quoteattr(description)}>'
    )
    card = (
        f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1:g}" rx="10" '
        'fill="#ffffff" stroke="#d8dde3"/>'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", _STYLE, _HATCH, card, *body, "</svg>", ""])


def _description(title: str, timeline: Timeline) -> str:
    shape = timeline.shape
    return (
        f"{title}: {_count(shape.num_stages, 'stage')}, {_count(shape.num_micro_batches, 'micro-batch')}, "
        f"{_count(shape.num_token_slices, 'token slice')}, makespan {_with_unit(timeline.makespan, timeline.unit)}, "
        f"bubble ratio {timeline.bubble_ratio:.1%}."
    )


def _row_height(num_stages: int) -> float:
    return 30 if num_stages <= 8 else 22 if num_stages <= 16 else 14


def _rows_height(timeline: Timeline, row_height: float) -> float:
    return timeline.shape.num_stages * (row_height + _ROW_GAP) - _ROW_GAP


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def _with_unit(time: float, unit: str) -> str:
    return f"{time:.4g}{unit and ' ' + unit}"


def _rect(x: float, y: float, width: float, height: float, attributes: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" {attributes}/>'


def _text(x: float, y: float, content: str, attributes: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {attributes}>{escape(content)}</text>'
