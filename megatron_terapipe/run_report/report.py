"""The contents of a report: runs, their figures, and what can be held against them; and what is missing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.run_report.figures import Figures, figures_of
from megatron_terapipe.run_report.incidents import Incident, incidents
from megatron_terapipe.run_report.kept import Kept, kept
from megatron_terapipe.run_report.promise import Promise, answer_beside, read_promise
from megatron_terapipe.run_report.run import TrainingRun, read_runs
from megatron_terapipe.run_report.steps import MeasuredSteps, directory_of


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
