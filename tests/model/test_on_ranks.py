"""Layers with matrices shared by ranks: one launch for each number of ranks runs all checks."""

import traceback
from functools import partial

import pytest
import torch.distributed as dist

from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.distributed import run_distributed
from tests.model.rank_checks import CHECKS
from tests.model.whole_and_parts import MODELS, whole_model

NAMED = {**CHECKS, **{f"whole_model_{name}": partial(whole_model, name) for name in MODELS}}
KINDS = {"tensor_parallel": False, "sequence_parallel": True}
SIZES = (2, 4)


def faults() -> dict[tuple[str, str], str]:
    """Faults on this rank, by kind and check."""
    found = {}
    for kind, sequence_parallel in KINDS.items():
        ranks = TensorParallelRanks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, sequence_parallel)
        for name, check in NAMED.items():
            try:
                check(ranks)
            except Exception:
                found[kind, name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size}_ranks")
def faults_by_rank(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], str]]:
    return run_distributed(faults, request.param)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_compute_the_result_of_one(
    faults_by_rank: list[dict[tuple[str, str], str]], kind: str, name: str
) -> None:
    found = [
        f"rank {rank}:\n{faults[kind, name]}" for rank, faults in enumerate(faults_by_rank) if (kind, name) in faults
    ]
    assert not found, "\n".join(found)
