"""Ranks ask the first one before their process group exists."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import DistStoreError

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.health.rank_watch import RankWatch
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.errors import SearchError
from megatron_terapipe.launch.launcher import free_port
from megatron_terapipe.training.first_rank import FirstRank, _received

SIZE = 3
RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1"
)


@pytest.fixture(autouse=True)
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    # `export` of the place of a rank sets them all.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.get(name, "1"))


def answers(find: Callable[[int], Any], *questions: str) -> list[list[Any]]:
    """The answers of each rank, or the errors; a rank finds by its number."""

    def of_rank(rank: int) -> list[Any]:
        launch, found = LaunchEnvironment(rank=rank, world_size=SIZE, local_rank=rank, local_size=SIZE), []
        watch = RankWatch(launch, launch=(), host=None)
        for question in questions:
            try:
                found.append(first_rank[rank].answer(watch, timedelta(seconds=60), question, lambda: find(rank)))
            except SearchError as error:
                found.append(str(error))
        return found

    # As in processes of their own, the store of the first rank remains.
    first_rank = [FirstRank(Mock()) for _ in range(SIZE)]
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


class Signs:
    """A store, each `get` of which times out until the first rank has given its signs."""

    def __init__(self, *signs: int) -> None:
        self.signs, self.counted = list(signs), Event()

    def get(self, key: str) -> bytes:
        if self.signs:
            raise DistStoreError(f"{key}: timeout")
        return b"found"

    def add(self, key: str, number: int) -> int:
        if number:
            self.counted.set()
        return self.signs.pop(0)

    def set(self, key: str, value: str) -> None:
        assert self.counted.is_set() and value == '{"found": true}'


def test_ranks_wait_for_longer_than_the_timeout_while_the_first_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _received(Signs(1, 2, 5), "answer", nullcontext) == b"found"
    with pytest.raises(DistStoreError, match="answer: timeout"):
        _received(Signs(1, 2, 2, 3), "answer", nullcontext)
    monkeypatch.setattr("megatron_terapipe.training.first_rank._COUNT_S", 0.01)
    launch, store = LaunchEnvironment(rank=0, world_size=2, local_rank=0, local_size=2), Signs(*range(1000))
    FirstRank._exchanged(store, launch, "answer", lambda: store.counted.wait(60), nullcontext)


@pytest.mark.parametrize(("size", "words", "asks"), [("2", "", True), ("2", "--dry-run", False), ("1", "", False)])
def test_single_ranks_and_dry_runs_search_by_themselves(
    size: str, words: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    config = parse_arguments(f"{RUN} --mock-data {words}".split())
    watch = Mock()
    assert (FirstRank(watch).ask(config) is not None) == watch.called == asks
