"""Pages of reports: the HTML document, stacked bars, marks over the iterations, and timelines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from math import ceil, floor, log10

from deepspeed_ext.plan.draw.elements import oklch_to_hex
from deepspeed_ext.plan.draw.html import Panel, render_html

_HUES = (255, 150, 25, 80, 310, 200, 350, 115, 60, 285, 175, 5)
_LIGHTNESS = (0.72, 0.80, 0.70, 0.86, 0.66, 0.82, 0.62, 0.76, 0.64, 0.84, 0.60, 0.88)
"""Neighbours differ in lightness as well as in hue, so that they differ without colour vision, too."""

_SHORTEST = 0.0005
"""Shares below this cannot be seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart."""

    label: str
    """Name of the bar, as text."""
    parts: Mapping[str, float]
    """Amount of each part by its name."""
    figure: str
    limit: float | None = None
    """Limit that a line marks; None = no line."""


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each part, the same in all charts."""
    return {
        name: oklch_to_hex(_LIGHTNESS[index % len(_LIGHTNESS)], 0.11, _HUES[index % len(_HUES)])
        for index, name in enumerate(names)
    }


def legend(names: Sequence[str], palette: Mapping[str, str]) -> str:
    """Return the legend of a chart."""
    entries = "".join(
        f'<span class="entry"><i style="background:{palette[name]}"></i>{escape(name)}</span>' for name in names
    )
    return f'<div class="legend">{entries}</div>'


def stacked_bars(bars: Sequence[Bar], palette: Mapping[str, str], text: Callable[[float, Bar], str]) -> str:
    """Return bars on one scale, below each other.

    Args:
        text: text of an amount of a bar, shown under the pointer.
    """
    longest = max((max(sum(bar.parts.values()), bar.limit or 0.0) for bar in bars), default=0.0) or 1.0
    rows = []
    for bar in bars:
        pieces = "".join(
            f'<span style="width:{100 * amount / longest:.3f}%;background:{palette[name]}" '
            f'title="{escape(f"{name}: {text(amount, bar)}", quote=True)}"></span>'
            for name, amount in bar.parts.items()
            if amount / longest > _SHORTEST
        )
        mark = ""
        if bar.limit is not None:
            mark = f'<b class="limit" style="left:{100 * bar.limit / longest:.3f}%" title="memory of the device"></b>'
        label = f'<div class="label" title="{escape(bar.label, quote=True)}">{escape(bar.label)}</div>'
        rows.append(
            f'<div class="row">{label}<div class="track">{pieces}{mark}</div>'
            f'<div class="figure">{escape(bar.figure)}</div></div>'
        )
    return f'<div class="bars">{"".join(rows)}</div>'


def chart(bars: Sequence[Bar], palette: Mapping[str, str], text: Callable[[float, Bar], str]) -> str:
    """Return stacked bars below the legend of the parts that any of them has."""
    shown = [name for name in palette if any(bar.parts.get(name, 0.0) > 0 for bar in bars)]
    return legend(shown, palette) + stacked_bars(bars, palette, text)


MEMORY_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "key_values": "keys and values",
    "logits": "logits",
    "buffers": "buffers",
    "framework": "framework",
}
"""Parts of memory in words."""


_NUMBERS = 6
"""Iterations that are written below the rows, at most."""


def value_text(value: float) -> str:
    """Return a value as axes have it: `0.25`, `12k`, `1.5M`, `3e-05`."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def strip(rows: Mapping[str, Sequence[tuple[float, str]]], first: float, last: float) -> str:
    """Return a row of marks for each kind, over the iterations from `first` to `last`.

    Args:
        rows: by kind, iterations of marks and their texts.
    """
    last = max(last, first + 1)

    def percent(iteration: float) -> float:
        return 100 * min(max((iteration - first) / (last - first), 0.0), 1.0)

    lines = []
    for name, marks in rows.items():
        # Of marks at one place, one is enough.
        places = {f"{percent(iteration):.1f}": text for iteration, text in marks}
        ticks = "".join(
            f'<b style="left:{place}%" title="{escape(text, quote=True)}"></b>' for place, text in places.items()
        )
        lines.append(f'<div class="label">{escape(name)}</div><div class="track">{ticks}</div>')
    power = 10.0 ** floor(log10((last - first) / _NUMBERS))
    step = next(factor * power for factor in (1, 2, 5, 10) if (last - first) / (factor * power) <= _NUMBERS)
    between = [index * step for index in range(ceil(first / step), floor(last / step) + 1)]
    values = [first, *(value for value in between if 6 < percent(value) < 94), last]
    kinds = ["first", *[""] * (len(values) - 2), "last"]
    numbers = "".join(
        f'<span class="{kind}" style="left:{percent(value):.1f}%">{value_text(value)}</span>'
        for kind, value in zip(kinds, values, strict=True)
    )
    body = "".join(f'<div class="row">{line}</div>' for line in lines)
    axis = f'<div class="row axis"><div class="label">iteration</div><div class="track">{numbers}</div></div>'
    return f'<div class="strip">{body}{axis}</div>'


_HEAD_HEIGHT, _PANEL_HEIGHT, _ROW_HEIGHT = 150, 185, 27
"""Pixels of the timelines' page: title and legend, a panel without its rows, a row."""


def html_document(title: str, body: str) -> str:
    """Return the document of a report."""
    shared, own = files("deepspeed_ext.plan.draw") / "page", files("megatron_terapipe.page")
    sheets = (shared / "style.css", own / "report.css")
    style = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def section(title: str, content: str, *, kind: str = "") -> str:
    """Return a section of a page.

    Args:
        title: its heading; empty = none.
        kind: its class in the style sheet, where it has one.
    """
    start = f'<section class="{kind}">' if kind else "<section>"
    return f"{start}{f'<h2>{escape(title)}</h2>' if title else ''}{content}</section>"


def facts(figures: Sequence[tuple[str, str]]) -> str:
    """Return figures at a glance, each above its name, as HTML."""
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in figures)
    return f'<div class="facts">{shown}</div>'


def timelines(panels: Sequence[Panel], title: str) -> str:
    """Return timelines in a frame of their own, as HTML: their page has scripts, styles and names of its own."""
    ranks = sum(panel.timeline.shape.num_ranks for panel in panels)
    height = _HEAD_HEIGHT + _PANEL_HEIGHT * len(panels) + _ROW_HEIGHT * ranks
    page = escape(render_html(panels, title), quote=True)
    # The frame is as high as its page, also once the window is narrower.
    fit = (
        "const page=this.contentDocument.documentElement,frame=this;new ResizeObserver(()=>"
        "{frame.style.height=page.getBoundingClientRect().height+'px'}).observe(page)"
    )
    name = escape(title, quote=True)
    return f'<iframe title="{name}" style="height:{height}px" onload="{fit}" srcdoc="{page}"></iframe>'
