"""The contents of a report: runs, figures, comparisons, and what is missing; the same as JSON."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.run_report.comparison import (
    ANSWER_FILE,
    ComparedFigure,
    MeasuredSteps,
    Prediction,
    compared_figures,
    read_measured_steps,
    read_prediction,
)
from megatron_terapipe.run_report.figures import Figures, Incident, figures_of, incidents
from megatron_terapipe.run_report.metrics_file import TrainingRun, read_runs

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The report of one run."""

    run: TrainingRun
    figures: Figures
    incidents: Sequence[Incident]
    """In the order of iterations."""
    steps: MeasuredSteps | None
    """Its measured timeline; None if there is none."""
    prediction: Prediction | None
    """None if there is no answer of the search."""
    compared: Sequence[ComparedFigure]
    """Predicted and measured figures; empty without a prediction."""
    missing: Sequence[str]
    """What is not known, and how to record it next time, a line each."""


def read_report(
    runs: Sequence[str], *, join: bool = False, search: str | None = None, timeline: str | None = None
) -> list[RunReport]:
    """Return the reports of some runs.

    Args:
        runs: metrics files, or directories with one.
        search: answer of the search, or its directory; None = beside the strategy file of the run.
        timeline: measured timeline; None = in the directory that the run names.
    """
    return [_report_of(run, search, timeline) for run in read_runs(runs, join=join)]


def _report_of(run: TrainingRun, search: str | None, timeline: str | None) -> RunReport:
    figures, start, problems = figures_of(run), run.start, list(run.faults)
    of_run = Path("" if start is None else start.directory)
    steps = prediction = None
    if timeline is not None:
        steps = read_measured_steps(Path(timeline))
    elif start is not None and start.timeline is not None and (path := of_run / start.timeline).is_dir():
        steps = _if_sound(lambda: read_measured_steps(path), problems, "the measured timeline")
    if search is not None:
        prediction = read_prediction(Path(search), start)
    elif start is not None and start.strategy_file is not None:
        answer = (of_run / start.strategy_file).parent / ANSWER_FILE
        if answer.is_file():
            prediction = _if_sound(lambda: read_prediction(answer, start), problems, "what the search promised")
    return RunReport(
        run=run,
        figures=figures,
        incidents=incidents(run),
        steps=steps,
        prediction=prediction,
        compared=[] if prediction is None else list(compared_figures(prediction, figures, steps, start)),
        missing=[*problems, *_missing(run, figures, steps, prediction)],
    )


def _if_sound(read: Callable[[], T], problems: list[str], what: str) -> T | None:
    """Return the contents of a file that the user did not name; None and a line if it is damaged."""
    try:
        return read()
    except UserError as error:
        problems.append(f"{what} is left out: {error}")
        return None


def _missing(
    run: TrainingRun, figures: Figures, steps: MeasuredSteps | None, prediction: Prediction | None
) -> Iterator[str]:
    if run.start is None:
        yield "the metrics file does not say what was trained: a run of this version writes it with --metrics-file"
    if prediction is None:
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


@dataclass(frozen=True, kw_only=True)
class RunDocument(Figures):
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
    bubble_ratio: float | None
    """Measured bubble ratio, in [0, 1); null without a timeline."""
    end: str | None
    """How it ended; empty = the last iteration was reached; null = no end was recorded."""
    failed: bool
    """Whether it ended because something was wrong."""
    kept: tuple[ComparedFigure, ...]
    """What the search promised, beside what came; empty = there is no answer of it."""
    incidents: tuple[Incident, ...]
    """What happened, in the order of iterations."""
    missing: tuple[str, ...]
    """What is not known, and how to record it next time."""


@dataclass(frozen=True, kw_only=True)
class ReportDocument:
    """The report of some runs."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of this document."""
    command: Literal["report"] = "report"
    """Command that wrote it."""
    runs: tuple[RunDocument, ...]
    """The runs, in the order in which they were named."""


def report_document(reports: Sequence[RunReport]) -> dict[str, Any]:
    """Return the document of some reports."""
    return asdict(ReportDocument(runs=tuple(_run_document(each) for each in reports)))


def _run_document(report: RunReport) -> RunDocument:
    run, start = report.run, report.run.start
    return RunDocument(
        name=run.name,
        metrics_file=str(run.path),
        model=None if start is None else start.model_name,
        parameters=None if start is None else start.parameters,
        strategy=None if start is None or start.strategy is None else dict(start.strategy),
        **{name: getattr(report.figures, name) for name in Figures.__slots__},
        bubble_ratio=None if report.steps is None else report.steps.bubble_ratio,
        end=None if run.end is None else run.end.reason,
        failed=run.end is not None and run.end.failed,
        kept=tuple(report.compared),
        incidents=tuple(report.incidents),
        missing=tuple(report.missing),
    )
