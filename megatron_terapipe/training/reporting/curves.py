"""Curves in TensorBoard and Weights & Biases, under Megatron's names."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.errors import ConfigError, not_installed
from megatron_terapipe.training.records.metrics import EvaluationMetrics, IterationMetrics
from megatron_terapipe.training.reporting.reporter import Reporter


def iteration_points(metrics: IterationMetrics, logging: LoggingConfig, world_size: int) -> dict[str, float]:
    """Return the points of one iteration, by the name of their curve."""
    points: dict[str, float | None] = {"lm loss": metrics.lm_loss, "grad-norm": metrics.grad_norm}
    points["params-norm"] = metrics.params_norm
    points["num-zeros"] = metrics.num_zeros_in_grad
    if not logging.no_log_learning_rate_to_tensorboard:
        points["learning-rate"] = metrics.learning_rate
        points["decoupled-learning-rate"] = metrics.decoupled_learning_rate
    if not logging.no_log_loss_scale_to_tensorboard:
        points["loss-scale"] = metrics.loss_scale
    if logging.log_batch_size_to_tensorboard:
        points["batch-size"] = metrics.global_batch_size
    if logging.log_world_size_to_tensorboard:
        points["world-size"] = world_size
    if logging.log_timers_to_tensorboard:
        points["iteration-time"] = metrics.iteration_time_s
        points["tokens-per-second"] = metrics.tokens_per_second
        points["throughput"] = metrics.tflops_per_device
        points["mfu"] = metrics.mfu
        points |= {f"{name}-time": max(seconds) for name, seconds in (metrics.timers or {}).items()}
    if logging.log_memory_to_tensorboard:
        for stage, peak in enumerate(metrics.peak_memory_bytes or ()):
            points[f"mem-max-allocated-bytes stage {stage}"] = peak
    return {name: value for name, value in points.items() if value is not None}


def evaluation_points(metrics: EvaluationMetrics, logging: LoggingConfig) -> dict[str, float]:
    """Return the points of one evaluation, by the name of their curve."""
    points = {f"lm loss {metrics.part}": metrics.lm_loss}
    if logging.log_validation_ppl_to_tensorboard:
        points[f"lm loss {metrics.part} ppl"] = metrics.perplexity
    return points


class TensorBoard(Reporter):
    """Writes each curve over iterations, and once more over samples, by which runs of different batches compare."""

    def __init__(self, directory: str, logging: LoggingConfig, world_size: int) -> None:
        # Imported here: the package is optional, and slow to import.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(directory)), max_queue=logging.tensorboard_queue_size)
        self._logging, self._world_size = logging, world_size

    def iteration(self, metrics: IterationMetrics) -> None:
        """Write the points of an iteration, if they are due."""
        if metrics.iteration % self._logging.tensorboard_log_interval == 0:
            self._write(iteration_points(metrics, self._logging, self._world_size), metrics)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Write the points of an evaluation."""
        self._write(evaluation_points(metrics, self._logging), metrics)

    def close(self) -> None:
        """Write what is held back."""
        self._writer.close()

    def _write(self, points: dict[str, float], metrics: IterationMetrics | EvaluationMetrics) -> None:
        for name, value in points.items():
            self._writer.add_scalar(name, value, metrics.iteration)
            self._writer.add_scalar(f"{name} vs samples", value, metrics.consumed_samples)


class WeightsAndBiases(Reporter):
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

    def iteration(self, metrics: IterationMetrics) -> None:
        """Report the points of an iteration, if they are due."""
        if metrics.iteration % self._logging.tensorboard_log_interval == 0:
            points = iteration_points(metrics, self._logging, self._world_size)
            self._run.log(points | {"samples": metrics.consumed_samples}, step=metrics.iteration)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Report the points of an evaluation."""
        self._run.log(evaluation_points(metrics, self._logging), step=metrics.iteration)

    def close(self) -> None:
        """Send what is left, and wait until the process of W&B that writes the files has ended."""
        self._run.finish()
        self._wandb.teardown()


def check_packages(logging: LoggingConfig) -> None:
    """See that each package is installed that a flag needs.

    Raises:
        ConfigError: if one is not.
    """
    needed = {
        "tensorboard": ("--tensorboard-dir", logging.tensorboard_dir),
        "wandb": ("--wandb-project", logging.wandb_project),
    }
    for package, (flag, value) in needed.items():
        if value is not None and find_spec(package) is None:
            raise ConfigError(f"{flag} {value} needs {not_installed(package)}")
