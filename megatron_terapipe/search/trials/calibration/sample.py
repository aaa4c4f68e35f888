"""Measured runs, ready to be priced again and again under other constants; how much each constant moves their times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.cost.simulated_time import ScheduleSimulator
from megatron_terapipe.search.cost.strategy_batch import StrategyBatch, batch_key
from megatron_terapipe.search.op_times.constants import is_factor, moved
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.trials.trial import Trial, models_of
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """The trials of a sequence that say something about time. Make it with `of`."""

    trials: tuple[Trial, ...]
    models: tuple[CostModel, ...]
    """Cost model of each; those of one workload and cluster share it."""
    batches: tuple[tuple[StrategyBatch, NDArray[np.int64]], ...]
    """Each with the places of its trials."""
    measured: Floats
    """[n] seconds, measured or cut off."""
    cut_off: NDArray[np.bool_]
    """[n] whether it took at least so long."""

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> "Sample":
        """Take those with a time, or a time that they took at least."""
        known = tuple(one for one in trials if one.least_time_s)
        simulator = ScheduleSimulator()

        def make(one: Trial) -> CostModel:
            return CostModel(
                one.workload, one.cluster, software=one.software, precision=one.precision, simulator=simulator
            )

        models = models_of(known, make)
        places: dict[tuple[object, ...], list[int]] = {}
        for index, (model, one) in enumerate(zip(models, known, strict=True)):
            places.setdefault(batch_key(model, one.strategy), []).append(index)
        batches = tuple(
            (
                StrategyBatch.of([models[index] for index in rows], [known[index].strategy for index in rows]),
                np.array(rows),
            )
            for rows in places.values()
        )
        measured = np.array([one.least_time_s for one in known])
        cut_off = np.array([one.iteration_time_s is None for one in known], dtype=bool)
        return cls(known, tuple(models), batches, measured, cut_off)

    def __len__(self) -> int:
        """Number of trials."""
        return len(self.trials)

    def closed_form(self, efficiency: HardwareEfficiency) -> Floats:
        """[n] seconds, in closed form."""
        times = np.empty(len(self))
        for batch, rows in self.batches:
            times[rows] = batch.times(efficiency)
        return times

    def simulated_ratio(self, efficiency: HardwareEfficiency) -> Floats:
        """[n] what the simulator says, in closed forms: constants hardly change it, and it is slow to compute."""
        cache: dict[int, CostModel] = {}
        simulated = np.empty(len(self))
        for index, (model, one) in enumerate(zip(self.models, self.trials, strict=True)):
            if id(model) not in cache:
                cache[id(model)] = model.with_efficiency(efficiency)
            simulated[index] = (
                cache[id(model)].predict_time(one.strategy, activation_limit=one.activation_limit).iteration_time_s
            )
        return simulated / self.closed_form(efficiency)

    def errors(self, efficiency: HardwareEfficiency, ratio: Floats) -> Floats:
        """Errors [n], log(predicted / measured); zero where a cut-off run is predicted to take longer.

        Args:
            ratio: simulated over closed-form seconds, [n].
        """
        errors = np.log(self.closed_form(efficiency) * ratio / self.measured)
        return np.where(self.cut_off & (errors > 0), 0.0, errors)


STEP = 0.02
"""Change of a constant's logarithm over which the slope is taken."""


def sample_sensitivities(sample: Sample, efficiency: HardwareEfficiency, names: Sequence[str]) -> Floats:
    """Slopes of log(time) of each trial.

    Returns:
        [n, p] change of log(time) with the logarithm of each constant.
    """
    return _slopes_of_batches(sample.batches, efficiency, names)


def strategy_sensitivities(
    model: CostModel, strategies: Sequence[Strategy], efficiency: HardwareEfficiency, names: Sequence[str]
) -> Floats:
    """Sensitivities [n, p] of the predicted times of strategies that were not run."""
    places: dict[tuple[object, ...], list[int]] = {}
    for index, strategy in enumerate(strategies):
        places.setdefault(batch_key(model, strategy), []).append(index)
    batches = [
        (StrategyBatch.of([model] * len(rows), [strategies[index] for index in rows]), np.array(rows))
        for rows in places.values()
    ]
    return _slopes_of_batches(batches, efficiency, names)


def _slopes_of_batches(
    batches: Sequence[tuple[StrategyBatch, NDArray[np.int64]]], efficiency: HardwareEfficiency, names: Sequence[str]
) -> Floats:
    """[n, p] slopes of the logarithms of the times of n strategies in batches, each with the places of its own."""
    slopes = np.zeros((sum(len(rows) for _, rows in batches), len(names)))
    factors = [column for column, name in enumerate(names) if is_factor(name)]
    for batch, rows in batches:
        at = np.log(batch.times(efficiency))

        def steps(columns: Sequence[int], batch: StrategyBatch = batch, at: Floats = at) -> Floats:
            moves = moved(efficiency, [names[column] for column in columns], STEP)
            return np.log(batch.times(moves)) - at

        found = {column: steps([column]) for column, name in enumerate(names) if not is_factor(name)}
        found.update(_felt(steps, factors))
        for column, step in found.items():
            slopes[rows, column] = step / STEP
    return slopes


def _felt(steps: Callable[[Sequence[int]], Floats], columns: Sequence[int]) -> dict[int, Floats]:
    """Changes of log(time) with those factors that it depends on: few of many, so halves are tried that may hold none.

    Args:
        steps: changes of log(time) if all of some factors grow.
    """
    if not columns:
        return {}
    # Times grow with every factor: if they do not with all of these, then with none.
    together = steps(columns)
    if not together.any():
        return {}
    if len(columns) == 1:
        return {columns[0]: together}
    middle = len(columns) // 2
    return _felt(steps, columns[:middle]) | _felt(steps, columns[middle:])
