"""TensorBoard's files."""

from pathlib import Path

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.training.metrics import EvaluationMetrics, IterationMetrics
from megatron_terapipe.training.reporting.curves import evaluation_points, iteration_points
from megatron_terapipe.training.reporting.reporter import Reporter


class TensorBoard(Reporter):
    """Writes each curve over iterations, and once more over samples, by which runs of different batches compare.

    Args:
        directory: directory of its files.
        logging: the logging section.
        world_size: number of ranks.
    """

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
