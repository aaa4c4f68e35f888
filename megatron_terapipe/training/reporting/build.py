"""The reporters of a run."""

from dataclasses import asdict

from megatron_terapipe.training.reporting.log_lines import LogLines
from megatron_terapipe.training.reporting.metrics_file import MetricsFile
from megatron_terapipe.training.reporting.progress_bar import ProgressBar
from megatron_terapipe.training.reporting.reporter import Reporter, Reporters
from megatron_terapipe.training.reporting.tensorboard import TensorBoard
from megatron_terapipe.training.reporting.weights_and_biases import WeightsAndBiases
from megatron_terapipe.training.run import Run


def build_reporters(run: Run) -> Reporters:
    """Build what the run's configuration asks for, on the first rank alone.

    Loss and time are the same on every rank, so one speaks for all.
    """
    if run.launch.rank != 0:
        return Reporters()
    logging = run.config.logging
    reporters: list[Reporter] = [
        ProgressBar(run.start.iteration, run.train_iters),
        LogLines(logging.log_interval, run.train_iters),
    ]
    if logging.metrics_file is not None:
        reporters.append(MetricsFile(logging.metrics_file))
    if logging.tensorboard_dir is not None:
        reporters.append(TensorBoard(logging.tensorboard_dir, logging, run.launch.world_size))
    if logging.wandb_project is not None:
        reporters.append(WeightsAndBiases(logging, asdict(run.config), run.launch.world_size))
    return Reporters(reporters)
