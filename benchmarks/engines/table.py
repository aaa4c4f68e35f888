"""Markdown of a measurement: a table for each number of micro-batches, and what it says."""

from collections.abc import Iterator, Sequence

from benchmarks.engines.findings import MEGABYTE, circumstances, findings, micro_batches
from benchmarks.engines.names import IN_ONE_THREAD, PIPELINE_ENGINE, PLAIN
from benchmarks.engines.results import Document, Measured, Run
from benchmarks.measuring.report import Section

COLUMNS = (
    "engine",
    "schedule",
    "median s",
    "least to most",
    "over one thread",
    "over PipelineEngine",
    "idle",
    "peak MB",
    "gradients",
)


def table(document: Document, run: Run) -> str:
    """Return the table of one number of micro-batches, with a heading."""
    tokens = f"{document.micro_batch_size} x {document.model['tokens']} tokens"
    section = Section(f"{micro_batches(run.num_micro_batches)} of {tokens}", COLUMNS)
    pipelines = [each for each in run.timed if each.engine != PLAIN]
    fastest = min(pipelines, key=lambda each: each.median_s, default=None)
    for each in run.engines:
        if each.seconds:
            section.add(*each.name, *_cells(each, run, document.num_ranks, bold=each is fastest))
        elif each.needs is not None:
            section.add(*each.name, f"needs {micro_batches(each.needs)}")
        else:
            section.add(*each.name, f"not timed: {each.problem}")
    return section.markdown()


def _cells(each: Measured, run: Run, num_ranks: int, *, bold: bool) -> Iterator[str]:
    mark = "**" if bold else ""
    yield f"{mark}{each.median_s:.3f}{mark}"
    yield f"{min(each.seconds):.3f} to {max(each.seconds):.3f}"
    for name in (IN_ONE_THREAD, PIPELINE_ENGINE):
        base = next((other for other in run.timed if other.name == name), None)
        yield "" if base is None else f"{mark}{base.median_s / each.median_s:.2f}{mark}"
    yield f"{each.idle_share(num_ranks):.0%}"
    yield " / ".join(f"{size / MEGABYTE:.0f}" for size in each.peak_bytes)
    yield f"{each.gradient_difference:.0e}" if each.gradient_difference else "the same"


def results_markdown(document: Document, picture: str) -> str:
    """Return all that the page says of a measurement.

    Args:
        picture: address of the picture, as the page links it.
    """
    parts = [f"![Seconds of a step of every engine]({picture})"]
    for run in document.runs:
        refused = [f"*{each.name}* refuses: {each.problem}" for each in run.engines if each.problem is not None]
        parts += [table(document, run), *_list([*findings(run), *refused])]
    return "\n\n".join([*parts, "### Circumstances", *_list(circumstances(document))])


def _list(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {line}" for line in lines)] if lines else []
