"""The reporters that the flags of a run ask for, with the metrics file and its first line, the start of the run."""

import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import cuda

from megatron_terapipe.config.flops import model_parameters
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.instruments import peak_tflops_here
from megatron_terapipe.training.records import EvaluationMetrics, Event, IterationMetrics, Machine, Note, RunStart
from megatron_terapipe.training.reporters import (
    LogLines,
    ProgressBar,
    Reporter,
    Reporters,
    TensorBoard,
    WeightsAndBiases,
)
from megatron_terapipe.training.run import Run

PACKAGES = ("megatron-terapipe", "torch", "deepspeed", "numpy")


def run_start(run: Run) -> RunStart:
    """Return what a run is at its start, as its first rank knows it."""
    config, launch = run.config, run.launch
    model, logging = config.model, config.logging
    return RunStart(
        iteration=run.start.iteration,
        train_iters=run.train_iters,
        command=shlex.join(sys.argv),
        directory=os.getcwd(),
        versions={"python": platform.python_version()} | _versions(),
        machine=Machine(
            host=socket.gethostname(),
            num_hosts=max(launch.world_size // launch.local_size, 1),
            num_devices=launch.world_size,
            device=_device_name(),
        ),
        model_name=model.model_preset or f"{model.num_layers}x{model.hidden_size}",
        parameters=model_parameters(model),
        model=asdict(model),
        precision=config.precision.dtype,
        strategy=_strategy(run),
        strategy_file=None if config.parallel.strategy == AUTO else config.parallel.strategy,
        timeline=logging.timeline,
        peak_tflops_per_device=logging.peak_tflops_per_device or peak_tflops_here(config.precision.dtype),
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        checkpoint=None if run.checkpoint is None else str(run.checkpoint[0]),
    )


def _strategy(run: Run) -> dict[str, Any] | None:
    try:
        return Strategy.of_config(run.config, run.layout.data_parallel_size).to_json()
    except ConfigError:  # A run is not less than it was because the search does not know its like.
        return None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout that is not installed
            continue
    return found


def _device_name() -> str:
    kind = str(get_accelerator().device_name())
    return cuda.get_device_name() if kind == "cuda" else kind


class MetricsFile(Reporter):
    """Appends metrics and events to a file, one JSON object a line; after each iteration its readers may be told."""

    def __init__(self, path: str, after_iteration: Callable[[], object] = lambda: None) -> None:
        self._path, self._after_iteration = Path(path), after_iteration
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._iteration = 0

    def iteration(self, metrics: IterationMetrics) -> None:
        """Append an iteration."""
        self._iteration = metrics.iteration
        self._append(metrics)
        self._after_iteration()

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
    """
    if run.launch.rank != 0:
        return Reporters()
    logging = run.config.logging
    reporters: list[Reporter] = [
        ProgressBar(run.start.iteration, run.train_iters),
        LogLines(logging.log_interval, run.train_iters, logging.timing_log_option),
    ]
    if logging.metrics_file is not None:
        metrics_file = MetricsFile(logging.metrics_file, refresh_report)
        metrics_file.event(run_start(run))
        reporters.append(metrics_file)
    if logging.tensorboard_dir is not None:
        reporters.append(TensorBoard(logging.tensorboard_dir, logging, run.launch.world_size))
    if logging.wandb_project is not None:
        reporters.append(WeightsAndBiases(logging, asdict(run.config), run.launch.world_size))
    return Reporters(reporters)
