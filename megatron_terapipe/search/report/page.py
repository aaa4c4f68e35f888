"""The report as one HTML page that needs nothing else: what wins, why, what it costs, what was rejected."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from deepspeed_ext.plan.render.html import Panel, render_html
from megatron_terapipe.search.report import sections
from megatron_terapipe.search.report.answer import Answer, all_notes
from megatron_terapipe.search.report.comparison import rivals
from megatron_terapipe.search.report.table import heading

_HEAD_HEIGHT, _PANEL_HEIGHT, _ROW_HEIGHT = 150, 185, 27
"""Pixels of the timelines' page: title and legend, a panel without its rows, a row."""


@dataclass(frozen=True, kw_only=True)
class Extras:
    """The contents of a page beside the answer itself.

    Attributes:
        command: what launches the winner; empty = it cannot be launched so.
        panels: timelines, on one axis.
        panels_note: what of them is left out.
        rows: strategies that the page lists.
    """

    command: str = ""
    panels: Sequence[Panel] = ()
    panels_note: str = ""
    rows: int = 30


def render_page(answer: Answer, extras: Extras) -> str:
    """Return the report.

    Args:
        answer: what to show.
        extras: what to show beside the answer.

    Returns:
        An HTML document.
    """
    priced = answer.priced
    body = [
        f"<header><h1>{escape(answer.workload.name)} on {escape(answer.cluster.name or 'the cluster')}</h1></header>"
    ]
    body.append(f'<p class="sub">{escape(heading(answer))}</p>')
    if priced:
        body.append(_section("", sections.winner(answer, priced[0])))
        body += _notes(answer)
        if extras.command:
            body.append(_section("How to run it", f"<pre>{escape(extras.command)}</pre>"))
        for index, rival in enumerate(rivals(priced)):
            over = "the best of another kind" if index else "the runner-up"
            body.append(_section(f"Why it wins over {over}", sections.why(priced[0], rival)))
    else:
        why = escape(answer.why_none or "no strategy can run; below is why")
        body.append(_section("", f'<p class="winner">{why[:1].upper()}{why[1:]}</p>'))
        body += _notes(answer)
    body.append(_section("Ranking", sections.ranking(answer, extras.rows)))
    if priced:
        body.append(_section("Where an iteration goes", sections.times(priced[:10])))
        body.append(_section("Memory of each pipeline rank", sections.memory(answer, priced[0])))
    if extras.panels:
        body.append(_section("Timeline", _timeline(extras), kind="timeline"))
    if answer.counts is not None:
        body.append(_section("What was rejected", sections.rejections(answer)))
    return _document(f"{answer.workload.name} on {answer.cluster.name or 'the cluster'}", "\n".join(body))


def _notes(answer: Answer) -> list[str]:
    """Return the section of the notes, which stand where they are read; empty if there are none."""
    listed = "".join(f"<li>{escape(note)}</li>" for note in all_notes(answer))
    return [_section("Notes", f"<ul>{listed}</ul>")] if listed else []


def _section(title: str, content: str, *, kind: str = "") -> str:
    """Return a section; `kind` is its class in the style sheet, where it has one."""
    start = f'<section class="{kind}">' if kind else "<section>"
    return f"{start}{f'<h2>{escape(title)}</h2>' if title else ''}{content}</section>"


def _timeline(extras: Extras) -> str:
    """Return the timelines in a frame of their own: their page has scripts, styles and names of its own."""
    ranks = sum(panel.timeline.shape.num_ranks for panel in extras.panels)
    height = _HEAD_HEIGHT + _PANEL_HEIGHT * len(extras.panels) + _ROW_HEIGHT * ranks
    page = render_html(extras.panels, "predicted timeline")
    note = f'<p class="sub">{escape(extras.panels_note)}</p>' if extras.panels_note else ""
    return f'{note}<iframe title="timeline" style="height:{height}px" srcdoc="{escape(page, quote=True)}"></iframe>'


def _document(title: str, body: str) -> str:
    shared, own = files("deepspeed_ext.plan.render") / "page", files("megatron_terapipe.search.report")
    style = "".join((folder / "style.css").read_text(encoding="utf-8") for folder in (shared, own))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
