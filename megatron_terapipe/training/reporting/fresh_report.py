"""The report of a run that still trains: there is one, however the run ends."""

import time
from collections.abc import Callable
from contextlib import suppress

from megatron_terapipe.training.records.metrics import IterationMetrics
from megatron_terapipe.training.reporting.reporter import Reporter

_MOST_OF_TIME = 0.01
"""Part of a run's time that its report may take while it trains."""

_FIRST_TAKES_S = 1.0
"""Seconds that the first one takes, as far as anybody knows: it imports what draws it."""


class FreshReport(Reporter):
    """Writes the report anew whenever that takes less than a hundredth of the time since the last one.

    Args:
        clock: tells seconds.
    """

    def __init__(self, refresh: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._refresh, self._clock = refresh, clock
        self._takes_s, self._last_s = _FIRST_TAKES_S, clock()

    def iteration(self, metrics: IterationMetrics) -> None:
        """Write it if it is time to."""
        began = self._clock()
        if self._takes_s > _MOST_OF_TIME * (began - self._last_s):
            return
        with suppress(Exception):  # Told when the run ends.
            self._refresh()
        self._last_s = self._clock()
        self._takes_s = self._last_s - began
