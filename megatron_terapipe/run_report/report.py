"""The contents of a report: runs, figures, comparisons, and what is missing; the same as JSON with its schema."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.run_report.comparison import (
    Kept,
    MeasuredSteps,
    Promise,
    answer_beside,
    directory_of,
    kept,
    read_promise,
)
from megatron_terapipe.run_report.figures import Figures, Incident, Spread, figures_of, incidents
from megatron_terapipe.run_report.metrics_file import TrainingRun, read_runs
from megatron_terapipe.search.answer.json_schema import Part


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """All that is known of one run."""

    run: TrainingRun
    """The run."""
    figures: Figures
    """At a glance."""
    incidents: Sequence[Incident]
    """In the order of iterations."""
    steps: MeasuredSteps | None
    """Its measured timeline; None if there is none."""
    promise: Promise | None
    """What the search predicted of it; None if there is no answer."""
    kept: Sequence[Kept]
    """What came beside that."""
    missing: Sequence[str]
    """What is not known, and how to record it next time, a line each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Files of a report."""

    runs: Sequence[str]
    """Metrics files, or directories with one."""
    join: bool = False
    """Whether they are pieces of one run."""
    search: str | None = None
    """Answer of the search, or its directory; None = where the run says."""
    timeline: str | None = None
    """Measured timeline; None = where the run says."""


def read_report(sources: Sources) -> list[RunReport]:
    """Return the reports of some runs.

    Raises:
        UserError: if a file that is named cannot be read.
    """
    return [_report_of(run, sources) for run in read_runs(sources.runs, join=sources.join)]


def _report_of(run: TrainingRun, sources: Sources) -> RunReport:
    figures = figures_of(run)
    problems = list(run.faults)
    steps = _steps(run, sources, problems)
    promise = _promise(run, sources, problems)
    return RunReport(
        run=run,
        figures=figures,
        incidents=incidents(run),
        steps=steps,
        promise=promise,
        kept=[] if promise is None else kept(promise, figures, steps, run.start),
        missing=[*problems, *_missing(run, figures, steps, promise)],
    )


def _steps(run: TrainingRun, sources: Sources, problems: list[str]) -> MeasuredSteps | None:
    if sources.timeline is not None:
        return MeasuredSteps(Path(sources.timeline))
    path = directory_of(run.start)
    if path is None:
        return None
    try:
        return MeasuredSteps(path)
    except UserError as error:  # Nobody has asked for it by name.
        problems.append(f"the measured timeline is left out: {error}")
        return None


def _promise(run: TrainingRun, sources: Sources, problems: list[str]) -> Promise | None:
    if sources.search is not None:
        return read_promise(Path(sources.search), run.start)
    path = answer_beside(run.start)
    if path is None:
        return None
    try:
        return read_promise(path, run.start)
    except UserError as error:
        problems.append(f"what the search promised is left out: {error}")
        return None


def _missing(run: TrainingRun, figures: Figures, steps: MeasuredSteps | None, promise: Promise | None) -> Iterator[str]:
    if run.start is None:
        yield "the metrics file does not say what was trained: a run of this version writes it with --metrics-file"
    if promise is None:
        yield (
            "nothing is held against a prediction: train with launch.sh of `search rank --output DIR`, or name its "
            "answer with --search DIR"
        )
    if steps is None:
        yield "where an iteration goes is not known: train with --timeline DIR"
    if not run.evaluations():
        yield "there is no validation loss: train with --eval-interval and data for validation (--split)"
    if figures.mfu is None:
        yield "MFU is not known, because the device's peak is not: train with --peak-tflops-per-device"
    if not figures.peak_memory_bytes:
        yield "memory was not measured: a run of 2 iterations or more measures it"


SCHEMA_VERSION: Final = 1
"""Version of the document. A key that goes away, or means something else, makes another; a new key does not."""


class SpreadPart(Part):
    """Some measurements."""

    median: float
    """The middle one."""
    low: float
    """A twentieth of them are below."""
    high: float
    """A twentieth of them are above."""


class IncidentPart(Part):
    """Something that happened."""

    kind: str
    """What it is, such as `restart`, `skipped update`, `spike`, `slow iteration` or `save`."""
    first: int
    """Its iteration, or the first of several."""
    last: int
    """The last of them."""
    text: str
    """What is to be said of it."""


class KeptPart(Part):
    """A figure that was promised, and what came."""

    name: str
    """Name of the figure."""
    unit: Literal["s", "bytes", "tokens/s", "share"]
    """Unit of both."""
    promised: float
    """What was predicted."""
    came: float
    """What was measured."""
    difference: float
    """What came relative to what was promised, less 1; of shares, the points between them."""
    why: str
    """The cause of the difference, as far as it is known; empty = unknown."""


class RunPart(Part):
    """A run."""

    name: str
    """Name in the report."""
    metrics_file: str
    """File that it was read from."""
    model: str | None
    """Name of the model; null = the file does not say."""
    parameters: int | None
    """Parameters; null = the file does not say."""
    strategy: dict[str, Any] | None
    """Strategy, as `--strategy` reads it; null = the file does not say."""
    iterations: int
    """Iterations done, each counted once."""
    planned: int | None
    """The last iteration that was planned; null = the file does not say."""
    tokens: int | None
    """Tokens trained on; null = the length of sequences is not known."""
    loss: float | None
    """Mean training loss of the last ten iterations; null if they are no numbers."""
    validation_loss: float | None
    """Of the last evaluation; null if there was none."""
    iteration_time_s: SpreadPart
    """Seconds of an iteration."""
    tokens_per_s: SpreadPart
    """Tokens trained on in a second."""
    tflops_per_device: float
    """Model FLOPs in a second and device, in 10^12."""
    mfu: float | None
    """Share of the devices' peak, in [0, 1]; null where that is unknown."""
    bubble_ratio: float | None
    """Measured bubble ratio, in [0, 1); null without a timeline."""
    peak_memory_bytes: list[int]
    """Most that a rank of each stage held; empty if it was not measured."""
    skipped: int
    """Iterations whose update was skipped."""
    repeated: int
    """Iterations that were done again after a restart."""
    starts: int
    """Times that the run was started."""
    in_iterations_s: float
    """Seconds in iterations."""
    wall_s: float | None
    """Seconds from the first start to the last event; null = the file does not say."""
    end: str | None
    """How it ended; empty = the last iteration was reached; null = no end was recorded."""
    failed: bool
    """Whether it ended because something was wrong."""
    kept: list[KeptPart]
    """What the search promised, beside what came; empty = there is no answer of it."""
    incidents: list[IncidentPart]
    """What happened, in the order of iterations."""
    missing: list[str]
    """What is not known, and how to record it next time."""


