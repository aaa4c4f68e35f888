"""What a run reports: one JSON object per iteration and per evaluation, and lines for people."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from statistics import fmean


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationMetrics:
    """One training iteration. The names are those of the metrics file."""

    iteration: int
    consumed_samples: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    iteration_time_s: float
    tokens_per_second: float

    def line(self, train_iters: int) -> str:
        """For the log."""
        return (
            f" iteration {self.iteration:8d}/{train_iters:8d} | consumed samples: {self.consumed_samples:12d} |"
            f" elapsed time per iteration (ms): {self.iteration_time_s * 1000:.1f} |"
            f" tokens per second: {self.tokens_per_second:.0f} |"
            f" learning rate: {self.learning_rate:.3E} | lm loss: {self.lm_loss:.6E} |"
            f" grad norm: {self.grad_norm:.3f} |"
        )


def mean_over_iterations(metrics: Sequence[IterationMetrics]) -> IterationMetrics:
    """Loss, time and throughput averaged over iterations, the rest from the last: what a line of the log says."""
    seconds = fmean(each.iteration_time_s for each in metrics)
    last = metrics[-1]
    return replace(
        last,
        lm_loss=fmean(each.lm_loss for each in metrics),
        iteration_time_s=seconds,
        tokens_per_second=last.tokens_per_second * last.iteration_time_s / seconds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMetrics:
    """One evaluation."""

    iteration: int
    validation_lm_loss: float

    def line(self, train_iters: int) -> str:
        """For the log."""
        return (
            f" validation loss at iteration {self.iteration} | lm loss value: {self.validation_lm_loss:.6E} |"
            f" lm loss PPL: {exp(min(20.0, self.validation_lm_loss)):.6E} |"
        )


class MetricsFile:
    """Appends metrics to a file, one JSON object a line; does nothing without a path.

    Args:
        path: the file, made with its directories.
    """

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, metrics: IterationMetrics | EvaluationMetrics) -> None:
        """Append, and hand to the operating system at once: a killed run loses no line."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(metrics)) + "\n")
