"""Charts as SVG: curves over iterations, with axes of round values, thinned without losing an extreme."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, inf, isfinite, log10
from statistics import fmean

from deepspeed_ext.plan.draw.elements import GRID, INK, SOFT, document, oklch_to_hex, text


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False
    """Whether factors are equally long, not differences."""

    def at(self, value: float) -> float:
        """Return the pixel of a value; what is beyond an end stands at that end."""
        share = (self._place(value) - self._place(self.low)) / (self._place(self.high) - self._place(self.low))
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def round_values(self, most: int) -> list[float]:
        """Return values to mark, some `most` of them."""
        if self.logarithmic:
            powers = range(ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9) + 1)
            if len(powers) > 2:
                return [10.0**power for power in powers[:: ceil(len(powers) / most)]]
            around = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            values = [factor * 10.0**power for power in around for factor in (1, 2, 5)]
            return [value for value in values if self.low <= value <= self.high]
        return round_values(self.low, self.high, most)

    def _place(self, value: float) -> float:
        return log10(max(value, 1e-300)) if self.logarithmic else value


def round_values(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten in a range."""
    power = 10.0 ** floor(log10((high - low) / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if (high - low) / (factor * power) <= most)
    return [index * step for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def value_text(value: float) -> str:
    """Return a value as axes show it: `0.25`, `12k`, `1.5M`, `3e-05`."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def padded(low: float, high: float, *, from_zero: bool = False) -> tuple[float, float]:
    """Return a range with room above and below.

    Args:
        from_zero: whether it begins at 0.
    """
    if low == inf:
        return 0.0, 1.0
    if from_zero:
        return 0.0, high * 1.08 or 1.0
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


Point = tuple[float, float]
"""x and y."""

MOST_BINS = 300
"""Bins of a curve: about one for each pixel of a small chart."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Points of a curve that lie next to each other."""

    x: float
    least: float
    mean: float
    most: float
    num_points: int


def thinned(points: Sequence[Point], most: int = MOST_BINS) -> list[Bin]:
    """Return the bins of a curve, one for each point where there are few; values that are no numbers are left out.

    Args:
        points: in rising order of x.
    """
    finite = [(x, y) for x, y in points if isfinite(y)]
    if not finite:
        return []
    if len(finite) <= most:
        return [Bin(x, y, y, y, 1) for x, y in finite]
    first, width = finite[0][0], (finite[-1][0] - finite[0][0]) / most
    binned: dict[int, list[Point]] = {}
    for x, y in finite:
        # The last point belongs to the last bin.
        binned.setdefault(min(int((x - first) / width), most - 1), []).append((x, y))
    return [_bin(each) for each in binned.values()]


def _bin(points: Sequence[Point]) -> Bin:
    values = [y for _, y in points]
    return Bin((points[0][0] + points[-1][0]) / 2, min(values), fmean(values), max(values), len(points))


WIDTH, HEIGHT = 420.0, 236.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 10.0, 44.0, 26.0
_LINE = 15.0
_HUES = (255, 150, 310, 85, 200, 340)
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 4")
MOST_DOTS = 40
"""Dots of a curve that do not hide what is below them."""

_LETTER = 6.2
"""Pixels of a letter of the legend."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve."""

    name: str
    """What it is of; empty = the chart says it."""
    points: Sequence[Point]
    """In rising order of x."""
    number: int = 0
    """Which colour and dashes it has, the same in all charts."""
    dotted: bool = False
    """Whether each point is a dot of its own."""


@dataclass(frozen=True, slots=True)
class Level:
    """A value over all iterations, such as one that was predicted."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves on one pair of axes."""

    title: str
    unit: str = ""
    """Of its values; empty = none."""
    curves: Sequence[Curve] = ()
    levels: Sequence[Level] = ()
    marks: Sequence[float] = ()
    """Iterations that are marked with a line."""
    shaded: Sequence[tuple[float, float]] = field(default_factory=tuple)
    """Ranges of iterations that are no part of the figures."""
    logarithmic: bool = False
    """Whether the values are on a logarithmic axis, if they allow it."""
    from_zero: bool = False
    """Whether the axis begins at 0."""
    top: float | None = None
    """Value above which values are drawn at the upper end; None = none are."""
    note: str = ""
    """What the chart leaves out."""


def colour_of(number: int) -> str:
    """Return the colour of a curve, which stands out from light and from dark pages."""
    return oklch_to_hex(0.61, 0.14, _HUES[number % len(_HUES)])


def thinning_note(charts: Iterable[Chart]) -> str:
    """Return what a page says of charts whose curves are thinned; empty if none is."""
    bins = (each for chart in charts for curve in chart.curves for each in thinned(curve.points))
    widest = max((each.num_points for each in bins), default=1)
    if widest == 1:
        return ""
    return f"Lines are means of up to {widest:,} iterations; bands reach from the least of them to the most."


def chart_figure(chart: Chart) -> str:
    """Return a chart as a figure of a page, as HTML."""
    drawn = _Drawn(chart)
    name = escape(chart.title)
    caption = f"<figcaption>{escape(drawn.note)}</figcaption>" if drawn.note else ""
    return (
        f'<figure class="chart"><svg viewBox="0 0 {WIDTH:g} {drawn.height:g}" role="img">'
        f"<title>{name}</title><desc>{escape(drawn.description)}</desc>{''.join(drawn.body)}</svg>{caption}</figure>"
    )


def chart_picture(chart: Chart) -> str:
    """Return a chart as an SVG document of its own."""
    drawn = _Drawn(chart)
    return document(drawn.body, WIDTH, drawn.height, chart.title, drawn.description)


class _Drawn:
    """The elements of a chart."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self._bins = [thinned(curve.points) for curve in chart.curves]
        self._legend = list(self._legend_lines())
        top = _TOP + _LINE * max(len(self._legend) - 1, 0)
        self.height = HEIGHT + top - _TOP
        self._x, self._y = self._axes(top, self.height - _BOTTOM)
        self.note = self._caption()
        self.description = self._described()
        self.body = list(self._elements())

    def _axes(self, top: float, bottom: float) -> tuple[Axis, Axis]:
        chart = self._chart
        every = [each for bins in self._bins for each in bins]
        values = [y for each in every for y in (each.least, each.most)]
        values += [y for level in chart.levels for y in (level.low, level.high)]
        if chart.top is not None:
            values = [min(value, chart.top) for value in values]
        low, high = min(values, default=0.0), max(values, default=1.0)
        logarithmic = chart.logarithmic and low > 0 and high / low > 8
        if logarithmic:
            low, high = low / 1.15, high * 1.15
        else:
            low, high = padded(low, high, from_zero=chart.from_zero and low >= 0)
        places = [each.x for each in every] or [0.0, 1.0]
        first, last = min(places), max(places)
        if first == last:
            first, last = first - 1, last + 1
        return Axis(first, last, _LEFT, WIDTH - _RIGHT), Axis(low, high, bottom, top, logarithmic)

    def _elements(self) -> Iterator[str]:
        chart, x, y = self._chart, self._x, self._y
        unit = f" ({chart.unit})" if chart.unit else ""
        yield text(12, 19, chart.title + unit, f'{INK} font-size="13" font-weight="600"')
        for line, entries in enumerate(self._legend):
            yield from self._legend_line(entries, 36 + _LINE * line)
        for start, end in chart.shaded:
            width = max(x.at(end) - x.at(start), 1.0)
            yield f'<rect class="shaded" x="{x.at(start):.1f}" y="{y.end:.1f}" width="{width:.1f}" '
            yield f'height="{y.start - y.end:.1f}" fill="#8b949e" fill-opacity="0.2"/>'
        for value in y.round_values(5):
            yield f'<path d="M{x.start:.1f},{y.at(value):.1f} H{x.end:.1f}" {GRID}/>'
            yield text(x.start - 6, y.at(value) + 3.5, value_text(value), f'{SOFT} font-size="10.5" text-anchor="end"')
        for value in x.round_values(6):
            yield text(x.at(value), y.start + 16, value_text(value), f'{SOFT} font-size="10.5" text-anchor="middle"')
        for place in chart.marks:
            yield f'<path class="mark" d="M{x.at(place):.1f},{y.start:.1f} V{y.end:.1f}" stroke="#8b949e" '
            yield 'stroke-width="1" stroke-dasharray="2 2"/>'
        for level in chart.levels:
            yield from self._level(level)
        for curve, bins in zip(chart.curves, self._bins, strict=True):
            yield from self._curve(curve, bins)
        if not any(self._bins):
            middle = (x.start + x.end) / 2, (y.start + y.end) / 2
            yield text(*middle, "nothing recorded", f'{SOFT} font-size="12" text-anchor="middle"')

    def _level(self, level: Level) -> Iterator[str]:
        x, y = self._x, self._y
        if level.low < level.high:
            top, bottom = y.at(level.high), y.at(level.low)
            yield f'<rect x="{x.start:.1f}" y="{top:.1f}" width="{x.end - x.start:.1f}" height="{bottom - top:.1f}" '
            yield f'fill="{_LEVEL}" fill-opacity="0.14"/>'
        yield f'<path d="M{x.start:.1f},{y.at(level.value):.1f} H{x.end:.1f}" fill="none" stroke="{_LEVEL}" '
        yield f'stroke-width="1.6" stroke-dasharray="6 4"><title>{escape(level.name)}</title></path>'

    def _curve(self, curve: Curve, bins: Sequence[Bin]) -> Iterator[str]:
        x, y, colour = self._x, self._y, colour_of(curve.number)
        if any(each.num_points > 1 for each in bins):
            upper = [f"{x.at(each.x):.1f},{y.at(each.most):.1f}" for each in bins]
            lower = [f"{x.at(each.x):.1f},{y.at(each.least):.1f}" for each in reversed(bins)]
            yield f'<path d="M{" ".join(upper + lower)}z" fill="{colour}" fill-opacity="0.28"/>'
        places = [(x.at(each.x), y.at(each.mean)) for each in bins]
        dashes = f' stroke-dasharray="{_DASHES[curve.number % len(_DASHES)]}"' if curve.number else ""
        if len(places) > 1:
            line = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
            width = "1" if curve.dotted else "1.5"
            yield f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"'
            yield f"{dashes}><title>{escape(curve.name or self._chart.title)}</title></path>"
        if curve.dotted or len(places) == 1:
            for left, top in places if len(places) <= MOST_DOTS else ():
                yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.6" fill="{colour}"/>'
        if self._chart.top is not None:
            for each in bins:
                if each.most > self._y.high:
                    left, top = x.at(each.x), y.end
                    yield f'<path d="M{left - 4:.1f},{top + 7:.1f} l4,-7 l4,7z" fill="{_BEYOND}">'
                    yield f"<title>{value_text(each.most)} at {each.x:g}</title></path>"

    def _legend_lines(self) -> Iterator[list[tuple[str, int]]]:
        """Names with the number of their curve, -1 for a level, in lines that fit."""
        named = [(curve.name, curve.number) for curve in self._chart.curves if curve.name]
        named += [(level.name, -1) for level in self._chart.levels]
        line: list[tuple[str, int]] = []
        used = 0.0
        for name, number in named:
            width = 34 + _LETTER * len(name)
            if line and used + width > WIDTH - 24:
                yield line
                line, used = [], 0.0
            line.append((name, number))
            used += width
        if line:
            yield line

    def _legend_line(self, entries: Sequence[tuple[str, int]], y: float) -> Iterator[str]:
        left = 12.0
        for name, number in entries:
            colour, dashes = (_LEVEL, "6 4") if number < 0 else (colour_of(number), _DASHES[number % len(_DASHES)])
            dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
            yield f'<path d="M{left:.1f},{y - 4:.1f} h18" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'
            yield text(left + 23, y, name, f'{SOFT} font-size="11"')
            left += 34 + _LETTER * len(name)

    def _caption(self) -> str:
        notes = [self._chart.note] if self._chart.note else []
        beyond = sum(each.most > self._y.high for bins in self._bins for each in bins)
        if self._chart.top is not None and beyond:
            notes.append("triangles: values above the chart")
        return "; ".join(notes)

    def _described(self) -> str:
        parts = []
        for curve, bins in zip(self._chart.curves, self._bins, strict=True):
            if bins:
                least, most = min(each.least for each in bins), max(each.most for each in bins)
                parts.append(
                    f"{curve.name or self._chart.title}: from {value_text(bins[0].mean)} to "
                    f"{value_text(bins[-1].mean)} over {bins[0].x:g} to {bins[-1].x:g}, least {value_text(least)}, "
                    f"most {value_text(most)}."
                )
        parts += [f"{level.name}: {value_text(level.value)}." for level in self._chart.levels if isfinite(level.value)]
        return " ".join(parts) or "nothing recorded"


_LEVEL = oklch_to_hex(0.61, 0.16, 25)
_BEYOND = oklch_to_hex(0.58, 0.2, 25)
