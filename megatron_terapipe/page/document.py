"""A report page: one HTML document that needs nothing else, in the colours of the timelines' page."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from deepspeed_ext.plan.render.html import Panel, render_html

_HEAD_HEIGHT, _PANEL_HEIGHT, _ROW_HEIGHT = 150, 185, 27
"""Pixels of the timelines' page: title and legend, a panel without its rows, a row."""


def html_document(title: str, body: str) -> str:
    """Return the document of a report."""
    shared, own = files("deepspeed_ext.plan.render") / "page", files("megatron_terapipe.page")
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
