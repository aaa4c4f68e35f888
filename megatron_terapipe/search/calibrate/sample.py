"""Measured runs, ready to be priced again and again with other physics."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.batch import Batch, batch_key
from megatron_terapipe.search.cost.model import CostModel
from megatron_terapipe.search.cost.physics import Physics
from megatron_terapipe.search.cost.playing import Orders
from megatron_terapipe.search.trials.trial import Trial

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """The trials of a sequence that say something about time. Make it with `of`.

    Attributes:
        trials: these trials.
        models: cost model of each; those of one workload and cluster share it.
        batches: each with the places of its trials.
        measured: [n] seconds, measured or cut off.
        cut_off: [n] whether it took at least so long.
    """

    trials: tuple[Trial, ...]
    models: tuple[CostModel, ...]
    batches: tuple[tuple[Batch, NDArray[np.int64]], ...]
    measured: Floats
    cut_off: NDArray[np.bool_]

    @classmethod
    def of(cls, trials: Sequence[Trial]) -> "Sample":
        """Take those with a time, or a time that they took at least."""
        known = tuple(one for one in trials if one.iteration_time_s or one.longer_than_s)
        shared: dict[tuple[object, ...], CostModel] = {}
        models, orders = [], Orders()
        places: dict[tuple[object, ...], list[int]] = {}
        for index, one in enumerate(known):
            key = id(one.workload), id(one.cluster), one.software, one.precision
            if key not in shared:
                shared[key] = CostModel(
                    one.workload, one.cluster, software=one.software, precision=one.precision, orders=orders
                )
            models.append(shared[key])
            places.setdefault(batch_key(shared[key], one.strategy), []).append(index)
        batches = tuple(
            (Batch.of([models[index] for index in rows], [known[index].strategy for index in rows]), np.array(rows))
            for rows in places.values()
        )
        measured = np.array([one.iteration_time_s or one.longer_than_s or 0.0 for one in known])
        cut_off = np.array([one.iteration_time_s is None for one in known], dtype=bool)
        return cls(known, tuple(models), batches, measured, cut_off)

    def __len__(self) -> int:
        """Number of trials."""
        return len(self.trials)

    def closed_form(self, physics: Physics) -> Floats:
        """[n] seconds, in closed form."""
        times = np.empty(len(self))
        for batch, rows in self.batches:
            times[rows] = batch.times(physics)
        return times

    def simulated_ratio(self, physics: Physics) -> Floats:
        """[n] what the simulator says, in closed forms: it hardly changes with physics, and is slow to compute."""
        cache: dict[int, CostModel] = {}
        simulated = np.empty(len(self))
        for index, (model, one) in enumerate(zip(self.models, self.trials, strict=True)):
            if id(model) not in cache:
                cache[id(model)] = model.with_physics(physics)
            simulated[index] = (
                cache[id(model)].predict_time(one.strategy, activation_limit=one.activation_limit).iteration_time_s
            )
        return simulated / self.closed_form(physics)

    def errors(self, physics: Physics, ratio: Floats) -> Floats:
        """[n] log(predicted / measured); none where a cut-off run is predicted to take longer."""
        errors = np.log(self.closed_form(physics) * ratio / self.measured)
        return np.where(self.cut_off & (errors > 0), 0.0, errors)
