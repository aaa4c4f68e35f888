"""Pages of reports: the HTML document, stacked bars and timelines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

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
    parts: Mapping[str, float]
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
    """Return bars on one scale, below each other."""
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
            mark = f'<b class="limit" style="left:{100 * bar.limit / longest:.3f}%" title="{LIMIT}"></b>'
        label = f'<div class="label" title="{escape(bar.label, quote=True)}">{escape(bar.label)}</div>'
        rows.append(
            f'<div class="row">{label}<div class="track">{pieces}{mark}</div>'
            f'<div class="figure">{escape(bar.figure)}</div></div>'
        )
    return f'<div class="bars">{"".join(rows)}</div>'


LIMIT = "memory of the device"


def chart(bars: Sequence[Bar], palette: Mapping[str, str], text: Callable[[float, Bar], str]) -> str:
    """Return stacked bars below the legend of the parts that any of them has."""
    shown = [name for name in palette if any(bar.parts.get(name, 0.0) > 0 for bar in bars)]
    if any(bar.limit is not None for bar in bars):
        shown, palette = [*shown, LIMIT], {**palette, LIMIT: "var(--accent)"}
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
