"""How much each constant of the cost model moves the time of a strategy: what calibration learns from."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.calibrate.sample import Sample
from megatron_terapipe.search.cost.batch import Batch, batch_key
from megatron_terapipe.search.cost.model import CostModel
from megatron_terapipe.search.cost.physics import Physics
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

STEP = 0.05
"""Change of a constant's logarithm over which the slope is taken, to both sides."""


def sample_sensitivities(sample: Sample, physics: Physics, names: Sequence[str]) -> Floats:
    """Slopes of log(time) of each trial.

    Args:
        sample: n trials.
        physics: constants around which the slope is taken.
        names: p constants.

    Returns:
        [n, p] change of log(time) with the logarithm of each constant.
    """
    slopes = np.empty((len(sample), len(names)))
    for column, name in enumerate(names):
        above, below = (sample.closed_form(_moved(physics, name, sign * STEP)) for sign in (1, -1))
        slopes[:, column] = np.log(above / below) / (2 * STEP)
    return slopes


def strategy_sensitivities(
    model: CostModel, strategies: Sequence[Strategy], physics: Physics, names: Sequence[str]
) -> Floats:
    """The same of strategies that nobody ran: [n, p]."""
    places: dict[tuple[object, ...], list[int]] = {}
    for index, strategy in enumerate(strategies):
        places.setdefault(batch_key(model, strategy), []).append(index)
    slopes = np.empty((len(strategies), len(names)))
    for rows in places.values():
        batch = Batch.of([model] * len(rows), [strategies[index] for index in rows])
        for column, name in enumerate(names):
            above, below = (batch.times(_moved(physics, name, sign * STEP)) for sign in (1, -1))
            slopes[rows, column] = np.log(above / below) / (2 * STEP)
    return slopes


def _moved(physics: Physics, name: str, logarithm: float) -> Physics:
    return replace(physics, **{name: getattr(physics, name) * float(np.exp(logarithm))})
