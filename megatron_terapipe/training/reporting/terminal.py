"""The log, in Megatron's words and order, so that what reads its logs reads ours; and a progress bar."""

import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from math import isfinite
from statistics import fmean

from tqdm import tqdm

from megatron_terapipe.config.files.logging import TimingOption
from megatron_terapipe.training.records.metrics import EvaluationMetrics, IterationMetrics
from megatron_terapipe.training.reporting.reporter import Reporter


class LogLines(Reporter):
    """Prints a line every `interval` iterations, one after the first, and all that is not an iteration at once.

    Args:
        train_iters: the last iteration of the run.
    """

    def __init__(self, interval: int, train_iters: int, timing_option: TimingOption = "minmax") -> None:
        self._interval, self._train_iters, self._timing_option = interval, train_iters, timing_option
        self._since_last_line: list[IterationMetrics] = []
        self._any_line = False

    def iteration(self, metrics: IterationMetrics) -> None:
        """Print a line if one is due."""
        self._since_last_line.append(metrics)
        if metrics.iteration % self._interval == 0 or not self._any_line:
            self.note(iteration_line(self._since_last_line, self._train_iters))
            if metrics.timers is not None:
                self.note("\n".join(timer_lines(self._since_last_line, self._timing_option)))
            self._since_last_line.clear()
            self._any_line = True

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Print a line."""
        self.note(evaluation_line(metrics))

    def note(self, line: str) -> None:
        """Print it, above the progress bar if there is one."""
        tqdm.write(line)
        sys.stdout.flush()


def iteration_line(metrics: Sequence[IterationMetrics], train_iters: int) -> str:
    """Say how a few iterations went: means of loss and times, sums of what went wrong, the rest from the last.

    Args:
        metrics: numbers of the iterations since the last line.
        train_iters: the last iteration of the run.
    """
    last = metrics[-1]
    seconds = fmean(each.iteration_time_s for each in metrics)
    # The share of the whole time, because iterations on a batch-size ramp differ.
    tflops = fmean(each.tflops_per_device * each.iteration_time_s for each in metrics) / seconds
    tokens = fmean(each.tokens_per_second * each.iteration_time_s for each in metrics) / seconds
    losses = [each.lm_loss for each in metrics if not each.skipped and isfinite(each.lm_loss)]
    parts = [
        f" iteration {last.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {_tenths(tflops)}",
        f"learning rate: {last.learning_rate:.6E}",
    ]
    if last.decoupled_learning_rate is not None:
        parts.append(f"decoupled learning rate: {last.decoupled_learning_rate:.6E}")
    parts.append(f"global batch size: {last.global_batch_size:5d}")
    if losses:
        parts.append(f"lm loss: {fmean(losses):.6E}")
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
    if last.mfu is not None:
        parts.append(f"MFU: {last.mfu * tflops / last.tflops_per_device:.1%}")
    # The first iteration takes longer than those that follow.
    if last.iteration < train_iters and len(metrics) > 1:
        parts.append(f"time left: {timedelta(seconds=round(seconds * (train_iters - last.iteration)))}")
    return " | ".join(parts) + " |"


def timer_lines(metrics: Sequence[IterationMetrics], option: TimingOption) -> list[str]:
    """Say how long ranks were in each phase of an iteration, as means over a few iterations.

    Args:
        metrics: numbers of the iterations since the last line.
    """
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
    """One digit after the point, as in Megatron, or the first two digits of what a CPU does."""
    return f"{number:.1f}" if number >= 1 else f"{number:.1e}"


def evaluation_line(metrics: EvaluationMetrics) -> str:
    """Say how an evaluation went."""
    where = " on test set" if metrics.part == "test" else ""
    return (
        f" validation loss at iteration {metrics.iteration}{where} | lm loss value: {metrics.lm_loss:.6E} |"
        f" lm loss PPL: {metrics.perplexity:.6E} |"
    )


class ProgressBar(Reporter):
    """Moves on with every iteration; shows nothing where standard error is no terminal.

    Args:
        train_iters: the last iteration of the run.
    """

    def __init__(self, done: int, train_iters: int) -> None:
        # Only threads of this process write. tqdm's own lock is for several, and may leave a semaphore in /dev/shm.
        tqdm.set_lock(threading.RLock())
        self._bar = tqdm(total=train_iters, initial=done, unit="iteration", disable=not sys.stderr.isatty())

    def iteration(self, metrics: IterationMetrics) -> None:
        """Move on, and show the loss."""
        self._bar.set_postfix(loss=f"{metrics.lm_loss:.3f}", refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()
