"""The start of a run, as the metrics file keeps it."""

import os
import platform
import shlex
import socket
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import cuda

from megatron_terapipe.config.model.flops import model_parameters
from megatron_terapipe.config.parallel.parallel import AUTO
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.records.events import Machine, RunStart
from megatron_terapipe.training.records.throughput import peak_tflops_here
from megatron_terapipe.training.start.run import Run

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
