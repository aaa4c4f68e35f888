"""The threads that look after ranks, each with a ledger and a store but no pipeline."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import gpipe
from deepspeed_ext.runtime.ledger import stall_watch
from deepspeed_ext.runtime.ledger.op_ledger import OpLedger
from deepspeed_ext.runtime.ledger.stall_watch import StallWatch

PROGRAMS = lower(gpipe, PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2))
TIMEOUT = timedelta(seconds=0.25)


def watch(
    ledger: OpLedger, rank: int, lines: list[str], directory: Path, *, name: str = "a", store: object
) -> StallWatch:
    ledger.begin("train step 1", PROGRAMS[rank].instructions)
    return StallWatch(
        ledger, rank=rank, peers=(0, 1), name=name, store=store, timeout=TIMEOUT, directory=directory, say=lines.append
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def test_a_pipeline_that_goes_on_is_watched_on(tmp_path: Path) -> None:
    store, lines, ledgers = dist.HashStore(), [], [OpLedger(0), OpLedger(1)]
    watches = [watch(ledger, rank, lines, tmp_path, store=store) for rank, ledger in enumerate(ledgers)]
    for number in (1, 2):
        with ledgers[0].waiting_for(1):
            until(lambda number=number: len(lines) == number)
            # It stands where it stood when that was said: once is enough.
            time.sleep(3 * TIMEOUT.total_seconds())
            assert len(lines) == number
        ledgers[0].done()
    assert all("rank 1 is behind" in line for line in lines)
    for each in watches:
        each.end()


def test_other_pipelines_are_not_asked(tmp_path: Path) -> None:
    store, lines, ledgers = dist.HashStore(), [], [OpLedger(0), OpLedger(1)]
    stuck = watch(ledgers[0], 0, lines, tmp_path / "stuck", store=store, name="a")
    other = watch(ledgers[1], 1, lines, tmp_path / "other", store=store, name="b")
    with ledgers[0].waiting_for(1):
        until(lambda: bool(lines))
    assert "rank 1 is behind: it gives no sign of life" in lines[0]
    assert not (tmp_path / "other").exists()
    stuck.end()
    other.end()


def test_the_line_is_said_where_no_ledger_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lines, ledger = [], OpLedger(0)
    watched = watch(ledger, 0, lines, tmp_path / "file", store=dist.HashStore())
    with ledger.waiting_for(1):
        until(lambda: bool(lines))
    assert f"ledgers cannot be written to {tmp_path / 'file'} (File exists)" in lines[0]
    watched.end()


def test_nothing_is_left_of_a_watch_that_ended(tmp_path: Path) -> None:
    before = threading.active_count()
    watched = watch(OpLedger(0), 0, [], tmp_path, store=dist.HashStore())
    assert threading.active_count() == before + 2
    watched.end()
    assert threading.active_count() == before


def test_its_threads_ask_the_device_of_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, int]] = []

    def set_device(index: int) -> None:
        chosen.append((threading.current_thread().name, index))

    monkeypatch.setattr(
        stall_watch, "get_accelerator", lambda: SimpleNamespace(current_device=lambda: 3, set_device=set_device)
    )
    watched = watch(OpLedger(0), 0, [], tmp_path, store=dist.HashStore())
    watched.end()
    assert chosen == [("stall watch", 3)] * 2


@pytest.mark.parametrize("error", [RuntimeError, dist.DistNetworkError], ids=str)
def test_a_store_that_is_gone_is_not_asked_again(tmp_path: Path, error: type[Exception]) -> None:
    class Gone:
        asked = 0

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            raise error("the store is gone")

    store, lines, ledger = Gone(), [], OpLedger(1)
    watched = watch(ledger, 1, lines, tmp_path, store=store)
    until(lambda: bool(store.asked))
    with ledger.waiting_for(0):
        until(lambda: bool(lines))
    assert store.asked == 1
    assert "rank 0 is behind" in lines[0]
    watched.end()


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
    store, lines, ledger = SilentStore(), [], OpLedger(1)
    stuck = watch(ledger, 1, lines, tmp_path, store=store)
    with ledger.waiting_for(0):
        until(lambda: bool(lines))
        time.sleep(3 * TIMEOUT.total_seconds())
    assert len(lines) == 1
    assert lines[0].startswith("the pipeline stands still: rank 0 is behind: it gives no sign of life; waiting: rank 1")
    assert (tmp_path / "rank_00001.json").exists()
    store.goes_on.set()
    stuck.end()
