"""Draws a timeline as a grid of text: one row per pipeline rank, time to the right.

    stage 0 | F0.0 F0.1 F1.0  .   B0.1 F1.1 B0.0  .   B1.1 B1.0
    stage 1 |  .   F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0  .

F0.1 is the forward of token slice 1 of micro-batch 0, a dot is idle time. Equal costs give one column per op. With
uneven costs the shortest op is one column wide, and a longer one is drawn out with dashes: `B0.1----- `. A timeline too
long for one line continues below, as a score does. Where ranks own several stages, ops have the stage's number: 2F0.1.

Where there are host copies, lanes below each rank show them: K0.1 of keys and values, I0.1 of a stage input.
"""

from collections.abc import Iterator

from deepspeed_ext.plan.draw.elements import LANES, copies_of, rank_name
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.timeline import Timeline

_MAX_BANDS = 12


def render_text(timeline: Timeline, width: int = 120, max_bands: int = _MAX_BANDS) -> str:
    """Draw a timeline as text.

    Args:
        max_bands: lines of the score. A timeline that needs more is drawn at a smaller scale, with only the
            letters of its ops.
    """
    shape = timeline.shape
    names = [rank_name(shape, rank).split() for rank in range(shape.num_ranks)]
    gutters = [f"{noun} {number:>{len(str(shape.num_ranks - 1))}} | " for noun, number in names]
    column = 1 + max(len(_label(span.op, shape)) for spans in timeline.spans for span in spans)
    if timeline.host_copies:
        width_of_names = max(len(gutters[0]) - 3, *map(len, LANES))
        gutters = [f"{name:<{width_of_names}} | " for gutter in gutters for name in (gutter[:-3], *LANES)]
    # Bands hold whole columns, so that with equal costs no op is torn across two of them.
    band = max((width - len(gutters[0])) // column, 1) * column
    scale = _characters_per_time(timeline, column, max_bands * band)
    length = max(round(timeline.makespan * scale), 1)
    rows = [row for rank in range(shape.num_ranks) for row in _rows(timeline, rank, scale, length, column)]
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


def _rows(timeline: Timeline, rank: int, scale: float, length: int, column: int) -> Iterator[str]:
    """Draw one rank: its ops, and below them the copies to the host and back where the timeline has any."""
    # Of the two parts of a backward, W is the one for weights.
    letters = {kind: "W" if kind is OpKind.WEIGHT_GRADIENT else kind.value[0] for kind in OpKind}
    ops = [(_label(op, timeline.shape), letters[op.kind], start, end) for op, start, end in timeline.spans[rank]]
    copies = [
        [(each.label(timeline.shape), each.letter, each.start, each.end) for each in lane]
        for lane in copies_of(timeline, rank)
    ]
    for blocks in (ops, *copies):
        row = [" " if position % column != 1 else "." for position in range(length)]
        for label, letter, start, end in blocks:
            first = round((start - timeline.start) * scale)
            last = max(round((end - timeline.start) * scale), first + 1)
            row[first:last] = _block(label, letter, last - first, column)
        yield "".join(row[:length])


def _block(label: str, letter: str, width: int, column: int) -> str:
    if width < len(label):
        return letter.ljust(width, "-")
    if width <= column:
        return label.ljust(width)
    return label.ljust(width - 1, "-") + " "


def _label(op: Op, shape: PipelineShape) -> str:
    """Text form of an op, without its stage where the row names it."""
    return str(op) if shape.num_model_chunks > 1 else f"{op.kind.value}{op.micro_batch}.{op.token_slice}"


def _line(gutter: str, row: str) -> str:
    return (gutter + row).rstrip()
