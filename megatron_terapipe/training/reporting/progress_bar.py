"""A progress bar on a terminal."""

import sys

from tqdm import tqdm

from megatron_terapipe.training.metrics import IterationMetrics
from megatron_terapipe.training.reporting.reporter import Reporter


class ProgressBar(Reporter):
    """Moves on with every iteration; shows nothing where standard error is no terminal.

    Args:
        done: iterations done before.
        train_iters: the last iteration of the run.
    """

    def __init__(self, done: int, train_iters: int) -> None:
        self._bar = tqdm(total=train_iters, initial=done, unit="iteration", disable=not sys.stderr.isatty())

    def iteration(self, metrics: IterationMetrics) -> None:
        """Move on, and show the loss."""
        self._bar.set_postfix(loss=f"{metrics.lm_loss:.3f}", refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()
