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

STYLE = """
body { max-width: 1280px; }
h2 { margin: 0 0 8px; font-size: 16px; font-weight: 600; }
.sub { margin: 2px 0 14px; color: var(--soft); }
.winner { font-size: 17px; font-weight: 600; margin: 2px 0 12px; }
.facts { display: flex; flex-wrap: wrap; gap: 10px 40px; }
.facts b { display: block; font-size: 21px; font-weight: 600; line-height: 1.25; }
.facts span { color: var(--soft); font-size: 12px; }
section {
  margin: 14px 0; padding: 14px 18px; border: 1px solid var(--line); border-radius: 10px; background: var(--card);
}
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { padding: 4px 12px 4px 0; color: var(--soft); font-size: 12px; font-weight: 500; text-align: right; }
td { padding: 4px 12px 4px 0; border-top: 1px solid var(--line); text-align: right; }
th.left, td.left { text-align: left; }
tr.first td { font-weight: 600; }
tr.out td { color: var(--soft); }
td.left.why { white-space: normal; min-width: 260px; }
pre {
  margin: 0; padding: 10px 12px; overflow-x: auto; border-radius: 6px; background: var(--track); font-size: 12.5px;
  white-space: pre-wrap; word-break: break-word;
}
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-bottom: 10px; color: var(--soft); font-size: 12px; }
.legend .entry { display: inline-flex; align-items: center; gap: 6px; }
.legend i { width: 13px; height: 13px; border-radius: 3px; }
.bars {
  display: grid; grid-template-columns: minmax(120px, 34%) 1fr max-content; gap: 5px 12px; align-items: center;
}
.bars .row { display: contents; }
.bars .label { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-size: 12.5px; }
.bars .track { position: relative; display: flex; height: 18px; border-radius: 4px; background: var(--track); }
.bars .track > span:first-child { border-radius: 4px 0 0 4px; }
.bars .limit { position: absolute; top: -3px; bottom: -3px; width: 2px; margin-left: -1px; background: var(--accent); }
.bars .figure {
  min-width: 74px; text-align: right; white-space: nowrap; font-size: 12.5px; font-variant-numeric: tabular-nums;
}
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 18px; }
iframe { width: 100%; border: 0; }
ul { margin: 0; padding-left: 18px; }
"""


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
        if extras.command:
            body.append(_section("How to run it", f"<pre>{escape(extras.command)}</pre>"))
        for index, rival in enumerate(rivals(priced)):
            over = "the best of another kind" if index else "the runner-up"
            body.append(_section(f"Why it wins over {over}", sections.why(priced[0], rival)))
    else:
        why = escape(answer.why_none or "no strategy can run; below is why")
        body.append(_section("", f'<p class="winner">{why[:1].upper()}{why[1:]}</p>'))
    body.append(_section("Ranking", sections.ranking(answer, extras.rows)))
    if priced:
        body.append(_section("Where an iteration goes", sections.times(priced[:10])))
        body.append(_section("Memory of each pipeline rank", sections.memory(answer, priced[0])))
    if extras.panels:
        body.append(_section("Timeline", _timeline(extras)))
    if answer.counts is not None:
        body.append(_section("What was rejected", sections.rejections(answer)))
    notes = all_notes(answer)
    if notes:
        body.append(_section("Notes", f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"))
    return _document(f"{answer.workload.name} on {answer.cluster.name or 'the cluster'}", "\n".join(body))


def _section(title: str, content: str) -> str:
    return f"<section>{f'<h2>{escape(title)}</h2>' if title else ''}{content}</section>"


def _timeline(extras: Extras) -> str:
    """Return the timelines in a frame of their own: their page has scripts, styles and names of its own."""
    ranks = sum(panel.timeline.shape.num_ranks for panel in extras.panels)
    height = _HEAD_HEIGHT + _PANEL_HEIGHT * len(extras.panels) + _ROW_HEIGHT * ranks
    page = render_html(extras.panels, "predicted timeline")
    note = f'<p class="sub">{escape(extras.panels_note)}</p>' if extras.panels_note else ""
    return f'{note}<iframe title="timeline" style="height:{height}px" srcdoc="{escape(page, quote=True)}"></iframe>'


def _document(title: str, body: str) -> str:
    style = (files("deepspeed_ext.plan.render") / "page" / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
