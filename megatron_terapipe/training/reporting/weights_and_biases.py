"""Weights & Biases."""

from importlib import import_module
from typing import Any

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.metrics import EvaluationMetrics, IterationMetrics
from megatron_terapipe.training.reporting.curves import evaluation_points, iteration_points
from megatron_terapipe.training.reporting.reporter import Reporter


class WeightsAndBiases(Reporter):
    """Reports a run to a project.

    Args:
        logging: project, name and directory, and how often.
        settings: configuration of the run, kept with it.
        world_size: number of ranks.
    """

    def __init__(self, logging: LoggingConfig, settings: dict[str, Any], world_size: int) -> None:
        # Imported here: the package is optional, and slow to import.
        wandb = import_module("wandb")
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
        """Send what is left."""
        self._run.finish()
