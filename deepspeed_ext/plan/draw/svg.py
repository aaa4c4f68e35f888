"""Draws timelines as SVG: pipeline ranks down, time to the right.

stage 0 [F0.0][F0.1]......[B0.1]      hue: micro-batch       lightness: token slice
to host       [===]                   rising hatching: backward, falling: input gradient
back              [===]               low, dotted: weight gradient
links                    [====]       upper edge: model chunk, none on the first, thicker on each after it
        0     1     2     3    4      bare track: idle

An op can be recognised without its label, for which thin ops have no room. Below the track of a rank are lanes, where
it has any: copies to the host and back, and gradients summed over replicas.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import floor, log10
from typing import NamedTuple
from xml.sax.saxutils import escape

from deepspeed_ext.plan.draw.elements import (
    CENTRED,
    DOTTED,
    GRID,
    HATCHED,
    HATCHED_BACK,
    INK,
    KIND_NAMES,
    LABEL,
    LANES,
    MARGIN,
    MIDDLE,
    SOFT,
    TRACK,
    common_unit,
    copies_of,
    document,
    op_colour,
    rank_name,
    rect,
    text,
    with_unit,
)
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.timeline import Timeline

PLOT_LEFT = 100
_RIGHT_MARGIN = 100
"""Width of the column with the peaks."""


class Scale(NamedTuple):
    """From time since the first op to pixels, in a picture of some width."""

    makespan: float
    width: float

    @property
    def plot_right(self) -> float:
        """Where the last op of the longest timeline ends."""
        return self.width - _RIGHT_MARGIN

    def x(self, time: float) -> float:
        """Pixels from the left edge."""
        return PLOT_LEFT + (time / self.makespan if self.makespan else 0.0) * (self.plot_right - PLOT_LEFT)


def grid(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Return lines at round times."""
    for time in round_times(scale.makespan):
        yield f'<path d="M{scale.x(time):.5g},{top - 6:.5g} V{bottom + 6:.5g}" {GRID}/>'


def axis(scale: Scale, unit: str, bottom: float) -> Iterator[str]:
    """Return the numbers of the grid lines."""
    for time in round_times(scale.makespan):
        yield text(scale.x(time), bottom + 21, f"{time:g}", f'{SOFT} font-size="11" text-anchor="middle"')
    name = f"time ({unit})" if unit else "time"
    yield text(scale.plot_right + 36, bottom + 21, name, f'{SOFT} font-size="11" text-anchor="middle"')


def round_times(makespan: float) -> list[float]:
    """About ten multiples of 1, 2 or 5 times a power of ten, from 0 on."""
    if makespan <= 0:
        return [0.0]
    power = 10.0 ** floor(log10(makespan / 10))
    step = next(factor * power for factor in (1, 2, 5, 10) if makespan / (factor * power) <= 12)
    return [index * step for index in range(floor(makespan / step + 1e-9) + 1)]


_LANE = 7
"""Height of a lane."""
REDUCTION = 'fill="#8250df" fill-opacity="0.75"'
COPY_FILLS = ('fill="#bc4c00" fill-opacity="0.75"', 'fill="#1b7c83" fill-opacity="0.75"')
"""Of copies to the host, and back."""


def lanes(timeline: Timeline, rank: int, scale: Scale, top: float) -> Iterator[str]:
    """Return the bars in the lanes of a rank."""

    def drawn(start: float, end: float, y: float, fill: str, name: str) -> str:
        x, right = scale.x(start - timeline.start), scale.x(end - timeline.start)
        tooltip = f"{name}: {start - timeline.start:.6g} to {with_unit(end - timeline.start, timeline.unit)}"
        mark = bar(x + min(0.75, (right - x) * 0.08), y, max(right - x - 1.5, (right - x) * 0.84), fill)
        return f"<g><title>{escape(tooltip)}</title>{mark}</g>"

    for lane, copies in enumerate(copies_of(timeline, rank)):
        for copy in copies:
            yield drawn(copy.start, copy.end, top, COPY_FILLS[lane], copy.words(lane))
        top += _LANE
    for stage, piece, start, end in timeline.reductions:
        if timeline.shape.rank_of(stage) == rank:
            yield drawn(start, end, top, REDUCTION, f"reduction {piece} of stage {stage}")


