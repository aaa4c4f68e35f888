"""Intervals of strategies that nobody ran, as `pricing` asks for them."""

from megatron_terapipe.search.calibrate.intervals import Intervals
from megatron_terapipe.search.calibrate.sensitivities import strategy_sensitivities
from megatron_terapipe.search.cost.model import CostModel
from megatron_terapipe.strategy import Strategy


class CalibratedDoubt:
    """How far measurements are from the predictions of one cost model.

    Args:
        intervals: of its constants.
        model: prices the strategies.
    """

    def __init__(self, intervals: Intervals, model: CostModel) -> None:
        self._intervals = intervals
        self._model = model

    @property
    def coverage(self) -> float:
        """Share of measurements that shall be inside."""
        return self._intervals.coverage

    def interval(self, strategy: Strategy, iteration_time_s: float) -> tuple[float, float]:
        """Shortest and longest iteration to expect of a strategy, in seconds, around its predicted time."""
        names = self._intervals.parameter_names
        slopes = strategy_sensitivities(self._model, [strategy], self._model.physics, names)
        return self._intervals.interval_s(iteration_time_s, slopes)