class ReportDocument(Part):
    """The report of some runs."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of this document."""
    command: Literal["report"] = "report"
    """Command that wrote it."""
    runs: list[RunPart]
    """The runs, in the order in which they were named."""


def report_document(reports: list[RunReport]) -> ReportDocument:
    """Return the document of some reports."""
    return ReportDocument(runs=[_run_part(each) for each in reports])


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the document."""
    schema = TypeAdapter(ReportDocument).json_schema(mode="serialization")
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Report of training runs"}
    return {**about, **schema}


def _run_part(report: RunReport) -> RunPart:
    run, figures, start = report.run, report.figures, report.run.start
    return RunPart(
        name=run.name,
        metrics_file=str(run.path),
        model=None if start is None else start.model_name,
        parameters=None if start is None else start.parameters,
        strategy=None if start is None or start.strategy is None else dict(start.strategy),
        iterations=figures.iterations,
        planned=figures.planned,
        tokens=figures.tokens,
        loss=figures.loss,
        validation_loss=figures.validation_loss,
        iteration_time_s=_spread(figures.iteration_time_s),
        tokens_per_s=_spread(figures.tokens_per_s),
        tflops_per_device=figures.tflops_per_device,
        mfu=figures.mfu,
        bubble_ratio=None if report.steps is None else report.steps.measured,
        peak_memory_bytes=list(figures.peak_memory_bytes),
        skipped=figures.skipped,
        repeated=figures.repeated,
        starts=figures.starts,
        in_iterations_s=figures.in_iterations_s,
        wall_s=figures.wall_s,
        end=None if run.end is None else run.end.reason,
        failed=run.end is not None and run.end.failed,
        kept=[
            KeptPart(
                name=each.name,
                unit=each.unit,
                promised=each.promised,
                came=each.came,
                difference=each.difference,
                why=each.why,
            )
            for each in report.kept
        ],
        incidents=[
            IncidentPart(kind=each.kind, first=each.first, last=each.last, text=each.text) for each in report.incidents
        ],
        missing=list(report.missing),
    )


def _spread(spread: Spread) -> SpreadPart:
    return SpreadPart(median=spread.median, low=spread.low, high=spread.high)
