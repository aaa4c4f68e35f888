"""The report as one HTML page that needs nothing else: what wins, why, what it costs, what was rejected."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from deepspeed_ext.plan.draw.html import Panel
from megatron_terapipe.page.document import html_document, section, timelines
from megatron_terapipe.search.answer import sections
from megatron_terapipe.search.answer.answer import Answer, all_notes, rivals
from megatron_terapipe.search.answer.table import heading


@dataclass(frozen=True, kw_only=True)
class Extras:
    """The contents of a page beside the answer itself."""

    command: str = ""
    """What launches the winner; empty = it cannot be launched so."""
    panels: Sequence[Panel] = ()
    """Timelines, on one axis."""
    panels_note: str = ""
    """What of them is left out."""
    rows: int = 30
    """Strategies that the page lists."""


def render_page(answer: Answer, extras: Extras) -> str:
    """Return the report."""
    priced = answer.priced
    body = [
        f"<header><h1>{escape(answer.workload.name)} on {escape(answer.cluster.name or 'the cluster')}</h1></header>"
    ]
    body.append(f'<p class="sub">{escape(heading(answer))}</p>')
    if priced:
        body.append(section("", sections.winner(answer, priced[0])))
        body += _notes(answer)
        if extras.command:
            body.append(section("How to run it", f"<pre>{escape(extras.command)}</pre>"))
        for index, rival in enumerate(rivals(priced)):
            over = "the best of another kind" if index else "the runner-up"
            body.append(section(f"Why it wins over {over}", sections.why(priced[0], rival)))
    else:
        why = escape(answer.why_none or "no strategy can run; below is why")
        body.append(section("", f'<p class="winner">{why[:1].upper()}{why[1:]}</p>'))
        body += _notes(answer)
    body.append(section("Ranking", sections.ranking(answer, extras.rows)))
    if priced:
        body.append(section("Where an iteration goes", sections.times(priced[:10])))
        body.append(section("Memory of each pipeline rank", sections.memory(answer, priced[0])))
    if extras.panels:
        body.append(section("Timeline", _predicted(extras), kind="timeline"))
    if answer.counts is not None:
        body.append(section("What was rejected", sections.rejections(answer)))
    return html_document(f"{answer.workload.name} on {answer.cluster.name or 'the cluster'}", "\n".join(body))


def _notes(answer: Answer) -> list[str]:
    """Return the section of the notes, which stand where they are read; empty if there are none."""
    listed = "".join(f"<li>{escape(note)}</li>" for note in all_notes(answer))
    return [section("Notes", f"<ul>{listed}</ul>")] if listed else []


def _predicted(extras: Extras) -> str:
    note = f'<p class="sub">{escape(extras.panels_note)}</p>' if extras.panels_note else ""
    return note + timelines(extras.panels, "predicted timeline")
