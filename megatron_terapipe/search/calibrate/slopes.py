"""How predicted times depend on the constants that a calibration moves, whichever those are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.calibrate.calibration import Calibration
from megatron_terapipe.search.calibrate.on_profile import factor_slopes
from megatron_terapipe.search.calibrate.sensitivities import strategy_sensitivities
from megatron_terapipe.search.cost.model import CostModel
from megatron_terapipe.strategy import Strategy


def calibrated_slopes(
    calibration: Calibration, model: CostModel, strategies: Sequence[Strategy]
) -> NDArray[np.float64]:
    """[n, p] slopes of the logarithm of each time in that of each constant, as `calibration.intervals` counts them.

    Args:
        calibration: of physics, or of factors on a profile.
        model: prices the strategies with it.
        strategies: n of them.
    """
    if calibration.factors is None:
        return strategy_sensitivities(model, strategies, model.physics, calibration.intervals.parameter_names)
    return factor_slopes(model, strategies)
