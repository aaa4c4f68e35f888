"""Curves of a run over its iterations, as SVG pictures: a line for each layout of the run, in its colour."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from statistics import fmean, median

from megatron_terapipe.page.document import colours, legend
from megatron_terapipe.records import IterationMetrics
from megatron_terapipe.run_report.metrics_file import Part, TrainingRun
from megatron_terapipe.texts import time_text

Points = Sequence[tuple[float, float]]

MOST_POINTS = 500
"""Points of all lines of a picture together, about: each is the mean of consecutive iterations."""

MOST_TIMES = 3.0
"""Medians of the slowest layout up to which times are drawn; longer ones are at the upper edge."""

_WIDTH, _HEIGHT, _LEFT, _FOOT = 1000.0, 170.0, 70.0, 20.0


def curves(run: TrainingRun) -> str:
    """Return the curves of loss, iteration times and learning rate; empty for a run of one iteration."""
    first, last = run.iterations[0].iteration, run.iterations[-1].iteration
    if first == last:
        return ""
    together = ceil(len(run.iterations) / MOST_POINTS)
    longest = MOST_TIMES * max(median(each.iteration_time_s for each in part.steady) for part in run.parts)

    def lines(value: Callable[[IterationMetrics], float]) -> list[Points]:
        return [list(_points(part, value, together)) for part in run.parts]

    names = [f"iterations {part.iterations[0].iteration} to {part.iterations[-1].iteration}" for part in run.parts]
    palette = colours(["training"] if len(names) == 1 else names) | {"validation": "#8b949e"}
    evaluations = [(each.iteration, each.lm_loss) for each in run.evaluations() if isfinite(each.lm_loss)]
    shown = [name for name in palette if name != "validation" or evaluations]
    pictures: Sequence[tuple[str, list[Points], Points, Callable[[float], str]]] = (
        ("loss", lines(lambda each: each.lm_loss), evaluations, "{:.4g}".format),
        ("time of an iteration", lines(lambda each: min(each.iteration_time_s, longest)), [], time_text),
        ("learning rate", lines(lambda each: each.learning_rate), [], "{:.2g}".format),
    )
    drawn = (
        f"<p>{title} over iterations</p>{_picture(title, found, list(palette.values()), dots, (first, last), text)}"
        for title, found, dots, text in pictures
    )
    return legend(shown, palette) + "".join(drawn)


def _points(part: Part, value: Callable[[IterationMetrics], float], together: int) -> Iterator[tuple[float, float]]:
    for start in range(0, len(part.iterations), together):
        chunk = part.iterations[start : start + together]
        values = [value(each) for each in chunk if isfinite(value(each))]
        if values:
            yield chunk[-1].iteration, fmean(values)


def round_values(low: float, high: float) -> list[float]:
    """Return four to nine round numbers between two numbers, low < high."""
    step = 10.0 ** floor(log10(high - low))
    step *= next(factor for factor in (0.2, 0.5, 1.0, 2.0) if high - low <= 8.001 * step * factor)
    return [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _picture(
    title: str,
    lines: Sequence[Points],
    of_lines: Sequence[str],
    dots: Points,
    ends: tuple[int, int],
    text: Callable[[float], str],
) -> str:
    """Return the picture of some lines, each with its colour, and of grey points."""
    values = [y for points in (*lines, dots) for _, y in points] or [0.0]
    low, high = min(values), max(values)
    if high - low <= 1e-9 * abs(high):
        low, high = (0.0, high) if high > 0 else (low - 1.0, low + 1.0)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - ends[0]) / (ends[1] - ends[0])
        return _LEFT + across * (_WIDTH - _LEFT - 20), 8 + (high - y) / (high - low) * (_HEIGHT - _FOOT - 16)

    def elements() -> Iterator[str]:
        for value in round_values(low, high):
            _, y = at(ends[0], value)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH}"/>'
            yield f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text(value))}</text>'
        for number in round_values(*ends):
            if number == int(number):
                x, _ = at(number, low)
                yield f'<text class="soft" x="{x:.1f}" y="{_HEIGHT - 4}" text-anchor="middle">{number:.0f}</text>'
        for colour, points in zip(of_lines, lines, strict=False):
            places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
            yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        for x, y in (at(*point) for point in dots):
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{of_lines[-1]}"/>'

    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{title} over iterations" '
        f'font-size="11">{"".join(elements())}</svg>'
    )
