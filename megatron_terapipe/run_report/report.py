"""The contents of a report, and its JSON document."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, TypeVar

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.records import ExpertLoads, RunStart, latest_loads
from megatron_terapipe.run_report.comparison import (
    ANSWER_FILE,
    ComparedFigure,
    MeasuredSteps,
    Prediction,
    compared_figures,
    read_prediction,
)
from megatron_terapipe.run_report.figures import NO_END, Figures, Incident, figures_of, incidents, listed, strategy_line
from megatron_terapipe.run_report.metrics_file import Part, TrainingRun, read_runs
from megatron_terapipe.texts import bytes_text, count_text, time_text

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The report of one run."""

    run: TrainingRun
    figures: Figures
    incidents: Sequence[Incident]
    """In the order of time."""
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
    of_run = Path(start.directory)
    steps = prediction = None
    if timeline is not None:
        steps = MeasuredSteps.read(Path(timeline))
    elif start.timeline is not None and (path := of_run / start.timeline).is_dir():
        steps = _if_sound(lambda: MeasuredSteps.read(path), problems, "the measured timeline")
    if search is not None:
        prediction = read_prediction(Path(search), start)
    elif start.strategy_file is not None:
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
    if prediction is None:
        yield "no prediction: train with launch.sh of `search rank --output DIR`, or give its answer with --search DIR"
    if steps is None:
        yield "no parts of an iteration since the last start: train with --timeline DIR"
    if not run.evaluations():
        yield "no validation loss: train with --eval-interval and data for validation (--split)"
    if figures.tflops_per_device is None:
        yield "no FLOP/s and MFU, because the FLOPs of layers of a program's own are not known"
    elif figures.mfu is None:
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
    model: str
    """Name of the model."""
    parameters: int
    """Parameters."""
    strategy: dict[str, Any] | None
    """Strategy, as `--strategy` reads it; null = the search has none for these settings."""
    bubble_ratio: float | None
    """Measured bubble ratio, in [0, 1); null without a timeline."""
    end: str | None
    """How it ended; empty = the last iteration was reached; null = no end was recorded."""
    failed: bool
    """Whether it ended by a failure."""
    kept: tuple[ComparedFigure, ...]
    """Predicted and measured figures; empty = there is no answer of the search."""
    incidents: tuple[Incident, ...]
    """Incidents, in the order of time."""
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
        model=start.model_name,
        parameters=start.parameters,
        strategy=None if start.strategy is None else dict(start.strategy),
        **{name: getattr(report.figures, name) for name in Figures.__slots__},
        bubble_ratio=None if report.steps is None else report.steps.bubble_ratio,
        end=None if run.end is None else run.end.reason,
        failed=run.end is not None and run.end.failed,
        kept=tuple(report.compared),
        incidents=tuple(report.incidents),
        missing=tuple(report.missing),
        expert_loads=latest_loads(run.expert_loads()),
    )


def title_of(reports: Sequence[RunReport]) -> str:
    """Return the title of a report."""
    if len(reports) > 1:
        return f"{len(reports)} training runs"
    run = reports[0].run
    return f"{run.start.model_name}: training run {run.name}"


def heading(start: RunStart) -> str:
    """Return the model and the machine in one line."""
    machine = start.machine
    hosts = "" if machine.num_hosts == 1 else f" on {machine.num_hosts} hosts"
    return (
        f"{start.model_name}, {count_text(start.parameters)} parameters · {start.precision} · "
        f"{machine.num_devices} x {machine.device}{hosts}"
    )


def part_lines(run: TrainingRun) -> list[str]:
    """Return a line for each layout of a run; empty if it had one."""

    def line(part: Part) -> str:
        first, last = part.iterations[0].iteration, part.iterations[-1].iteration
        seconds = median(each.iteration_time_s for each in part.steady)
        return f"iterations {first} to {last}: {strategy_line(part.start)}, {time_text(seconds)} an iteration"

    return [line(part) for part in run.parts] if len(run.parts) > 1 else []


