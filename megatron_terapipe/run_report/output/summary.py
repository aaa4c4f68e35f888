"""The report on one screen of a terminal."""

from collections.abc import Iterator
from itertools import chain

from megatron_terapipe.run_report.incidents import told
from megatron_terapipe.run_report.output.words import end_text, glance, heading, strategy_line, title_of
from megatron_terapipe.run_report.report import RunReport

MOST_LISTED = 2
"""Incidents of a kind that are told one by one."""


def summary(reports: list[RunReport]) -> str:
    """Return the figures of some reports as text."""
    return "\n".join(chain([title_of(reports)], *(_of_run(each, len(reports) > 1) for each in reports)))


def _of_run(report: RunReport, named: bool) -> Iterator[str]:
    run = report.run
    if named:
        yield f"\n{run.name}"
    yield from (f"  {line}" for line in (heading(run.start), strategy_line(run.start)) if line)
    yield from (f"  {value:>12}  {name}" for value, name in glance(report))
    if report.kept:
        yield f"  {'':<18}{'promised':>12}{'came':>12}{'difference':>14}"
        for each in report.kept:
            figures = f"{each.text(each.promised):>12}{each.text(each.came):>12}{each.difference_text:>14}"
            yield f"  {each.name:<18}{figures}"
    if run.end is None or run.end.reason:
        yield f"  ended: {end_text(report)}"
    found = [each for each in report.incidents if each.kind not in ("save", "end")]
    yield from (f"  {kind}: {text}" for kind, text in told(found, MOST_LISTED))
    yield from (f"  note: {line}" for line in report.missing)
