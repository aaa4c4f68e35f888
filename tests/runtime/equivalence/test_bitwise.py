"""With the same cut, neither the schedule nor the number of stages changes a single bit of any gradient.

Gradients add up in one order whatever the schedule: micro-batches first to last, token slices last to first.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.distributed import run_each
from tests.runtime.training import Setup, gradients

CUT = (9, 1, 8, 6)
SETUPS = [
    Setup(pp=pp, cut=CUT, micro_batches=3, schedule=schedule, tied=tied)
    for pp in (1, 2, 4)
    for schedule in ("gpipe", "1f1b")
    for tied in (False, True)
]
SETUPS += [
    Setup(pp=2, cut=CUT, micro_batches=3, schedule="interleaved", model_chunks=2, tied=tied) for tied in (False, True)
]
SETUPS += [Setup(pp=pp, cut=CUT, micro_batches=3, schedule="zero-bubble", tied=False) for pp in (1, 2, 4)]
WHOLE = Setup(micro_batches=3, tied=False)


@cache
def _trained(world_size: int) -> dict[Setup, tuple[float, dict[str, np.ndarray]]]:
    """Per setup of a world size, the loss and the gradients of all stages together, those of tied copies by rank."""
    setups = [setup for setup in [*SETUPS, WHOLE] if setup.world_size == world_size]
    merged = {}
    for setup, ranks in zip(setups, run_each(gradients, world_size, setups), strict=True):
        (loss,) = {loss for loss, _ in ranks}
        merged[setup] = (
            loss,
            {
                f"{name} of rank {rank}" if "tied" in name else name: gradient
                for rank, (_, found) in enumerate(ranks)
                for name, gradient in found.items()
            },
        )
    return merged


def _assert_same_bits(setup: Setup, other: Setup) -> None:
    loss, found = _trained(setup.world_size)[setup]
    other_loss, other_found = _trained(other.world_size)[other]
    assert loss == other_loss
    assert found.keys() == other_found.keys()
    different = [name for name in found if found[name].tobytes() != other_found[name].tobytes()]
    assert not different


@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup.schedule == "gpipe"], ids=str)
def test_schedules_agree_bit_for_bit(setup: Setup) -> None:
    _assert_same_bits(setup, replace(setup, schedule="1f1b"))


@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup.schedule == "zero-bubble"], ids=str)
def test_weight_gradients_apart_agree_bit_for_bit(setup: Setup) -> None:
    # Not with tied weights on one stage, which add up their two gradients in turns if both are whole.
    _assert_same_bits(setup, replace(setup, schedule="1f1b"))


@pytest.mark.parametrize("tied", [False, True])
def test_model_chunks_agree_bit_for_bit(tied: bool) -> None:
    setup = Setup(pp=2, cut=CUT, micro_batches=3, tied=tied)
    _assert_same_bits(setup, replace(setup, schedule="interleaved", model_chunks=2))


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_any_number_of_stages_agrees_bit_for_bit(schedule: str, pp: int) -> None:
    # Tied weights are left out: their two gradients add up in one tensor on one stage, and in two on two.
    one_stage = Setup(pp=1, cut=CUT, micro_batches=3, schedule=schedule, tied=False)
    _assert_same_bits(one_stage, replace(one_stage, pp=pp))


def test_another_cut_does_change_bits() -> None:
    # Otherwise the tests above could not fail.
    trained = _trained(1)
    _, uneven = trained[replace(WHOLE, cut=CUT)]
    _, whole = trained[WHOLE]
    assert any(uneven[name].tobytes() != whole[name].tobytes() for name in whole)
