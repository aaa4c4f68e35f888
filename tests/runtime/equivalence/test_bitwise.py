"""With the same cut, neither the number of stages nor the schedule on them changes a single bit of any gradient.

Gradients add up in one order: micro-batches first to last, token slices last to first. That schedules on the same
stages agree to the bit is tested with the trainer's model (`tests/training/equivalence/test_same_bits.py`).
"""

import numpy as np
import pytest

from tests.distributed import results_by_setup
from tests.runtime.training import Setup, gradients

CUT = (9, 1, 8, 6)


def setup_of(pp: int = 1, schedule: str = "1f1b", cut: tuple[int, ...] = CUT) -> Setup:
    """Weights are not tied: their two gradients add up in one tensor on one stage, and in two on two."""
    return Setup(pp=pp, cut=cut, micro_batches=3, schedule=schedule, tied=False)


ONE, WHOLE = setup_of(), setup_of(cut=(24,))
OTHERS = [
    setup_of(2, "gpipe"),
    setup_of(2, "zero-bubble"),
    setup_of(4),
    setup_of(4, "gpipe"),
    setup_of(4, "zero-bubble"),
]
trained = results_by_setup(gradients, [ONE, WHOLE, *OTHERS])


def merged(setup: Setup) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and the gradients of all stages together."""
    ranks = trained(setup)
    (loss,) = {loss for loss, _ in ranks}
    return loss, {name: gradient for _, found in ranks for name, gradient in found.items()}


def different(setup: Setup) -> list[str]:
    (_, one), (_, other) = merged(ONE), merged(setup)
    assert one.keys() == other.keys()
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


@pytest.mark.parametrize("setup", OTHERS, ids=str)
def test_any_number_of_stages_agrees_bit_for_bit(setup: Setup) -> None:
    assert merged(setup)[0] == merged(ONE)[0]
    assert not different(setup)


def test_another_cut_does_change_bits() -> None:
    assert different(WHOLE), "otherwise the test above could not fail"
