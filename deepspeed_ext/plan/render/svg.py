"""Draws timelines as SVG: pipeline ranks down, time to the right.

stage 0 [F0.0][F0.1]......[B0.1]      hue: micro-batch       lightness: token slice
stage 1       [F0.0][F0.1][B0.1]      hatching: backward     bare track: idle
        0     1     2     3    4
"""

from collections.abc import Iterator, Sequence

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import OpKind, PipelineShape
from deepspeed_ext.plan.render.labels import extents, op_label, with_unit
from deepspeed_ext.plan.render.svg_axis import PLOT_LEFT, Scale, axis, grid
from deepspeed_ext.plan.render.svg_elements import (
    CENTRED,
    INK,
    MARGIN,
    SOFT,
    document,
    text,
    text_width,
)
from deepspeed_ext.plan.render.svg_legend import Legend, facts, legend
from deepspeed_ext.plan.render.svg_rows import peaks, row_height, rows, rows_height
from deepspeed_ext.plan.timeline import Timeline

_WIDTH = 1120
_WIDEST = 1680
_LABELLED, _THIN = 9.0, 7.0
"""Pixels of a letter of an op's label, and of an op without one. A timeline of many ops gets a wider picture."""


def render_svg(timeline: Timeline, title: str) -> str:
    """Draw one timeline, with its bubble ratio and its peak of live token slices.

    Args:
        title: what it shows, for example the name of the schedule.

    Returns:
        An SVG document.
    """
    scale = Scale(timeline.duration, _width([timeline]))
    height = row_height(timeline.shape.num_ranks)
    top = 104
    bottom = top + rows_height(timeline, height)
    figures = [
        ("bubble ratio", f"{timeline.bubble_ratio:.1%}"),
        ("makespan", with_unit(timeline.makespan, timeline.unit)),
        ("peak live token slices", str(max(timeline.peak_live_token_slices))),
    ]
    if timeline.reductions:
        figures.insert(2, ("reductions end", with_unit(timeline.duration, timeline.unit)))
    explained = _legend([timeline], timeline.shape, scale.width, bottom + 62)
    body = [
        text(MARGIN, 40, title, f'{INK} font-size="19" font-weight="600"'),
        text(MARGIN, 62, " · ".join(extents(timeline.shape)), f'{SOFT} font-size="13"'),
        *facts(figures, scale.width, 46),
        text(scale.plot_right + 36, top - 12, "peak live", f'{SOFT} font-size="11" text-anchor="middle"'),
        *grid(scale, top, bottom),
        *axis(scale, timeline.unit, bottom),
        *rows(timeline, scale, top, height),
        *peaks(timeline, scale, top, height),
        *explained.body,
    ]
    return document(body, scale.width, bottom + 86 + explained.height, title, _description(title, timeline))


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
    timelines = [timeline for _, timeline in panels]
    scale = Scale(max(timeline.duration for timeline in timelines), _width(timelines))
    height = row_height(max(timeline.shape.num_ranks for timeline in timelines))
    body: list[str] = []
    top = 68.0
    for title, timeline in panels:
        total = timeline.shape.num_micro_batches * timeline.shape.num_token_slices * timeline.shape.num_model_chunks
        figures = (
            f"bubble {timeline.bubble_ratio:.1%}  ·  makespan {with_unit(timeline.makespan, timeline.unit)}  ·  "
            f"peak live token slices {max(timeline.peak_live_token_slices)} of {total}"
        )
        if timeline.reductions:
            figures += f"  ·  reductions end at {with_unit(timeline.duration, timeline.unit)}"
        body.append(text(MARGIN, top - 20, title, f'{INK} font-size="16" font-weight="600"'))
        body.append(text(scale.plot_right, top - 20, figures, f'{INK} font-size="13" text-anchor="end"'))
        bottom = top + rows_height(timeline, height)
        body += grid(scale, top, bottom)
        body += rows(timeline, scale, top, height)
        body += _saving(timeline, timelines[0].duration, scale, top, bottom)
        top = bottom + 68
    # The one with most to explain: all micro-batches, token slices and model chunks that any of them has.
    shape = max((each.shape for each in timelines), key=lambda each: (each.num_token_slices, each.num_model_chunks))
    body += axis(scale, units.pop(), bottom)
    explained = _legend(timelines, shape, scale.width, bottom + 62)
    body += explained.body
    name = " / ".join(title for title, _ in panels)
    description = " ".join(_description(title, timeline) for title, timeline in panels)
    return document(body, scale.width, bottom + 86 + explained.height, name, description)


def _width(timelines: Sequence[Timeline]) -> float:
    """Width of a picture in which most ops have room for their labels; or, of too many ops, for their textures."""
    longest = max(timelines, key=lambda timeline: timeline.makespan)
    most = max(longest.spans, key=len)
    durations = sorted(end - start for _, start, end in most)
    middle = durations[len(durations) // 2]
    if not middle:
        return _WIDTH
    label = max(text_width(op_label(op, longest.shape)) for op, *_ in most)
    margins, ops = _WIDTH - Scale(0.0, _WIDTH).plot_right + PLOT_LEFT, longest.makespan / middle
    wanted = [margins + ops * pixels for pixels in (_LABELLED * label + 5, _THIN)]
    fitting = [width for width in wanted if width <= _WIDEST]
    return float(round(max(fitting[0] if fitting else _WIDEST, _WIDTH)))


def _legend(timelines: Sequence[Timeline], shape: PipelineShape, width: float, y: float) -> Legend:
    """The meaning of all that the timelines show."""
    reduces = any(timeline.reductions for timeline in timelines)
    copies = any(timeline.host_copies for timeline in timelines)
    return legend(shape, _kinds(timelines), width, y, reduces=reduces, copies=copies)


def _kinds(timelines: Sequence[Timeline]) -> list[OpKind]:
    """The kinds of ops to explain, in their usual order."""
    there = {span.op.kind for timeline in timelines for rank in timeline.spans for span in rank}
    return [kind for kind in OpKind if kind in there]


def _saving(timeline: Timeline, reference: float, scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Mark where a timeline ends before the reference, and by how much."""
    end, reference_end = scale.x(timeline.duration), scale.x(reference)
    if reference_end - end < 70:
        return
    middle = (top + bottom) / 2
    yield (
        f'<path d="M{end + 8:.4g},{middle:.4g} H{reference_end - 1:.4g} M{end + 15:.4g},{middle - 5:.4g} l-7,5 l7,5" '
        f'fill="none" stroke-width="1.5" stroke="#8b949e"/>'
    )
    label = f"{1 - timeline.duration / reference:.0%} less time"
    yield text((end + reference_end) / 2 + 4, middle - 14, label, f'{INK} font-size="14" font-weight="600" {CENTRED}')


def _description(title: str, timeline: Timeline) -> str:
    return (
        f"{title}: {', '.join(extents(timeline.shape))}, makespan {with_unit(timeline.makespan, timeline.unit)}, "
        f"bubble ratio {timeline.bubble_ratio:.1%}."
    )
