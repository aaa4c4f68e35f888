"""The reporters of a run, and the first line of its metrics file: the start of the run."""

import os
import platform
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import cuda

from megatron_terapipe.config.flops import model_parameters
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.instruments import peak_tflops_here
from megatron_terapipe.training.records import IterationMetrics, Machine, RunStart
from megatron_terapipe.training.reporters import (
    LogLines,
    ProgressBar,
    Reporters,
    TensorBoard,
    WeightsAndBiases,
    write_metrics,
)
from megatron_terapipe.training.run import Run

PACKAGES = ("megatron-terapipe", "torch", "deepspeed", "numpy")


def run_start(run: Run) -> RunStart:
    """Return the first line of the metrics file."""
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
    except ConfigError:  # The search has no strategy for these settings.
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


def build_reporters(run: Run, refresh_report: Callable[[], object]) -> Reporters:
    """Return the reporters of the run on its first rank; `refresh_report` is called after each line of an iteration."""
    reporters = Reporters()
    if run.launch.rank != 0:
        return reporters
    logging, world_size = run.config.logging, run.launch.world_size
    bar = ProgressBar(run.start.iteration, run.train_iters)
    reporters.add("the progress bar", bar, bar.close)
    reporters.add("the log", LogLines(logging.log_interval, run.train_iters, logging.timing_log_option))
    if logging.metrics_file is not None:
        reporters.add(f"--metrics-file {logging.metrics_file}", write_metrics(logging.metrics_file))
        reporters(run_start(run))
        reporters.add("--report", lambda line: isinstance(line, IterationMetrics) and refresh_report())
    if logging.tensorboard_dir is not None:
        with reporters.writing(output := f"--tensorboard-dir {logging.tensorboard_dir}"):
            board = TensorBoard(logging.tensorboard_dir, logging, world_size)
            reporters.add(output, board, board.close)
    if logging.wandb_project is not None:
        with reporters.writing(output := f"--wandb-project {logging.wandb_project}"):
            project = WeightsAndBiases(logging, asdict(run.config), world_size)
            reporters.add(output, project, project.close)
    return reporters
