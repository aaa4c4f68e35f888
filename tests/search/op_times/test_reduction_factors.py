"""Learned factors of reductions, by ranks and bytes."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.search.price.efficiency import (
    BYTES,
    NUM_REDUCTION_FACTORS,
    RANKS,
    HardwareEfficiency,
    reduction_factor,
)

NOTHING = HardwareEfficiency().reductions


def learned(ranks: int, num_bytes: int, factor: float) -> tuple[float, ...]:
    factors = list(NOTHING)
    factors[RANKS.index(ranks) * len(BYTES) + BYTES.index(num_bytes)] = factor
    return tuple(factors)


def test_before_any_trial_every_factor_is_one() -> None:
    assert len(NOTHING) == NUM_REDUCTION_FACTORS
    assert reduction_factor(NOTHING, 5e6, 3) == 1.0


def test_a_factor_holds_where_it_was_learned_and_fades_to_the_next() -> None:
    factors = learned(4, 2**22, 2.0)
    assert reduction_factor(factors, 2**22, 4) == pytest.approx(2.0)
    assert reduction_factor(factors, 2**23, 4) == pytest.approx(1.0)
    assert reduction_factor(factors, 2**22, np.array([2, 8])) == pytest.approx(1.0)
    # Half way between in the logarithm of bytes, and of ranks.
    assert reduction_factor(factors, 2**22.5, 4) == pytest.approx(2**0.5)
    assert reduction_factor(factors, 2**22, 2**1.5) == pytest.approx(2**0.5)


def test_beyond_the_outermost_it_stays_the_same() -> None:
    factors = learned(8, BYTES[-1], 1.5)
    assert reduction_factor(factors, np.array([BYTES[-1], 1e10]), 64) == pytest.approx(1.5)
    assert reduction_factor(learned(2, BYTES[0], 0.5), 0.0, 2) == pytest.approx(0.5)


def test_factors_can_be_part_of_constants() -> None:
    assert hash(replace(HardwareEfficiency(), reductions=learned(2, 2**20, 2.0))) != hash(HardwareEfficiency())
