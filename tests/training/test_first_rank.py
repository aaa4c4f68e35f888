"""Ranks ask the first one before their process group exists."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.errors import SearchError
from megatron_terapipe.search.machine.launcher import free_port
from megatron_terapipe.training.first_rank import FirstRank

SIZE = 3
RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1"
)


@pytest.fixture(autouse=True)
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    # `export` of the place of a rank sets them all.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.get(name, "1"))


def answers(find: Callable[[int], Any], *questions: str, timeout_s: float = 60) -> list[list[Any]]:
    """The answers of each rank, or the errors; a rank finds by its number."""

    def of_rank(rank: int) -> list[Any]:
        launch, found = LaunchEnvironment(rank=rank, world_size=SIZE, local_rank=rank, local_size=SIZE), []
        for question in questions:
            try:
                found.append(
                    first_rank[rank].answer(launch, timedelta(seconds=timeout_s), question, lambda: find(rank))
                )
            except SearchError as error:
                found.append(str(error))
        return found

    # As in processes of their own, the store of the first rank remains.
    first_rank = [FirstRank() for _ in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(of_rank, range(SIZE)))


def test_all_ranks_have_what_the_first_one_finds() -> None:
    searched: list[int] = []

    def find(rank: int) -> dict[str, Any]:
        searched.append(rank)
        return {"token_slices": "30,1,1", "search": len(searched)}

    first, second = ({"token_slices": "30,1,1", "search": number} for number in (1, 2))
    assert answers(find, "slices", "schedule", "slices") == [[first, second, first]] * SIZE
    assert searched == [0, 0]


def test_all_ranks_have_its_error() -> None:
    def find(rank: int) -> None:
        raise UserError("--token-slices auto: give fewer")

    assert answers(find, "slices") == [["--token-slices auto: give fewer"]] * SIZE


@pytest.mark.parametrize("counts", [True, False])
def test_ranks_wait_while_the_first_one_is_at_work(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search may take longer than the timeout; a first rank that has stopped may not."""
    monkeypatch.setattr("megatron_terapipe.training.first_rank._COUNT_S", 0.02 if counts else 60)
    with nullcontext() if counts else pytest.raises(SystemExit):
        assert answers(lambda rank: time.sleep(0.25) or "found", "slices", timeout_s=0.1) == [["found"]] * SIZE


@pytest.mark.parametrize(("size", "words", "asks"), [("2", "", True), ("2", "--dry-run", False), ("1", "", False)])
def test_single_ranks_and_dry_runs_search_by_themselves(
    size: str, words: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    config = parse_arguments(f"{RUN} --mock-data {words}".split())
    assert (FirstRank().ask(config) is not None) == asks