def about(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the description of a run: names and texts."""
    run, start, figures = report.run, report.run.start, report.figures
    yield "strategy", strategy_line(start)
    yield "sequence", f"{start.model.get('seq_length')} tokens"
    yield "started", _date(run.pieces[0].start.time)
    if figures.wall_s is not None:
        share = figures.in_iterations_s / figures.wall_s if figures.wall_s else 1.0
        yield "took", f"{duration_text(figures.wall_s)}, {share:.0%} of it in iterations"
    yield "ended", end_text(report)
    if figures.starts > 1:
        again = f", {figures.repeated} iterations repeated" if figures.repeated else ""
        yield "starts", f"{figures.starts}{again}"
    yield "host", start.machine.host
    yield "versions", ", ".join(f"{name} {number}" for name, number in start.versions.items())
    yield "metrics file", str(run.path)


def glance(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the main figures of a run: values and their names."""
    figures = report.figures
    if figures.loss is not None:
        yield f"{figures.loss:.4g}", "training loss at the end"
    if figures.validation_loss is not None and figures.best_validation_loss is not None:
        best, where = figures.best_validation_loss
        least = "" if best == figures.validation_loss else f", least {best:.4g} at iteration {where}"
        yield f"{figures.validation_loss:.4g}", f"validation loss{least}"
    predicted = None if report.prediction is None else report.prediction.predicted
    prediction = "" if predicted is None else f", predicted {time_text(predicted.iteration_time_s)}"
    spread = figures.iteration_time_s
    within = f"90 % within {time_text(spread.low)} to {time_text(spread.high)}"
    within += ", of the last layout" if len(report.run.parts) > 1 else ""
    yield time_text(spread.median), f"an iteration, {within}{prediction}"
    yield f"{figures.tokens_per_s.median:,.0f}", "tokens a second"
    for name, tflops in (("", figures.tflops_per_device), (", causal attention", figures.tflops_per_device_causal)):
        if tflops is not None:
            yield f"{tflops:.3g} T" if tflops >= 1 else f"{tflops * 1e3:.3g} G", f"model FLOP/s a device{name}"
    for name, share, expected in (
        ("MFU", figures.mfu, predicted and predicted.mfu),
        ("causal MFU", figures.mfu_causal, predicted and predicted.mfu_causal),
    ):
        if share is not None:
            yield f"{share:.1%}", name if expected is None else f"{name}, predicted {expected:.0%}"
    if report.steps is not None:
        prediction = "" if predicted is None else f", predicted {predicted.bubble_ratio:.1%}"
        number = len(report.steps.comparison.steps)
        of_steps = f", median of {number} steps" if number > 1 else ""
        yield f"{report.steps.bubble_ratio:.1%}", f"bubble ratio{of_steps}{prediction}"
    if figures.peak_memory_bytes:
        prediction = ""
        if predicted is not None and predicted.memory_per_rank:
            prediction = f", predicted {bytes_text(predicted.peak_memory_bytes)}"
        yield bytes_text(max(figures.peak_memory_bytes)), f"on the fullest rank{prediction}"
    planned = "" if figures.planned == figures.iterations else f" of {figures.planned:,} planned"
    tokens = "" if figures.tokens is None else f", {count_text(figures.tokens)} tokens"
    yield f"{figures.iterations:,}", f"iterations{planned}{tokens}"


def duration_text(seconds: float) -> str:
    """Return a duration as text: `12.3 s`, `5 min 2 s`, `3 h 5 min`, `2 d 4 h`."""
    if seconds < 60:
        return time_text(seconds)
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def end_text(report: RunReport) -> str:
    """Return the time and the reason of the end of a run."""
    end, figures = report.run.end, report.figures
    if end is None:
        return f"after iteration {figures.iterations}: {NO_END}"
    return f"{_date(end.time)}, {end.reason or 'the last iteration was reached'}"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


MOST_LISTED = 2
"""Most incidents of a kind with a line of their own."""


def summary(reports: Sequence[RunReport]) -> str:
    """Return the figures of some reports as text."""
    return "\n".join(chain([title_of(reports)], *(_of_run(each, len(reports) > 1) for each in reports)))


def _of_run(report: RunReport, named: bool) -> Iterator[str]:
    run = report.run
    if named:
        yield f"\n{run.name}"
    yield from (f"  {line}" for line in (heading(run.start), *(part_lines(run) or [strategy_line(run.start)])) if line)
    yield from (f"  {value:>12}  {name}" for value, name in glance(report))
    if report.compared:
        yield f"  {'':<18}{'predicted':>12}{'measured':>12}{'difference':>14}"
        for each in report.compared:
            figures = f"{each.text(each.promised):>12}{each.text(each.came):>12}{each.difference_text:>14}"
            yield f"  {each.name:<18}{figures}"
    if run.end is None or run.end.reason:
        yield f"  ended: {end_text(report)}"
    found = [each for each in report.incidents if each.kind not in ("save", "end")]
    yield from (f"  {kind}: {text}" for kind, text in listed(found, MOST_LISTED))
    yield from (f"  note: {line}" for line in report.missing)
