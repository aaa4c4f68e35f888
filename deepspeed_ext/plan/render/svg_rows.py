"""The rows of SVG pictures: a track for each pipeline rank, with its ops on it.

What an op is can be read without its label, which thin ops have no room for:

    hue          micro-batch                 lightness   token slice
    hatching     rising: backward            falling: input gradient
    low, dotted  weight gradient
    upper edge   model chunk: none on the first, thicker on each after it

Below a track are the lanes of its rank, where it has any: `svg_lanes`.
"""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.render.labels import op_label, rank_name, with_unit
from deepspeed_ext.plan.render.palette import op_colour
from deepspeed_ext.plan.render.svg_axis import PLOT_LEFT, Scale
from deepspeed_ext.plan.render.svg_elements import (
    CENTRED,
    DOTTED,
    HATCHED,
    HATCHED_BACK,
    INK,
    LABEL,
    MIDDLE,
    SOFT,
    TRACK,
    rect,
    text,
    text_width,
)
from deepspeed_ext.plan.render.svg_lanes import lanes, lanes_height
from deepspeed_ext.plan.timeline import Timeline

_GAP = 4
_SMALLEST_LABEL = 8.0  # below it, colour and hatching speak for the op
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


def rows_height(timeline: Timeline, height: float) -> float:
    """Return the height of all rows of a timeline together, in pixels."""
    return timeline.shape.num_ranks * _pitch(timeline, height) - _GAP


def _pitch(timeline: Timeline, height: float) -> float:
    """From the top of one row to that of the next."""
    return height + _GAP + lanes_height(timeline)


def rows(timeline: Timeline, scale: Scale, top: float, height: float) -> Iterator[str]:
    """Return a track per rank, as long as the timeline, with the rank's ops on it.

    Args:
        top: y of the first row.
    """
    for rank, spans in enumerate(timeline.spans):
        y = top + rank * _pitch(timeline, height)
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
    """Return the column of live token slices at the peak of each rank.

    Args:
        top: y of the first row.
    """
    size = min(13.0, height * 0.62)
    for rank, peak in enumerate(timeline.peak_live_token_slices):
        y = top + rank * _pitch(timeline, height) + height / 2
        yield text(scale.plot_right + 36, y, str(peak), f'{INK} font-size="{size:g}" {CENTRED}')


def swatch(kind: OpKind, x: float, y: float, width: float, height: float, fill: str) -> Iterator[str]:
    """Return an op of a kind, without its label."""
    if kind is OpKind.WEIGHT_GRADIENT:
        y, height = y + height * (1 - _LOW), height * _LOW
    corner = f'rx="{min(3.0, width / 4):.3g}"'
    yield rect(x, y, width, height, f'{corner} fill="{fill}"')
    for texture in _TEXTURES[kind]:
        yield rect(x, y, width, height, f"{corner} {texture}")


def stripe(model_chunk: int, num_model_chunks: int, x: float, y: float, width: float, height: float) -> Iterator[str]:
    """Return the mark of a model chunk on the upper edge of an op."""
    if model_chunk:
        thickness = _stripe_height(model_chunk, num_model_chunks, height)
        yield rect(x, y, width, thickness, 'fill="#1f2328" fill-opacity="0.62"')


def _stripe_height(model_chunk: int, num_model_chunks: int, height: float) -> float:
    return height * 0.2 * model_chunk / max(num_model_chunks - 1, 1)


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
    yield from stripe(model_chunk, shape.num_model_chunks, x, y, width, height)
    marked = _stripe_height(model_chunk, shape.num_model_chunks, height)
    y, height = y + marked, height - marked
    label = op_label(op, shape)
    size = min(12.0, height * 0.48, (width - 4) / text_width(label))
    if size >= _SMALLEST_LABEL:
        yield text(x + width / 2, y + height / 2, label, f'{LABEL} font-size="{size:.3g}" {CENTRED}')
    yield "</g>"
