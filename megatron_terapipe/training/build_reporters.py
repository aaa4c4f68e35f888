"""The reporters of a run."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from megatron_terapipe.training.records.events import Event, Note
from megatron_terapipe.training.records.metrics import EvaluationMetrics, IterationMetrics
from megatron_terapipe.training.reporting.curves import TensorBoard, WeightsAndBiases
from megatron_terapipe.training.reporting.fresh_report import FreshReport
from megatron_terapipe.training.reporting.reporter import Reporter, Reporters
from megatron_terapipe.training.reporting.terminal import LogLines, ProgressBar
from megatron_terapipe.training.start.run import Run
from megatron_terapipe.training.start.run_start import run_start


class MetricsFile(Reporter):
    """Appends metrics and events to a file, one JSON object a line."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._iteration = 0

    def iteration(self, metrics: IterationMetrics) -> None:
        """Append an iteration."""
        self._iteration = metrics.iteration
        self._append(metrics)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Append an evaluation."""
        self._append(metrics)

    def note(self, line: str) -> None:
        """Append it as an event."""
        self.event(Note(iteration=self._iteration, text=line.strip()))

    def event(self, event: Event) -> None:
        """Append an event."""
        self._iteration = event.iteration
        self._append(event)

    def _append(self, line: IterationMetrics | EvaluationMetrics | Event) -> None:
        # Handed to the operating system at once: a killed run loses no line.
        with self._path.open("a") as file:
            file.write(json.dumps(line.as_json()) + "\n")


def build_reporters(run: Run, refresh_report: Callable[[], object]) -> Reporters:
    """Build what the run's configuration asks for, on the first rank alone.

    Loss and time are the same on every rank, so one speaks for all.

    Args:
        refresh_report: writes the report of what was trained so far.
    """
    if run.launch.rank != 0:
        return Reporters()
    logging = run.config.logging
    reporters: list[Reporter] = [
        ProgressBar(run.start.iteration, run.train_iters),
        LogLines(logging.log_interval, run.train_iters, logging.timing_log_option),
    ]
    if logging.metrics_file is not None:
        metrics_file = MetricsFile(logging.metrics_file)
        metrics_file.event(run_start(run))
        reporters.append(metrics_file)
    if logging.report is not None:
        reporters.append(FreshReport(refresh_report))  # After the file that it reads.
    if logging.tensorboard_dir is not None:
        reporters.append(TensorBoard(logging.tensorboard_dir, logging, run.launch.world_size))
    if logging.wandb_project is not None:
        reporters.append(WeightsAndBiases(logging, asdict(run.config), run.launch.world_size))
    return Reporters(reporters)
