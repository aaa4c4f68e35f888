"""Numbers that take every rank to know: the norm of all parameters, and the memory of each stage."""

import numpy as np
import pytest

from megatron_terapipe.training.step import memory_line, parameter_norm, peak_memory_by_stage, peak_memory_bytes
from tests.distributed import run_distributed
from tests.runtime.reference import Reference
from tests.runtime.training import Setup, build

CUT = (9, 1, 8, 6)
SETUPS = [
    Setup(pp=2, dp=1, cut=CUT),
    Setup(pp=1, dp=2, cut=CUT, zero=1),
    Setup(pp=2, dp=1, cut=CUT, tied=False),
    Setup(pp=2, dp=1, cut=CUT, dtype="bf16"),
]


def _numbers(setups: list[Setup]) -> list[tuple[float, tuple[int, ...], int]]:
    found = []
    for setup in setups:
        engine = build(setup)
        found.append((parameter_norm(engine), peak_memory_by_stage(engine), peak_memory_bytes()))
    return found


def test_every_rank_knows_the_norm_and_the_memory_of_all() -> None:
    by_rank = run_distributed(_numbers, 2, SETUPS)
    for index, setup in enumerate(SETUPS):
        model = Reference(setup.num_blocks, tied=setup.tied)
        expected = np.sqrt(sum(parameter.double().pow(2).sum().item() for parameter in model.parameters()))
        (norm, memory, own), (other_norm, other_memory, other_own) = (found[index] for found in by_rank)
        # Rounded to bf16, weights err by up to 2**-9 each, their norm by much less.
        assert norm == pytest.approx(expected, rel=1e-3 if setup.dtype == "bf16" else 1e-6), str(setup)
        assert (other_norm, other_memory) == (norm, memory)
        assert len(memory) == setup.pp
        # A peak can only have risen between the two looks.
        if setup.pp == 2:
            assert 2**20 < memory[0] <= own and 2**20 < memory[1] <= other_own
        else:
            assert memory[0] <= max(own, other_own)


def test_the_line_of_the_log() -> None:
    line = memory_line(2, (3 * 2**20, 2**19))
    assert line == " peak memory after 2 iterations (MiB) | stage 0: 3.0 | stage 1: 0.5 |"
