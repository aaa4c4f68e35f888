"""Bars of a measurement, as SVG: the median of every engine, fastest first, with the range of its rounds."""

from collections.abc import Iterator

from benchmarks.engines.findings import micro_batches
from benchmarks.engines.names import DEEPSPEED, IN_ONE_THREAD, OURS, PLAIN, TORCH
from benchmarks.engines.results import Document, Measured, Run
from deepspeed_ext.plan.render.svg_elements import INK, MARGIN, MIDDLE, SOFT, document, rect, text

WIDTH, LABELS, VALUES = 900, 375, 50
ROW, BAR, HEAD, FOOT = 22, 13, 40, 22
COLOURS = {PLAIN: "#b1b8c0", DEEPSPEED: "#e3b341", TORCH: "#b392f0", OURS: "#9ecbff"}
WITH_TOKEN_SLICES = "#388bfd"
SMALL = 'font-size="12"'
IDEAL = 'class="ideal" stroke="#6e7781" stroke-width="1.2" stroke-dasharray="4 3"'
"""The line that a perfect pipeline reaches, over the bars."""


def draw(measurement: Document) -> str:
    """Return the picture of a measurement: a panel for each number of micro-batches."""
    body: list[str] = []
    y = float(MARGIN)
    for run in measurement.runs:
        body += _panel(run, measurement.num_ranks, y)
        y += HEAD + ROW * len(run.engines) + FOOT
    legend = {**COLOURS, "ours, with token slices": WITH_TOKEN_SLICES}
    x = float(MARGIN)
    for name, colour in legend.items():
        body += [rect(x, y, 11, 11, f'rx="2" fill="{colour}"'), text(x + 16, y + 6, name, f"{SOFT} {SMALL} {MIDDLE}")]
        x += 36 + 6.6 * len(name)
    title = "Seconds of a step on two ranks"
    said = "; ".join(
        f"{micro_batches(run.num_micro_batches)}: fastest {min(run.timed, key=_median).name}"
        for run in measurement.runs
        if run.timed
    )
    return document(body, WIDTH, y + MARGIN, title, f"{title}. {said}.")


def _median(each: Measured) -> float:
    return each.median_s


def _panel(run: Run, num_ranks: int, top: float) -> Iterator[str]:
    timed = sorted(run.timed, key=_median)
    longest = max((max(each.seconds) for each in timed), default=1.0)
    scale = (WIDTH - 2 * MARGIN - LABELS - VALUES) / longest
    left = MARGIN + LABELS
    head = f"{micro_batches(run.num_micro_batches)}: seconds of a step, median and range"
    yield text(MARGIN, top + 8, head, f'{INK} font-size="15" font-weight="600" {MIDDLE}')
    first_row, end = top + HEAD, top + HEAD + ROW * len(timed)
    for number, each in enumerate(timed):
        yield from _bar(each, first_row + ROW * number, left, scale)
    alone = next((each.median_s for each in timed if each.name == IN_ONE_THREAD), None)
    if alone is not None:
        x = left + scale * alone / num_ranks
        yield f'<path d="M{x:.2f},{first_row - 8:.2f} V{end:.2f}" {IDEAL}/>'
        yield text(x, first_row - 14, f"one thread / {num_ranks}", f'{SOFT} font-size="11" text-anchor="middle"')
    untimed = [each for each in run.engines if not each.seconds]
    for number, each in enumerate(untimed, start=len(timed)):
        middle = first_row + ROW * number + ROW / 2
        yield _label(each, middle)
        why = f"needs {each.needs} micro-batches" if each.needs is not None else "not timed: see the table"
        yield text(left + 4, middle, why, f"{SOFT} {SMALL} {MIDDLE}")


def _bar(each: Measured, top: float, left: float, scale: float) -> Iterator[str]:
    middle = top + ROW / 2
    yield _label(each, middle)
    colour = COLOURS.get(each.engine, WITH_TOKEN_SLICES)
    yield rect(left, middle - BAR / 2, scale * each.median_s, BAR, f'rx="2" fill="{colour}"')
    least, most = (left + scale * seconds for seconds in (min(each.seconds), max(each.seconds)))
    # A line with ends, in a colour that is legible on bars and on pages, light or dark.
    ends = f"M{least:.2f},{middle - 4:.2f} v8 M{least:.2f},{middle:.2f} H{most:.2f} M{most:.2f},{middle - 4:.2f} v8"
    yield f'<path d="{ends}" class="range" stroke="#57606a" fill="none" stroke-width="1.2"/>'
    yield text(most + 6, middle, f"{each.median_s:.2f}", f"{INK} {SMALL} {MIDDLE}")


def _label(each: Measured, middle: float) -> str:
    return text(MARGIN + LABELS - 8, middle, str(each.name), f'{INK} {SMALL} text-anchor="end" {MIDDLE}')
