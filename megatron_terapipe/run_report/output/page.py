"""The report as one HTML page that needs nothing else."""

from collections.abc import Iterator
from html import escape

from megatron_terapipe.page.chart import Chart, chart_figure, thinning_note
from megatron_terapipe.page.document import html_document, section
from megatron_terapipe.run_report.output import sections
from megatron_terapipe.run_report.output.curves import charts
from megatron_terapipe.run_report.output.words import heading, title_of
from megatron_terapipe.run_report.report import RunReport


def charts_of(reports: list[RunReport]) -> dict[str, Chart]:
    """Return the charts of some reports, by names for files."""
    return charts([each.run for each in reports], [each.promise for each in reports])


def render_report(reports: list[RunReport]) -> str:
    """Return the page of some reports."""
    title = title_of(reports)
    body = [f"<header><h1>{escape(title)}</h1></header>"]
    if len(reports) == 1:
        body.append(f'<p class="sub">{escape(heading(reports[0].run.start))}</p>')
        body.append(section("", sections.at_a_glance(reports[0])))
    else:
        body.append(section("Runs", sections.runs_table(reports)))
    body += _if_any("Not known", sections.missing(reports))
    drawn = charts_of(reports).values()
    note = thinning_note(drawn)
    figures = "".join(chart_figure(chart) for chart in drawn)
    said = f'<p class="sub">{escape(note)}</p>' if note else ""
    body.append(section("Curves over iterations", f'{said}<div class="charts">{figures}</div>'))
    for report in reports:
        name = f" ({report.run.name})" if len(reports) > 1 else ""
        body += _if_any(f"What the search promised, and what came{name}", sections.promised(report))
        body += _if_any(f"Where an iteration goes{name}", sections.times(report))
        body += _if_any(f"Memory of each stage{name}", sections.memory(report))
        body += _if_any(f"Timeline, measured and simulated{name}", sections.timeline(report), kind="timelines")
        body += _if_any(f"What happened{name}", sections.what_happened(report))
        body.append(section(f"The run{name}", sections.described(report)))
    return html_document(title, "\n".join(body))


def _if_any(title: str, content: str, *, kind: str = "") -> Iterator[str]:
    if content:
        yield section(title, content, kind=kind)
