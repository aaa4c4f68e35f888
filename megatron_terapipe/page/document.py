"""Report pages: the HTML document, its stacked bars, and strips of marks over the iterations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from deepspeed_ext.plan.draw.elements import oklch_to_hex
from deepspeed_ext.plan.draw.html import Panel, render_html
from megatron_terapipe.page.chart import Axis, value_text

_HUES = (255, 150, 25, 80, 310, 200, 350, 115, 60, 285, 175, 5)
_LIGHTNESS = (0.72, 0.80, 0.70, 0.86, 0.66, 0.82, 0.62, 0.76, 0.64, 0.84, 0.60, 0.88)
"""Neighbours differ in lightness as well as in hue, so that they are told apart without colour vision."""

_SHORTEST = 0.0005
"""Shares below this cannot be seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart."""

    label: str
    """What it is of, as text."""
    parts: Mapping[str, float]
    """Amount of each part by its name."""
    figure: str
    limit: float | None = None
    """Where a line marks what there is room for; None = no line."""


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


def stacked_bars(bars: Sequence[Bar], palette: Mapping[str, str], written: Mapping[int, Mapping[str, str]]) -> str:
    """Return bars on one scale, below each other.

    Args:
        written: by bar and part, the amount as it is shown to who points at it.
    """
    longest = max((max(sum(bar.parts.values()), bar.limit or 0.0) for bar in bars), default=0.0) or 1.0
    rows = []
    for index, bar in enumerate(bars):
        pieces = "".join(
            f'<span style="width:{100 * amount / longest:.3f}%;background:{palette[name]}" '
            f'title="{escape(f"{name}: {written[index][name]}", quote=True)}"></span>'
            for name, amount in bar.parts.items()
            if amount / longest > _SHORTEST
        )
        mark = ""
        if bar.limit is not None:
            mark = f'<b class="limit" style="left:{100 * bar.limit / longest:.3f}%" title="what the device has"></b>'
        label = f'<div class="label" title="{escape(bar.label, quote=True)}">{escape(bar.label)}</div>'
        rows.append(
            f'<div class="row">{label}<div class="track">{pieces}{mark}</div>'
            f'<div class="figure">{escape(bar.figure)}</div></div>'
        )
    return f'<div class="bars">{"".join(rows)}</div>'


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
"""Iterations that are written below the rows."""


def strip(rows: Mapping[str, Sequence[tuple[float, str]]], first: float, last: float) -> str:
    """Return a row of marks for each kind.

    Args:
        rows: by kind, places of marks and what they are.
        first: first iteration.
        last: last iteration.
    """
    axis = Axis(first, max(last, first + 1), 0.0, 100.0)
    return f'<div class="strip">{"".join(_rows(rows, axis))}</div>'


def _rows(rows: Mapping[str, Sequence[tuple[float, str]]], axis: Axis) -> Iterator[str]:
    for name, marks in rows.items():
        # Of marks that lie on each other, one is enough.
        places = {f"{axis.at(place):.1f}": words for place, words in marks}
        ticks = "".join(
            f'<b style="left:{place}%" title="{escape(words, quote=True)}"></b>' for place, words in places.items()
        )
        yield f'<div class="row"><div class="label">{escape(name)}</div><div class="track">{ticks}</div></div>'
    values = [axis.low, *(value for value in axis.round_values(_NUMBERS) if 6 < axis.at(value) < 94), axis.high]
    kinds = ["first", *[""] * (len(values) - 2), "last"]
    numbers = "".join(
        f'<span class="{kind}" style="left:{axis.at(value):.1f}%">{value_text(value)}</span>'
        for kind, value in zip(kinds, values, strict=True)
    )
    yield f'<div class="row axis"><div class="label">iteration</div><div class="track">{numbers}</div></div>'


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