def bar(x: float, y: float, width: float, fill: str) -> str:
    """Return a mark of a lane."""
    return rect(x, y, width, _LANE - 2, f'rx="1.5" {fill}')


_GAP = 4
_SMALLEST_LABEL = 8.0  # below it, an op has only its colour and hatching
_LOW = 0.62
"""Height of a weight gradient, in rows."""
_TEXTURES = {
    OpKind.FORWARD: (),
    OpKind.BACKWARD: (HATCHED,),
    OpKind.INPUT_GRADIENT: (HATCHED_BACK,),
    OpKind.WEIGHT_GRADIENT: (DOTTED,),
}


def row_height(num_ranks: int) -> float:
    """Height of a row: less where there are many."""
    return 30 if num_ranks <= 8 else 22 if num_ranks <= 16 else 14


def pitch(timeline: Timeline, height: float) -> float:
    """Return the pixels from the top of one row to the top of the next: its track, two lanes of copies, one of sums."""
    return height + _GAP + _LANE * (2 * bool(timeline.host_copies) + bool(timeline.reductions))


def rows(timeline: Timeline, scale: Scale, top: float, height: float) -> Iterator[str]:
    """Return a track per rank, as long as the timeline, with the rank's ops on it."""
    for rank, spans in enumerate(timeline.spans):
        y = top + rank * pitch(timeline, height)
        size = f'font-size="{min(13.0, height * 0.62):g}"'
        name = rank_name(timeline.shape, rank)
        yield text(PLOT_LEFT - 14, y + height / 2, name, f'{SOFT} {size} text-anchor="end" {MIDDLE}')
        yield rect(PLOT_LEFT, y, scale.x(timeline.makespan) - PLOT_LEFT, height, f'rx="3" {TRACK}')
        for op, start, end in spans:
            x, width = scale.x(start - timeline.start), scale.x(end - timeline.start) - scale.x(start - timeline.start)
            tooltip = f"{op}: {start - timeline.start:.6g} to {with_unit(end - timeline.start, timeline.unit)}"
            yield from _block(op, timeline.shape, (x, y, width, height), tooltip)
        yield from lanes(timeline, rank, scale, y + height + 1)


def peaks(timeline: Timeline, scale: Scale, top: float, height: float) -> Iterator[str]:
    """Return the column of live token slices at the peak of each rank."""
    size = min(13.0, height * 0.62)
    for rank, peak in enumerate(timeline.peak_live_token_slices):
        y = top + rank * pitch(timeline, height) + height / 2
        yield text(scale.plot_right + 36, y, str(peak), f'{INK} font-size="{size:g}" {CENTRED}')


def swatch(kind: OpKind, x: float, y: float, width: float, height: float, fill: str) -> Iterator[str]:
    """Return an op of a kind, without its label."""
    if kind is OpKind.WEIGHT_GRADIENT:
        y, height = y + height * (1 - _LOW), height * _LOW
    corner = f'rx="{min(3.0, width / 4):.3g}"'
    yield rect(x, y, width, height, f'{corner} fill="{fill}"')
    for texture in _TEXTURES[kind]:
        yield rect(x, y, width, height, f"{corner} {texture}")


def stripe(model_chunk: int, num_model_chunks: int, height: float) -> float:
    """Return the height of the mark of a model chunk, which is on the upper edge of an op."""
    return height * 0.2 * model_chunk / max(num_model_chunks - 1, 1)


_STRIPE = 'fill="#1f2328" fill-opacity="0.62"'


def op_label(op: Op, shape: PipelineShape) -> str:
    """Name of an op within its row, as short as it can be: `F0.1`, `2F0.1` on one of several stages, `F0` uncut."""
    stage = f"{op.stage}" if shape.num_model_chunks > 1 else ""
    token_slice = f".{op.token_slice}" if shape.num_token_slices > 1 else ""
    return f"{stage}{op.kind.value}{op.micro_batch}{token_slice}"


def text_width(content: str) -> float:
    """Width of a text, in its font size; digits and capitals are about alike in the fonts we name."""
    return sum(0.32 if character in ".,· " else 0.62 for character in content)


