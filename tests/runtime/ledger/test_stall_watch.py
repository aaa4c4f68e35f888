"""The threads that look after ranks, each with a ledger and a store but no pipeline."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import gpipe
from deepspeed_ext.runtime.health import stall_watch
from deepspeed_ext.runtime.health.ledger import OpLedger
from deepspeed_ext.runtime.health.stall_watch import StallWatch

PROGRAMS = lower(gpipe, PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2))
TIMEOUT = timedelta(seconds=0.4)
HOST = socket.gethostname()


class Rank:
    """A rank that does nothing, under watch."""

    def __init__(self, number: int, store: object, directory: Path, *, world_size: int = 2) -> None:
        self.ledger, self.lines, self.ended = OpLedger(number), [], threading.Event()
        self.told: list[str] = []
        self.ledger.begin("train step 1", PROGRAMS[number].instructions)
        self.watch = StallWatch(
            self.ledger,
            rank=number,
            world_size=world_size,
            store=store,
            timeout=TIMEOUT,
            directory=directory,
            say=self.lines.append,
            end=self.ended.set,
            ending=self.told.append,
        )


@contextmanager
def ranks(directory: Path, store: object | None = None) -> Iterator[tuple[Rank, Rank]]:
    store = store or dist.HashStore()
    first, second = Rank(0, store, directory), Rank(1, store, directory)
    try:
        yield first, second
    finally:
        for rank in (first, second):
            rank.watch.end()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def test_a_run_that_stands_still_is_explained_once_and_ends_on_all_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path) as both:
        with both[0].ledger.waiting_for(1):
            until(lambda: both[0].ended.is_set() and both[1].ended.is_set())
        (line,) = both[0].lines + both[1].lines
    behind = f"the run stands still: rank 1 (host {HOST}) is behind: rank 1 is at"
    assert line.startswith(f"error: {behind}")
    assert both[0].told and both[0].told[0].startswith(behind)
    assert not both[1].told or both[1].lines
    assert line.endswith(f"; the ledger of each rank is in {tmp_path}: start it again")
    for number in (0, 1):
        written = json.loads((tmp_path / f"rank_{number:05d}.json").read_text())
        assert written["behind"] in line and written["stack"]
        assert written["position"]["code"]
    assert json.loads((tmp_path / "rank_00000.json").read_text())["position"]["seconds"] > 0


def test_ranks_that_take_long_alike_go_on(tmp_path: Path) -> None:
    with ranks(tmp_path) as both:
        time.sleep(2 * TIMEOUT.total_seconds())
        assert not any(rank.lines or rank.ended.is_set() for rank in both)
        # They have been asked in the meantime, and are watched on.
        with both[1].ledger.waiting_for(0):
            until(lambda: all(rank.ended.is_set() for rank in both))
    assert f"rank 0 (host {HOST}) is behind" in (both[0].lines + both[1].lines)[0]


def test_a_rank_that_moves_again_in_time_is_left_alone(tmp_path: Path) -> None:
    with ranks(tmp_path) as both:
        deadline = time.monotonic() + 2 * TIMEOUT.total_seconds()
        while time.monotonic() < deadline:
            with both[0].ledger.phase("saving"), both[0].ledger.waiting_for(1):
                time.sleep(0.01)
        assert not any(rank.lines or rank.ended.is_set() for rank in both)


def test_a_rank_that_gives_no_sign_of_life_is_named(tmp_path: Path) -> None:
    """Rank 1 has no watch: its process was stopped before it began."""
    alone = Rank(0, dist.HashStore(), tmp_path)
    with alone.ledger.phase("building the engine"):
        until(alone.ended.is_set)
    assert "rank 1 is behind: it gives no sign of life; rank 0 is at 'building the engine' since" in alone.lines[0]
    alone.watch.end()


def test_the_line_is_said_where_no_ledger_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    alone = Rank(0, dist.HashStore(), tmp_path / "file")
    until(alone.ended.is_set)
    assert f"ledgers cannot be written to {tmp_path / 'file'} (File exists)" in alone.lines[0]
    alone.watch.end()


def test_nothing_is_left_of_a_watch_that_ended(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    watched = Rank(0, dist.HashStore(), tmp_path)
    assert [thread.name for thread in threading.enumerate() if thread not in before] == ["stall watch"] * 2
    watched.watch.end()
    assert before.issuperset(threading.enumerate())


def test_a_rank_that_is_alone_is_not_watched(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    watched = Rank(0, dist.HashStore(), tmp_path, world_size=1)
    assert before.issuperset(threading.enumerate())
    watched.watch.end()


def test_its_threads_ask_the_device_of_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, int]] = []

    def set_device(index: int) -> None:
        chosen.append((threading.current_thread().name, index))

    monkeypatch.setattr(
        stall_watch, "get_accelerator", lambda: SimpleNamespace(current_device=lambda: 3, set_device=set_device)
    )
    watched = Rank(0, dist.HashStore(), tmp_path)
    watched.watch.end()
    assert chosen == [("stall watch", 3)] * 2


@pytest.mark.parametrize("error", [RuntimeError, dist.DistNetworkError], ids=str)
def test_a_store_that_is_gone_is_not_asked_again(tmp_path: Path, error: type[Exception]) -> None:
    class Gone:
        asked = 0

        def set(self, key: str, value: str) -> None:
            raise error("the store is gone")

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            raise error("the store is gone")

    store = Gone()
    watched = Rank(1, store, tmp_path)
    until(watched.ended.is_set)
    assert store.asked == 1
    assert "rank 0 is behind" in watched.lines[0]
    watched.watch.end()


class SilentStore:
    """A store whose keeper has stopped: a question to it is not answered."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def set(self, key: str, value: str) -> None:
        """Goes out, into the void."""

    def check(self, keys: list[str]) -> bool:
        self.goes_on.wait()
        raise RuntimeError("connection reset by peer")


def test_where_the_store_is_silent_a_rank_says_what_it_knows(tmp_path: Path) -> None:
    store = SilentStore()
    stuck = Rank(1, store, tmp_path)
    until(stuck.ended.is_set)
    assert stuck.lines[0].startswith("error: the run stands still: rank 0 is behind: its host keeps the store")
    assert (tmp_path / "rank_00001.json").exists()
    store.goes_on.set()
    stuck.watch.end()


def test_a_process_that_was_stopped_has_not_waited_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All were stopped, as by Ctrl-Z, and go on: nobody has waited for anybody."""
    skipped = 0.0
    monkeypatch.setattr(stall_watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + skipped))
    with ranks(tmp_path) as both:
        with both[0].ledger.waiting_for(1):
            time.sleep(0.1)
            skipped = 1000.0
            time.sleep(0.1)
        both[0].ledger.done()
        assert not any(rank.lines for rank in both)
