"""The metrics file: one JSON object per iteration and per evaluation."""

import json
from pathlib import Path

from megatron_terapipe.training.metrics import EvaluationMetrics, IterationMetrics
from megatron_terapipe.training.reporting.reporter import Reporter


class MetricsFile(Reporter):
    """Appends metrics to a file, one JSON object a line.

    Args:
        path: the file, made with its directories.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def iteration(self, metrics: IterationMetrics) -> None:
        """Append an iteration."""
        self._append(metrics)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Append an evaluation."""
        self._append(metrics)

    def _append(self, metrics: IterationMetrics | EvaluationMetrics) -> None:
        # Handed to the operating system at once: a killed run loses no line.
        with self._path.open("a") as file:
            file.write(json.dumps(metrics.as_json()) + "\n")
