"""The contents of a report, and its JSON document."""

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
from megatron_terapipe.training.records import ExpertLoads, latest_loads

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The report of one run."""

    run: TrainingRun
    figures: Figures
    incidents: Sequence[Incident]
    """In the order of iterations."""
    steps: MeasuredSteps | None
    """Its measured steps; None if there are none."""
    prediction: Prediction | None
    """None if there is no answer of the search."""
    compared: Sequence[ComparedFigure]
    """Predicted and measured figures; empty without a prediction."""
    missing: Sequence[str]
    """Unknown figures, each with the flag that records it."""


def read_report(
    runs: Sequence[str], *, join: bool = False, search: str | None = None, timeline: str | None = None
) -> list[RunReport]:
    """Return the reports of some runs.

    Args:
        runs: metrics files, or directories with one.
        search: answer of the search, or its directory; None = in the directory of the strategy file of the run.
        timeline: measured timeline; None = in the directory that the run recorded.
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
            prediction = _if_sound(lambda: read_prediction(answer, start), problems, "the prediction of the search")
    return RunReport(
        run=run,
        figures=figures,
        incidents=incidents(run),
        steps=steps,
        prediction=prediction,
        compared=[] if prediction is None else list(compared_figures(prediction, figures, steps, start)),
        missing=[*problems, *_missing(run, figures, steps, prediction)],
    )


def _if_sound(read: Callable[[], T], problems: list[str], name: str) -> T | None:
    """Return the contents of a file that no flag names; None and a warning if it is damaged."""
    try:
        return read()
    except UserError as error:
        problems.append(f"{name} is skipped: {error}")
        return None


def _missing(
    run: TrainingRun, figures: Figures, steps: MeasuredSteps | None, prediction: Prediction | None
) -> Iterator[str]:
    if run.start is None:
        yield "no start of the run in the metrics file: a run of this version writes it with --metrics-file"
    if prediction is None:
        yield "no prediction: train with launch.sh of `search rank --output DIR`, or give its answer with --search DIR"
    if steps is None:
        yield "no parts of an iteration: train with --timeline DIR"
    if not run.evaluations():
        yield "no validation loss: train with --eval-interval and data for validation (--split)"
    if figures.mfu is None:
        yield "no MFU, because the device's peak is unknown: train with --peak-tflops-per-device"
    if not figures.peak_memory_bytes:
        yield "no memory: a run of 2 iterations or more measures it"


SCHEMA_VERSION: Final = 1
"""Version of the document: raised when a key is removed or changes its meaning, not for a new key."""


@dataclass(frozen=True, kw_only=True)
class RunDocument(Figures):
    """The report of one run, as JSON."""

    name: str
    """Name in the report."""
    metrics_file: str
    """Metrics file of the run."""
    model: str | None
    """Name of the model; null = not in the file."""
    parameters: int | None
    """Parameters; null = not in the file."""
    strategy: dict[str, Any] | None
    """Strategy, as `--strategy` reads it; null = not in the file."""
    bubble_ratio: float | None
    """Measured bubble ratio, in [0, 1); null without a timeline."""
    end: str | None
    """How it ended; empty = the last iteration was reached; null = no end was recorded."""
    failed: bool
    """Whether it ended by a failure."""
    kept: tuple[ComparedFigure, ...]
    """Predicted and measured figures; empty = there is no answer of the search."""
    incidents: tuple[Incident, ...]
    """Incidents, in the order of iterations."""
    missing: tuple[str, ...]
    """Unknown figures, each with the flag that records it."""
    expert_loads: ExpertLoads | None
    """Loads of experts over the last iterations; null without experts. The metrics file has them over time."""


@dataclass(frozen=True, kw_only=True)
class ReportDocument:
    """The report of some runs."""

    __pydantic_config__ = {"use_attribute_docstrings": True, "extra": "forbid"}  # noqa: RUF012 - of its JSON Schema

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of this document."""
    command: Literal["report"] = "report"
    """Command that wrote it."""
    runs: tuple[RunDocument, ...]
    """The runs, in the order of the command line."""


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
        expert_loads=latest_loads(run.expert_loads()),
    )
