"""Layers with matrices shared by ranks: one launch for each number of ranks runs all checks."""

import traceback
from itertools import product
from typing import NamedTuple

import pytest
import torch.distributed as dist

from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.distributed import run_distributed
from tests.model.rank_checks import CHECKS

KINDS = {"tensor_parallel": False, "sequence_parallel": True}
SIZES = (2, 4)


class Setup(NamedTuple):
    """A check by name, on a number of ranks, with sequence parallelism or not."""

    size: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.size}_ranks-{self.kind}-{self.name}"


def faults(setups: list[Setup]) -> dict[Setup, str]:
    """Faults on this rank, by setup."""
    found = {}
    for setup in setups:
        ranks = TensorParallelRanks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, KINDS[setup.kind])
        try:
            CHECKS[setup.name](ranks)
        except Exception:
            found[setup] = traceback.format_exc()
    return found


SETUPS = [Setup(*each) for each in product(SIZES, KINDS, CHECKS)]


@pytest.fixture(scope="module")
def faults_by_rank() -> dict[int, list[dict[Setup, str]]]:
    return {size: run_distributed(faults, size, [each for each in SETUPS if each.size == size]) for size in SIZES}


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_layers_on_ranks_compute_the_result_of_one(
    faults_by_rank: dict[int, list[dict[Setup, str]]], setup: Setup
) -> None:
    found = [f"rank {rank}:\n{each[setup]}" for rank, each in enumerate(faults_by_rank[setup.size]) if setup in each]
    assert not found, "\n".join(found)
