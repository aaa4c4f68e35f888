"""The section of reports and evaluations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_terapipe.config.options import check, option
from megatron_terapipe.errors import ConfigError

TimingOption = Literal["max", "minmax", "all"]
"""Ranks whose timers are reported."""


def read_iterations(text: str) -> tuple[range, ...]:
    """Return runs of iterations, in rising order, from numbers and runs of numbers with commas between them."""
    parts = [part.strip().partition("-") for part in text.split(",")]
    try:
        runs = sorted((int(first), int(last if dash else first) + 1) for first, dash, last in parts)
    except ValueError:
        runs = []
    if not runs or any(last <= first for first, last in runs):
        raise ConfigError(f"--timeline-iterations {text} is not a list of iterations: write it as 10 or 10,20 or 30-34")
    if runs[0][0] < 1:
        raise ConfigError(f"--timeline-iterations {text} has an iteration below 1: count from 1")
    return tuple(range(*run) for run in runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Logging and evaluation."""

    log_interval: int = option(10, least=1, most=10**9)
    """Iterations between lines of the log."""

    eval_interval: int = option(1000, least=1, most=10**9)
    """Iterations between evaluations on the validation data."""

    eval_iters: int = option(10, least=0, most=10**9)
    """Global batches of one evaluation. 0 = never evaluate."""

    metrics_file: str | None = option(None, metavar="FILE")
    """File to append one JSON object per iteration and evaluation to, and one for each event of the run."""

    report: str | None = option(None, metavar="FILE", needs=("metrics_file",))
    """Write the report of the run to this file, as `terapipe report` does: now and then while it trains, and when it
    ends, however it does. Needs `--metrics-file`."""

    tensorboard_dir: str | None = option(None, metavar="DIR")
    """Directory to write TensorBoard's files to. Needs the package `tensorboard`."""

    tensorboard_log_interval: int = option(1, least=1, most=10**9)
    """Iterations between points of TensorBoard's and Weights & Biases' curves."""

    tensorboard_queue_size: int = option(1000, least=1, most=10**9)
    """Points that TensorBoard buffers before it writes them."""

    log_timers_to_tensorboard: bool = False
    """Write the time per iteration and the throughput to TensorBoard, too."""

    log_batch_size_to_tensorboard: bool = False
    """Write the global batch size to TensorBoard, too."""

    log_validation_ppl_to_tensorboard: bool = False
    """Write the perplexity of evaluations to TensorBoard, too."""

    log_memory_to_tensorboard: bool = False
    """Write the peak memory of each stage to TensorBoard, too."""

    log_world_size_to_tensorboard: bool = False
    """Write the number of ranks to TensorBoard, too."""

    no_log_learning_rate_to_tensorboard: bool = option(False, aliases=("--no-log-learnig-rate-to-tensorboard",))
    """Do not write the learning rate to TensorBoard."""

    no_log_loss_scale_to_tensorboard: bool = False
    """Do not write the loss scale of fp16 to TensorBoard."""

    wandb_project: str | None = None
    """Project of Weights & Biases to report to, with the same curves as TensorBoard. Needs the package `wandb`."""

    wandb_exp_name: str | None = option(None, needs=("wandb_project",))
    """Name of the run in Weights & Biases."""

    wandb_save_dir: str | None = option(None, metavar="DIR", needs=("wandb_project",))
    """Directory in which Weights & Biases keeps its files. Default: the current directory."""

    log_params_norm: bool = False
    """Report the norm of all parameters."""

    log_num_zeros_in_grad: bool = False
    """Report how many numbers of the gradient are exactly zero, before clipping."""

    timing_log_level: Literal[0, 1, 2] = 0
    """Timers to report besides the time per iteration: 0 none; 1 timers of the phases of an iteration (ops with their
    transfers, sums of shared gradients, sums over replicas, update); 2 also the computing of forwards and of
    backwards."""

    timing_log_option: TimingOption = "minmax"
    """Ranks whose timers are reported: the slowest, the fastest and the slowest, or all."""

    profile: bool = False
    """Profile the iterations after `--profile-step-start`, with names for ops: for Nsight Systems, which is to be
    started with `--capture-range=cudaProfilerApi`, or with `--use-pytorch-profiler`."""

    profile_step_start: int = option(10, least=0, most=10**9)
    """Iterations done when a profile begins."""

    profile_step_end: int = option(12, least=0, most=10**9)
    """Iterations done when it ends."""

    profile_ranks: tuple[int, ...] = option((0,), least=0, most=10**9)
    """Ranks that are profiled."""

    use_pytorch_profiler: bool = option(False, needs=("profile", "tensorboard_dir"))
    """Profile with torch's profiler, also on CPUs. Each rank writes its trace to `--tensorboard-dir`."""

    peak_tflops_per_device: float | None = option(None, above=0, most=1e9)
    """Peak TFLOP/s of a device in the type of the training, for the model FLOPs utilization. Default: the peak in the
    device's data sheet, if the device is known."""

    timeline: str | None = option(None, metavar="DIR")
    """Directory for the executed timelines of a few iterations, with drawings. `terapipe plan --timeline
    DIR` compares them with a simulation. Default: none is written."""

    timeline_iterations: str | None = option(
        None, metavar="N,N-N,...", aliases=("--timeline-iteration",), needs=("timeline",)
    )
    """Iterations whose timelines are written, such as `10` or `10,20` or `30-34`. Default: the third to the fifth of
    this run, because the first ones are slower than the rest."""

    ledger_directory: str | None = option(None, metavar="DIR")
    """Directory in which every rank writes its completed ops and the rank that it waits for, if the run stalls for
    `--distributed-timeout-minutes`. Default: `stalled_pipeline` in `--save`, or in the current directory."""

    def __post_init__(self) -> None:
        check(self)
        self.measured_iterations(0, 1)
        if self.profile and not self.profiled_iterations:
            raise ConfigError(
                f"--profile-step-end {self.profile_step_end} is not above --profile-step-start "
                f"{self.profile_step_start}: give {self.profile_step_start + 1} or more"
            )

    @property
    def profiled_iterations(self) -> range:
        """Numbers, from 1, of the iterations to profile."""
        return range(self.profile_step_start + 1, self.profile_step_end + 1) if self.profile else range(0)

    def ledgers(self, save: str | None) -> Path:
        """Return the directory of ledgers."""
        return Path(self.ledger_directory or Path(save or ".") / "stalled_pipeline")

    def measured_iterations(self, start: int, last: int) -> tuple[range, ...]:
        """Return the iterations whose timelines are written, if there is a directory for them."""
        if self.timeline_iterations is not None:
            return read_iterations(self.timeline_iterations)
        # A run of one or two iterations has only slow ones.
        return (range(min(start + 3, last), min(start + 5, last) + 1),)
