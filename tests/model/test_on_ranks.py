"""Layers with matrices shared by ranks: one launch for each number of ranks runs all checks."""

import traceback
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch.distributed as dist

from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.distributed import run_distributed
from tests.model.rank_checks import CHECKS
from tests.model.whole_and_parts import MODELS, whole_model
from tests.pairs import Axes

NAMED = {**CHECKS, **{name: partial(whole_model, name) for name in MODELS}}
KINDS = {"tensor_parallel": False, "sequence_parallel": True}
SIZES = (2, 4)


class Setup(NamedTuple):
    """A check or a model by name, on a number of ranks, with sequence parallelism or not."""

    size: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.size}_ranks-{self.kind}-{self.name}"


def axes_of(setup: Setup) -> Axes:
    return setup._asdict()


def faults(setups: list[Setup]) -> dict[Setup, str]:
    """Faults on this rank, by setup."""
    found = {}
    for setup in setups:
        ranks = TensorParallelRanks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, KINDS[setup.kind])
        try:
            NAMED[setup.name](ranks)
        except Exception:
            found[setup] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def faults_by_rank(setups: list[Setup]) -> dict[int, list[dict[Setup, str]]]:
    return {size: run_distributed(faults, size, [each for each in setups if each.size == size]) for size in SIZES}


def check(faults_by_rank: dict[int, list[dict[Setup, str]]], setup: Setup) -> None:
    found = [f"rank {rank}:\n{each[setup]}" for rank, each in enumerate(faults_by_rank[setup.size]) if setup in each]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("setup", [Setup(*each) for each in product(SIZES, KINDS, CHECKS)], ids=str)
def test_layers_on_ranks_compute_the_result_of_one(
    faults_by_rank: dict[int, list[dict[Setup, str]]], setup: Setup
) -> None:
    check(faults_by_rank, setup)


@pytest.mark.setups([Setup(*each) for each in product(SIZES, KINDS, MODELS)], axes_of)
def test_models_on_ranks_compute_the_result_of_one(
    faults_by_rank: dict[int, list[dict[Setup, str]]], setup: Setup
) -> None:
    check(faults_by_rank, setup)
