"""Reporters of a run, and the first line for them: log, progress bar, metrics file, TensorBoard, and Weights & Biases.

A reporter is called with each line of the metrics file. The log has Megatron's words and order, so that programs that
read its logs can read ours; the curves have Megatron's names.
"""

import json
import os
import platform
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from errno import ENOSPC
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import cuda
from tqdm import tqdm

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.config.logging import TimingOption
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.errors import ConfigError, first_line
from megatron_terapipe.records import (
    EvaluationMetrics,
    ExpertLoads,
    IterationMetrics,
    Line,
    Machine,
    Note,
    Progress,
    RunStart,
    mtp_name,
)
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.run import Run

Reporter = Callable[[Line], object]


class Reporters:
    """The reporters of a run, which are called in their order. Ranks other than the first have none."""

    def __init__(self) -> None:
        self._reporters: list[tuple[str, Reporter]] = []
        self._closing = ExitStack()
        self._iteration = 0
        self._failed: set[str] = set()

    def add(self, output: str, reporter: Reporter, close: Callable[[], object] | None = None) -> None:
        """Add a reporter of an output, which warnings name; `close` is called after the last line."""
        self._reporters.append((output, reporter))
        if close is not None:
            self._closing.enter_context(self.writing(output))
            self._closing.callback(close)

    def __call__(self, line: Line) -> None:
        """Call all reporters with a line."""
        self._iteration = line.iteration
        for output, report in self._reporters:
            with self.writing(output):
                report(line)

    @contextmanager
    def writing(self, output: str) -> Iterator[None]:
        """Continue after an error of an output, such as a full disk; the first one is reported, each line tried."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if output not in self._failed:
                self._failed.add(output)
                reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
                self.note(f" warning: {output} could not be written ({reason}) and may lack lines: training continues")

    def note(self, text: str) -> None:
        """Report a line of the log."""
        self(Note(iteration=self._iteration, text=text))

    def close(self) -> None:
        """Close all reporters; there are no more lines."""
        self._closing.close()


class LogLines:
    """Prints a line every `interval` iterations, one after the first, and all other lines at once."""

    def __init__(self, interval: int, train_iters: int, timing_option: TimingOption = "minmax") -> None:
        self._interval, self._train_iters, self._timing_option = interval, train_iters, timing_option
        self._since_last_line: list[IterationMetrics] = []
        self._loads: ExpertLoads | None = None
        self._any_line = False

    def __call__(self, line: Line) -> None:
        """Print a line if one is due, above the progress bar if there is one."""
        match line:
            case IterationMetrics():
                self._since_last_line.append(line)
                if line.iteration % self._interval == 0 or not self._any_line:
                    self._print_iterations()
            case ExpertLoads():
                self._loads = line
            case EvaluationMetrics():
                _print(evaluation_line(line))
            case Note():
                _print(line.text)

    def _print_iterations(self) -> None:
        _print(iteration_line(self._since_last_line, self._train_iters, self._loads))
        if self._since_last_line[-1].timers is not None:
            _print("\n".join(timer_lines(self._since_last_line, self._timing_option)))
        self._since_last_line.clear()
        self._any_line = True


def _print(text: str) -> None:
    tqdm.write(text)
    sys.stdout.flush()


def iteration_line(metrics: Sequence[IterationMetrics], train_iters: int, loads: ExpertLoads | None = None) -> str:
    """Return the line of a few iterations: means of loss and times, numbers of faults, the rest of the last one."""
    last = metrics[-1]
    seconds = fmean(each.iteration_time_s for each in metrics)
    # Means over time, because iterations on a batch-size ramp differ.
    tokens = fmean(each.tokens_per_second * each.iteration_time_s for each in metrics) / seconds
    tflops = fmean((each.tflops_per_device or 0.0) * each.iteration_time_s for each in metrics) / seconds
    over_last = tflops / (last.tflops_per_device or 1.0)
    losses = [each.lm_loss for each in metrics if not each.skipped and isfinite(each.lm_loss)]
    parts = [
        f" iteration {last.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
        *([f"throughput per GPU (TFLOP/s/GPU): {_tenths(tflops)}"] if last.tflops_per_device is not None else []),
        f"learning rate: {last.learning_rate:.6E}",
    ]
    if last.decoupled_learning_rate is not None:
        parts.append(f"decoupled learning rate: {last.decoupled_learning_rate:.6E}")
    parts.append(f"global batch size: {last.global_batch_size:5d}")
    if losses:
        parts.append(f"lm loss: {fmean(losses):.6E}")
        further = zip(
            *(each.mtp_losses for each in metrics if not each.skipped and isfinite(each.lm_loss)), strict=True
        )
        parts += [f"{mtp_name(depth)}: {fmean(of_depth):.6E}" for depth, of_depth in enumerate(further, 1)]
    if loads is not None:
        parts += [f"{name}: {loss:.6E}" for name, loss in loads.losses.items()]
        parts.append(f"max/mean expert load: {loads.busiest:.2f}")
    parts.append(f"loss scale: {1.0 if last.loss_scale is None else last.loss_scale:.1f}")
    if last.grad_norm is not None:
        parts.append(f"grad norm: {last.grad_norm:.3f}")
    if last.num_zeros_in_grad is not None:
        parts.append(f"num zeros: {last.num_zeros_in_grad}")
    if last.params_norm is not None:
        parts.append(f"params norm: {last.params_norm:.3f}")
    parts += [
        f"number of skipped iterations: {sum(each.skipped for each in metrics):3d}",
        f"number of nan iterations: {sum(not isfinite(each.lm_loss) for each in metrics):3d}",
        f"tokens per second: {tokens:.0f}",
    ]
    if last.tflops_per_device_causal is not None:
        parts.append(f"causal TFLOP/s/GPU: {_tenths(last.tflops_per_device_causal * over_last)}")
    if last.mfu is not None:
        parts.append(f"MFU: {last.mfu * over_last:.1%}")
    if last.mfu_causal is not None:
        parts.append(f"causal MFU: {last.mfu_causal * over_last:.1%}")
    # The first iteration takes longer than the others.
    if last.iteration < train_iters and len(metrics) > 1:
        parts.append(f"time left: {timedelta(seconds=round(seconds * (train_iters - last.iteration)))}")
    return " | ".join(parts) + " |"


def timer_lines(metrics: Sequence[IterationMetrics], option: TimingOption) -> list[str]:
    """Return the lines of the times of ranks in each phase of an iteration, as means over a few iterations."""
    measured = [each.timers for each in metrics if each.timers is not None]
    heads = {"max": "max time across ranks (ms):", "minmax": "(min, max) time across ranks (ms):"}
    lines = [heads.get(option, "times across ranks (ms):")]
    for name in measured[0]:
        times = [1000 * fmean(of_rank) for of_rank in zip(*(each[name] for each in measured), strict=True)]
        if option == "all":
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {time:.2f}" for rank, time in enumerate(times))]
        else:
            figures = ", ".join(f"{time:.2f}" for time in times)
            lines.append(f"    {name + ' ':.<48}: " + (f"({figures})" if option == "minmax" else figures))
    return lines


def _tenths(number: float) -> str:
    """Return a number with one decimal, as in Megatron, or the two significant digits of a small one."""
    return f"{number:.1f}" if number >= 1 else f"{number:.1e}"


def evaluation_line(metrics: EvaluationMetrics) -> str:
    """Return the line of an evaluation."""
    where = " on test set" if metrics.part == "test" else ""
    further = (f" {mtp_name(depth)}: {loss:.6E} |" for depth, loss in enumerate(metrics.mtp_losses, 1))
    return (
        f" validation loss at iteration {metrics.iteration}{where} | lm loss value: {metrics.lm_loss:.6E} |"
        f" lm loss PPL: {metrics.perplexity:.6E} |{''.join(further)}"
    )


class ProgressBar:
    """A bar on standard error with the loss; nothing where that is not a terminal."""

    def __init__(self, done: int, train_iters: int) -> None:
        # Only threads of this process write. tqdm's own lock is for several, and may leave a semaphore in /dev/shm.
        tqdm.set_lock(threading.RLock())
        self._bar = tqdm(total=train_iters, initial=done, unit="iteration", disable=not sys.stderr.isatty())
        self.close = self._bar.close

    def __call__(self, line: Line) -> None:
        """Advance the bar by an iteration."""
        if isinstance(line, IterationMetrics):
            self._bar.set_postfix(loss=f"{line.lm_loss:.3f}", refresh=False)
            self._bar.update()


def points_of(line: Line, logging: LoggingConfig, world_size: int) -> dict[str, float]:
    """Return the points of a line, by the name of their curve; empty if none are due."""
    if isinstance(line, EvaluationMetrics):
        perplexity = {f"lm loss {line.part} ppl": line.perplexity} if logging.log_validation_ppl_to_tensorboard else {}
        return {f"lm loss {line.part}": line.lm_loss} | perplexity
    if not isinstance(line, IterationMetrics) or line.iteration % logging.tensorboard_log_interval:
        return {}
    points: dict[str, float | None] = {"lm loss": line.lm_loss, "grad-norm": line.grad_norm}
    points |= {mtp_name(depth): loss for depth, loss in enumerate(line.mtp_losses, 1)}
    points |= {"params-norm": line.params_norm, "num-zeros": line.num_zeros_in_grad}
    if not logging.no_log_learning_rate_to_tensorboard:
        points |= {"learning-rate": line.learning_rate, "decoupled-learning-rate": line.decoupled_learning_rate}
    if not logging.no_log_loss_scale_to_tensorboard:
        points["loss-scale"] = line.loss_scale
    if logging.log_batch_size_to_tensorboard:
        points["batch-size"] = line.global_batch_size
    if logging.log_world_size_to_tensorboard:
        points["world-size"] = world_size
    if logging.log_timers_to_tensorboard:
        points |= {"iteration-time": line.iteration_time_s, "tokens-per-second": line.tokens_per_second}
        points |= {"throughput": line.tflops_per_device, "throughput-causal": line.tflops_per_device_causal}
        points |= {"mfu": line.mfu, "mfu-causal": line.mfu_causal}
        points |= {f"{name}-time": max(seconds) for name, seconds in (line.timers or {}).items()}
    if logging.log_memory_to_tensorboard:
        peaks = enumerate(line.peak_memory_bytes or ())
        points |= {f"mem-max-allocated-bytes stage {stage}": peak for stage, peak in peaks}
    return {name: value for name, value in points.items() if value is not None}


class TensorBoard:
    """Writes each curve over iterations, and again over samples, which compares runs of different batch sizes.

    A run that is resumed replaces the points after its start. TensorBoard drops points of all curves in a folder with a
    larger step, so curves over samples have a folder of their own.
    """

    def __init__(self, directory: str, logging: LoggingConfig, world_size: int, start: Progress) -> None:
        # Imported here: the package is optional, and slow to import.
        from torch.utils.tensorboard import SummaryWriter

        shown = threading.excepthook
        # Its thread keeps its error, which the next call raises.
        threading.excepthook = lambda failed: "tensorboard" in type(failed.thread).__module__ or shown(failed)
        steps = {"": start.iteration, "samples": start.consumed_samples}
        self._writers = [
            SummaryWriter(
                str(Path(directory, folder)),
                purge_step=step + 1 if start.iteration else None,
                max_queue=logging.tensorboard_queue_size,
            )
            for folder, step in steps.items()
        ]
        self._logging, self._world_size = logging, world_size

    def __call__(self, line: Line) -> None:
        """Write the points of a line."""
        if not isinstance(line, IterationMetrics | EvaluationMetrics):
            return
        for name, value in points_of(line, self._logging, self._world_size).items():
            self._writers[0].add_scalar(name, value, line.iteration)
            self._writers[1].add_scalar(f"{name} vs samples", value, line.consumed_samples)

    def close(self) -> None:
        """Write the last points."""
        for writer in self._writers:
            writer.close()


class WeightsAndBiases:
    """Reports a run to a project."""

    def __init__(self, logging: LoggingConfig, settings: dict[str, Any], world_size: int) -> None:
        # Imported here: the package is optional, and slow to import.
        self._wandb = wandb = import_module("wandb")
        try:
            self._run = wandb.init(
                project=logging.wandb_project, name=logging.wandb_exp_name, dir=logging.wandb_save_dir, config=settings
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"--wandb-project {logging.wandb_project} cannot be reported to ({reason}): log in, or set "
                "WANDB_MODE=offline"
            ) from error
        self._logging, self._world_size = logging, world_size

    def __call__(self, line: Line) -> None:
        """Send the points of a line."""
        if points := points_of(line, self._logging, self._world_size):
            if isinstance(line, IterationMetrics):
                points["samples"] = line.consumed_samples
            self._run.log(points, step=line.iteration)

    def close(self) -> None:
        """Send the remaining points, and wait until the process of W&B that writes the files has ended."""
        self._run.finish()
        self._wandb.teardown()


def write_metrics(path: str) -> Reporter:
    """Return the reporter that appends each line to a file, or nothing of it if the disk is full."""

    def append(line: Line) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        text = f"{json.dumps(line.as_json())}\n".encode()
        # Unbuffered, so that a killed run loses no line.
        with Path(path).open("ab", buffering=0) as file:
            written = file.write(text)
            if written < len(text):
                file.truncate(file.tell() - written)
                raise OSError(ENOSPC, os.strerror(ENOSPC))

    return append


PACKAGES = ("megatron-terapipe", "torch", "deepspeed", "numpy")


def run_start(run: Run, parameters: int) -> RunStart:
    """Return the first line of the metrics file, with the number of parameters."""
    config, launch, kind = run.config, run.launch, str(get_accelerator().device_name())
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
            device=cuda.get_device_name() if kind == "cuda" else kind,
        ),
        model_name=model.model_preset or f"{model.num_layers}x{model.hidden_size}"
        if run.trained.is_gpt
        else Path(run.trained.program).stem,
        parameters=parameters,
        model=asdict(model),
        precision=config.precision.dtype,
        strategy=_strategy(run),
        strategy_file=None if config.parallel.strategy == AUTO else config.parallel.strategy,
        timeline=logging.timeline,
        peak_tflops_per_device=run.peak_tflops,
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


def build_reporters(run: Run, parameters: int, refresh_report: Callable[[], object]) -> Reporters:
    """Return the reporters of the run on its first rank."""
    reporters = Reporters()
    if run.launch.rank != 0:
        return reporters
    logging, world_size = run.config.logging, run.launch.world_size
    bar = ProgressBar(run.start.iteration, run.train_iters)
    reporters.add("the progress bar", bar, bar.close)
    reporters.add("the log", LogLines(logging.log_interval, run.train_iters, logging.timing_log_option))
    if logging.metrics_file is not None:
        reporters.add(f"--metrics-file {logging.metrics_file}", write_metrics(logging.metrics_file))
        reporters(run_start(run, parameters))
        reporters.add("--report", lambda line: isinstance(line, IterationMetrics) and refresh_report())
    if logging.tensorboard_dir is not None:
        with reporters.writing(output := f"--tensorboard-dir {logging.tensorboard_dir}"):
            board = TensorBoard(logging.tensorboard_dir, logging, world_size, run.start)
            reporters.add(output, board, board.close)
    if logging.wandb_project is not None:
        with reporters.writing(output := f"--wandb-project {logging.wandb_project}"):
            settings = asdict(replace(run.config, measured=None)) | {"own": vars(run.config.own)}
            project = WeightsAndBiases(logging, settings, world_size)
            reporters.add(output, project, project.close)
    return reporters
