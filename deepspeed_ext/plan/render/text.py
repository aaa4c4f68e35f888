"""Draws a timeline as a grid of text: one row per stage, time to the right.

    stage 0 | F0.0 F0.1 F1.0  .   B0.1 F1.1 B0.0  .   B1.1 B1.0
    stage 1 |  .   F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0  .

F0.1 is the forward of token slice 1 of micro-batch 0, a dot is idle time. Equal costs give one column per op. With
uneven costs the shortest op is one column wide, and a longer one is drawn out with dashes: `B0.1----- `. A timeline
too long for one line goes on below, as a score does.
"""

from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.timeline import Span, Timeline

_MAX_BANDS = 12
"""Lines of the score. A timeline that needs more is drawn at a smaller scale, with the letters of its ops alone."""


def render_text(timeline: Timeline, width: int = 120) -> str:
    """Draw a timeline as text.

    Args:
        timeline: what to draw.
        width: characters that a line may have.

    Returns:
        The lines, without a line break at the end.
    """
    gutters = [f"stage {stage:>{len(str(timeline.shape.last_stage))}} | " for stage in range(len(timeline.spans))]
    column = 1 + max(len(_label(span.op)) for spans in timeline.spans for span in spans)
    # Bands hold whole columns, so that with equal costs no op is torn across two of them.
    band = max((width - len(gutters[0])) // column, 1) * column
    scale = _characters_per_time(timeline, column, _MAX_BANDS * band)
    length = max(round(timeline.makespan * scale), 1)
    rows = [_row(spans, timeline.start, scale, length, column) for spans in timeline.spans]
    if length <= band:
        return "\n".join(_line(gutter, row) for gutter, row in zip(gutters, rows, strict=True))
    bands = []
    for first in range(0, length, band):
        lines = [f"time {first / scale:g}{timeline.unit and ' ' + timeline.unit}"]
        lines += [_line(gutter, row[first : first + band]) for gutter, row in zip(gutters, rows, strict=True)]
        bands.append("\n".join(lines))
    return "\n\n".join(bands)


def _characters_per_time(timeline: Timeline, column: int, max_length: int) -> float:
    """Scale that gives the shortest op one column, or less where the whole would not fit."""
    durations = [span.end - span.start for spans in timeline.spans for span in spans if span.end > span.start]
    if not durations:
        return 1.0  # nothing takes time: there is nothing to scale
    return min(column / min(durations), max_length / timeline.makespan)


def _row(spans: tuple[Span, ...], origin: float, scale: float, length: int, column: int) -> str:
    """Draw one stage: dots on the column grid, and its ops over them."""
    row = [" " if position % column != 1 else "." for position in range(length)]
    for op, start, end in spans:
        first = round((start - origin) * scale)
        last = max(round((end - origin) * scale), first + 1)
        row[first:last] = _block(_label(op), last - first, column)
    return "".join(row[:length])


def _block(label: str, width: int, column: int) -> str:
    if width < len(label):
        return label[0].ljust(width, "-")
    if width <= column:
        return label.ljust(width)
    return label.ljust(width - 1, "-") + " "


def _label(op: Op) -> str:
    """Text form of an op without its stage, which the row says."""
    return f"{op.kind.value}{op.micro_batch}.{op.token_slice}"


def _line(gutter: str, row: str) -> str:
    return (gutter + row).rstrip()
