"""The loss of all fits: square for residuals that are expected, linear for those that something else explains."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def soft_l1(scaled: Floats, large: float) -> Floats:
    """Residuals whose square is the soft L1 loss, 2 large^2 (sqrt(1 + z^2) - 1) for z = residual / large.

    Args:
        scaled: residuals, in standard deviations.
        large: from which on the loss grows no longer with their square.
    """
    return np.asarray(np.sign(scaled) * large * np.sqrt(2 * (np.sqrt(1 + (scaled / large) ** 2) - 1)), dtype=np.float64)
