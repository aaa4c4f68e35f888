"""The protocol of a reporter."""

from collections.abc import Sequence

from megatron_terapipe.training.records.events import Event
from megatron_terapipe.training.records.metrics import EvaluationMetrics, IterationMetrics


class Reporter:
    """Hears of everything, on the one rank that speaks, and passes on what it is there for."""

    def iteration(self, metrics: IterationMetrics) -> None:
        """An iteration is done."""

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """An evaluation is done."""

    def note(self, line: str) -> None:
        """Something happened that is told in words."""

    def event(self, event: Event) -> None:
        """Something happened that is told in figures."""

    def close(self) -> None:
        """Close what is open; nothing more will be reported."""


class Reporters(Reporter):
    """Several as one. A rank that does not speak has none."""

    def __init__(self, reporters: Sequence[Reporter] = ()) -> None:
        self._reporters = tuple(reporters)

    def iteration(self, metrics: IterationMetrics) -> None:
        """Tell each."""
        for each in self._reporters:
            each.iteration(metrics)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Tell each."""
        for each in self._reporters:
            each.evaluation(metrics)

    def note(self, line: str) -> None:
        """Tell each."""
        for each in self._reporters:
            each.note(line)

    def event(self, event: Event) -> None:
        """Tell each."""
        for each in self._reporters:
            each.event(event)

    def close(self) -> None:
        """Close each."""
        for each in self._reporters:
            each.close()