def _block(op: Op, shape: PipelineShape, box: tuple[float, float, float, float], tooltip: str) -> Iterator[str]:
    """One op, labelled where there is room."""
    x, y, width, height = box
    gap = min(0.75, width * 0.08)  # neighbours stay apart, however thin
    x, width = x + gap, max(width - 2 * gap, 0.5)
    yield f"<g><title>{escape(tooltip)}</title>"
    yield from swatch(op.kind, x, y, width, height, op_colour(op.micro_batch, op.token_slice, shape.num_token_slices))
    low = height * (1 - _LOW) if op.kind is OpKind.WEIGHT_GRADIENT else 0.0
    y, height = y + low, height - low
    model_chunk = op.stage // shape.num_ranks
    marked = stripe(model_chunk, shape.num_model_chunks, height)
    if model_chunk:
        yield rect(x, y, width, marked, _STRIPE)
    y, height = y + marked, height - marked
    label = op_label(op, shape)
    size = min(12.0, height * 0.48, (width - 4) / text_width(label))
    if size >= _SMALLEST_LABEL:
        yield text(x + width / 2, y + height / 2, label, f'{LABEL} font-size="{size:.3g}" {CENTRED}')
    yield "</g>"


_MAX_MICRO_BATCHES = 8
_CHIP, _SWATCH, _LINE, _LEGEND_GAP = 18, 30, 28, 18
_LETTER = 6.6
"""Width of a letter of a name, in pixels."""


_NAME = f'{SOFT} font-size="12" {MIDDLE}'
_Mark = Callable[[float, float], Iterable[str]]
"""Draws the mark of an entry of the legend at a left and an upper edge."""


def legend(timelines: Sequence[Timeline], shape: PipelineShape, width: float, y: float) -> tuple[list[str], float]:
    """Return the legend of timelines, on as many lines as the width needs, and the height of the lines.

    `y` is the base line of the first line, which is not counted.
    """
    body: list[str] = []
    x, first = float(PLOT_LEFT), y

    def placed(entry_width: float) -> float:
        """Left edge of the next entry, on the next line where it does not fit."""
        nonlocal x, y
        if x > PLOT_LEFT and x + entry_width > width - MARGIN:
            x, y = PLOT_LEFT, y + _LINE
        left = x
        x += entry_width + _LEGEND_GAP
        return left

    for name, chips, continues in _chips(shape):
        left = len(name) * _LETTER + 8
        start = placed(left + 26 * len(chips) + (16 if continues else 0))
        body.append(text(start, y, name, _NAME))
        for number, (fill, label) in enumerate(chips):
            at = start + left + 26 * number
            body.append(rect(at, y - _CHIP / 2, 24, _CHIP, f'rx="3" fill="{fill}"'))
            body.append(text(at + 12, y, label, f'{LABEL} font-size="11" {CENTRED}'))
        if continues:
            body.append(text(start + left + 26 * len(chips) + 4, y, "…", _NAME))
    for name, mark in _swatches(timelines, shape):
        start = placed(_SWATCH + 8 + len(name) * _LETTER)
        body += [*mark(start, y - _CHIP / 2), text(start + _SWATCH + 8, y, name, _NAME)]
    return body, y - first


def _chips(shape: PipelineShape) -> Iterator[tuple[str, list[tuple[str, str]], bool]]:
    """Names of rows of chips; fill and label of each chip; and whether there are more than those shown."""
    shown = min(shape.num_micro_batches, _MAX_MICRO_BATCHES)
    chips = [(op_colour(micro_batch, 0, 1), str(micro_batch)) for micro_batch in range(shown)]
    yield "micro-batch", chips, shown < shape.num_micro_batches
    if shape.num_token_slices > 1:
        yield "token slice", _token_slice_chips(shape), False


def _swatches(timelines: Sequence[Timeline], shape: PipelineShape) -> Iterator[tuple[str, _Mark]]:
    def op(kind: OpKind) -> _Mark:
        return lambda x, y: swatch(kind, x, y, _SWATCH, _CHIP, op_colour(0, 0, 1))

    def lane(fill: str) -> _Mark:
        return lambda x, y: [bar(x, y + _CHIP / 2 - 3, _SWATCH, fill)]

    there = {span.op.kind for timeline in timelines for rank in timeline.spans for span in rank}
    yield from ((KIND_NAMES[kind], op(kind)) for kind in OpKind if kind in there)
    if last := shape.num_model_chunks - 1:
        height = stripe(last, last + 1, _CHIP)
        forward = op(OpKind.FORWARD)
        yield f"model chunk {last}", lambda x, y: [*forward(x, y), rect(x, y, _SWATCH, height, _STRIPE)]
    if any(timeline.host_copies for timeline in timelines):
        yield from ((f"copy {name}", lane(fill)) for name, fill in zip(LANES, COPY_FILLS, strict=True))
    if any(timeline.reductions for timeline in timelines):
        yield "gradient reduction", lane(REDUCTION)
    yield "idle", lambda x, y: [rect(x, y, _SWATCH, _CHIP, f'rx="3" {TRACK}')]


def facts(figures: Sequence[tuple[str, str]], width: float, y: float) -> Iterator[str]:
    """Return figures for the upper right corner, each over its name."""
    x: float = width - MARGIN
    for name, value in reversed(figures):
        yield text(x, y - 4, value, f'{INK} font-size="18" font-weight="600" text-anchor="end"')
        yield text(x, y + 14, name, f'{SOFT} font-size="11" text-anchor="end"')
        x -= max(11 * text_width(name), 18 * text_width(value)) + 20


def _token_slice_chips(shape: PipelineShape) -> list[tuple[str, str]]:
    """At most five steps of lightness, which the eye can distinguish; between first and last each is for several."""
    steps = min(shape.num_token_slices, 5)
    labels = [str(step) if step < steps - 1 else str(shape.last_token_slice) for step in range(steps)]
    if steps < shape.num_token_slices:
        labels[1:-1] = [""] * (steps - 2)
    return [(op_colour(0, step, steps), label) for step, label in enumerate(labels)]


_WIDTH = 1120
_WIDEST = 1680
_LABELLED, _THIN = 9.0, 7.0
"""Pixels of a letter of an op's label, and of an op without one. A timeline of many ops gets a wider picture."""


def render_svg(timeline: Timeline, title: str) -> str:
    """Draw one timeline, with its bubble ratio and its peak of live token slices."""
    scale = Scale(timeline.duration, _width([timeline]))
    height = row_height(timeline.shape.num_ranks)
    top = 104
    bottom = top + timeline.shape.num_ranks * pitch(timeline, height) - _GAP
    figures = [
        ("bubble ratio", f"{timeline.bubble_ratio:.1%}"),
        ("makespan", with_unit(timeline.makespan, timeline.unit)),
        ("peak live token slices", str(max(timeline.peak_live_token_slices))),
    ]
    if timeline.reductions:
        figures.insert(2, ("reductions end", with_unit(timeline.duration, timeline.unit)))
    explained, height_below = legend([timeline], timeline.shape, scale.width, bottom + 62)
    body = [
        text(MARGIN, 40, title, f'{INK} font-size="19" font-weight="600"'),
        text(MARGIN, 62, " · ".join(timeline.shape.extents), f'{SOFT} font-size="13"'),
        *facts(figures, scale.width, 46),
        text(scale.plot_right + 36, top - 12, "peak live", f'{SOFT} font-size="11" text-anchor="middle"'),
        *grid(scale, top, bottom),
        *axis(scale, timeline.unit, bottom),
        *rows(timeline, scale, top, height),
        *peaks(timeline, scale, top, height),
        *explained,
    ]
    return document(body, scale.width, bottom + 86 + height_below, title, _description(title, timeline))


def render_comparison(panels: Sequence[tuple[str, Timeline]]) -> str:
    """Draw timelines below each other on one time axis, each against the first."""
    timelines = [timeline for _, timeline in panels]
    unit = common_unit(timelines)
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
        bottom = top + timeline.shape.num_ranks * pitch(timeline, height) - _GAP
        body += grid(scale, top, bottom)
        body += rows(timeline, scale, top, height)
        body += _saving(timeline, timelines[0].duration, scale, top, bottom)
        top = bottom + 68
    # The one with most to explain: all micro-batches, token slices and model chunks that any of them has.
    shape = max((each.shape for each in timelines), key=lambda each: (each.num_token_slices, each.num_model_chunks))
    body += axis(scale, unit, bottom)
    explained, height_below = legend(timelines, shape, scale.width, bottom + 62)
    body += explained
    name = " / ".join(title for title, _ in panels)
    description = " ".join(_description(title, timeline) for title, timeline in panels)
    return document(body, scale.width, bottom + 86 + height_below, name, description)


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
        f"{title}: {', '.join(timeline.shape.extents)}, makespan {with_unit(timeline.makespan, timeline.unit)}, "
        f"bubble ratio {timeline.bubble_ratio:.1%}."
    )
