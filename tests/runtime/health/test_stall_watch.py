"""The watch of a stalled run: its threads without a pipeline, its timer, and engines that hang."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import gpipe
from deepspeed_ext.runtime.health import stall_watch
from deepspeed_ext.runtime.health.ledger import Mark, OpLedger
from deepspeed_ext.runtime.health.stall_watch import StallWatch, watch_this_rank
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, build, feed

PROGRAMS = lower(gpipe, PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2))
TIMEOUT = timedelta(seconds=0.4)
HOST = socket.gethostname()


class Rank:
    """An idle rank with a watch."""

    def __init__(
        self,
        number: int,
        store: object,
        directory: Path,
        *,
        world_size: int = 2,
        mark: Mark | None = None,
        connect: Callable[[], object] | None = None,
    ) -> None:
        self.ledger, self.lines, self.ended = OpLedger(number, mark), [], threading.Event()
        self.reasons: list[str] = []
        self.ledger.begin("train step 1", PROGRAMS[number].instructions)
        self.watch = StallWatch(
            self.ledger,
            rank=number,
            world_size=world_size,
            connect=connect or (lambda: store),
            timeout=TIMEOUT,
            directory=directory,
            report=self.lines.append,
            end=self.ended.set,
            ending=self.reasons.append,
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
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_a_stall_is_explained_once_and_ends_all_ranks(tmp_path: Path) -> None:
    with ranks(tmp_path) as both:
        with both[0].ledger.waiting_for(1):
            until(lambda: both[0].ended.is_set() and both[1].ended.is_set())
        (line,) = both[0].lines + both[1].lines
    reason = f"the run has stalled: rank 1 (host {HOST}) blocks the run: rank 1 is at"
    assert line.startswith(f"error: {reason}")
    assert both[0].reasons and both[0].reasons[0].startswith(reason)
    assert not both[1].reasons or both[1].lines
    assert line.endswith(f"; the ledger of each rank is in {tmp_path}: start it again")
    for number in (0, 1):
        written = json.loads((tmp_path / f"rank_{number:05d}.json").read_text())
        assert written["behind"] in line and written["stack"]
        assert written["position"]["code"]
    assert json.loads((tmp_path / "rank_00000.json").read_text())["position"]["seconds"] > 0


def test_ranks_that_are_slow_together_continue(tmp_path: Path) -> None:
    with ranks(tmp_path) as both:
        time.sleep(2 * TIMEOUT.total_seconds())
        assert not any(rank.lines or rank.ended.is_set() for rank in both)
        # There was a roll call in the meantime, and they are watched further.
        with both[1].ledger.waiting_for(0):
            until(lambda: all(rank.ended.is_set() for rank in both))
    assert f"rank 0 (host {HOST}) blocks the run" in (both[0].lines + both[1].lines)[0]


def test_a_rank_that_proceeds_in_time_continues(tmp_path: Path) -> None:
    with ranks(tmp_path) as both:
        deadline = time.monotonic() + 2 * TIMEOUT.total_seconds()
        while time.monotonic() < deadline:
            with both[0].ledger.phase("saving"), both[0].ledger.waiting_for(1):
                time.sleep(0.01)
        assert not any(rank.lines or rank.ended.is_set() for rank in both)


def test_a_rank_that_is_not_done_is_named(tmp_path: Path) -> None:
    with ranks(tmp_path) as both:
        for rank in both:
            with rank.ledger.phase("leaving the process group"):
                rank.watch.conclude_silent([2], prints=rank is both[0])
    assert both[0].ended.is_set() and both[1].ended.is_set() and not both[1].lines
    assert f"rank 2 (host {HOST}) blocks the run: it gives no sign of life; rank 0 is at '" in both[0].lines[0]


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        # Rank 1 has no watch: its process was stopped before it began.
        ("ledgers", "rank 1 blocks the run: it gives no sign of life; rank 0 is at 'building the engine' since"),
        ("file", "ledgers cannot be written to {} (File exists)"),
    ],
)
def test_a_rank_that_is_left_over_names_the_other(tmp_path: Path, folder: str, words: str) -> None:
    (tmp_path / "file").touch()
    left = Rank(0, dist.HashStore(), tmp_path / folder)
    with left.ledger.phase("building the engine"):
        until(left.ended.is_set)
    assert words.format(tmp_path / folder) in left.lines[0]
    left.watch.end()


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_ranks_are_watched_and_an_ended_watch_leaves_no_thread(tmp_path: Path, world_size: int) -> None:
    before = {*threading.enumerate()}
    watched = Rank(0, dist.HashStore(), tmp_path, world_size=world_size)
    begun = [thread.name for thread in threading.enumerate() if thread not in before]
    assert begun == ["stall watch"] * 2 * (world_size > 1)
    watched.watch.end()
    assert before.issuperset(threading.enumerate())


def test_the_thread_that_follows_the_device_uses_that_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[tuple[str, int]] = []

    def set_device(index: int) -> None:
        chosen.append((threading.current_thread().name, index))

    monkeypatch.setattr(
        stall_watch, "get_accelerator", lambda: SimpleNamespace(current_device=lambda: 3, set_device=set_device)
    )
    for mark in (None, lambda: lambda: None):
        Rank(0, dist.HashStore(), tmp_path, mark=mark).watch.end()
    assert chosen == [("stall watch", 3)]


@pytest.mark.parametrize("error", [RuntimeError, dist.DistNetworkError], ids=str)
def test_a_lost_store_is_not_used_again(tmp_path: Path, error: type[Exception]) -> None:
    class Gone:
        asked = 0

        def set(self, key: str, value: str) -> None:
            """It is gone later."""

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            raise error("the store is gone")

    store = Gone()
    watched = Rank(1, store, tmp_path)
    until(watched.ended.is_set)
    assert store.asked == 1
    assert "rank 0 blocks the run" in watched.lines[0]
    watched.watch.end()


class SilentStore:
    """A store whose rank has stopped."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def set(self, key: str, value: str) -> None:
        """Never read."""

    def check(self, keys: list[str]) -> bool:
        self.goes_on.wait()
        raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize("connects", [True, False])
def test_a_silent_store_is_reported(tmp_path: Path, connects: bool) -> None:
    store = SilentStore()
    stuck = Rank(1, store, tmp_path, connect=None if connects else lambda: store.check([]))
    until(stuck.ended.is_set)
    assert stuck.lines[0].startswith("error: the run has stalled: rank 0 blocks the run: its host serves the store")
    assert (tmp_path / "rank_00001.json").exists()
    store.goes_on.set()
    stuck.watch.end()


def test_a_process_that_was_stopped_has_not_waited_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All were stopped, as by Ctrl-Z, and continue: none has waited for another."""
    skipped = 0.0
    monkeypatch.setattr(stall_watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + skipped))
    with ranks(tmp_path) as both:
        with both[0].ledger.waiting_for(1):
            time.sleep(0.1)
            skipped = 1000.0
            time.sleep(0.1)
        both[0].ledger.done()
        assert not any(rank.lines for rank in both)


STOPPED = """
import ctypes, os, signal, sys, time
from datetime import timedelta
from deepspeed_ext.runtime.health import rank_watch
from deepspeed_ext.runtime.health.processes import KillTimer
from deepspeed_ext.runtime.launch import LaunchEnvironment

if sys.argv[1] == "rank":
    rank_watch.KILLED_AFTER_S = 0.6
    with rank_watch.RankWatch(LaunchEnvironment.first_of(2), launch=(), host=None, timeout=timedelta(seconds=0.4)):
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGSTOP)
timer = KillTimer()
timer.set(1.0)
timer.set(600.0)  # A busy host may not come back to this process for a while, but hardly between two lines.
time.sleep(1.1)
if sys.argv[1] == "end":
    timer.set(1.0)
    timer.end()
    time.sleep(1.1)
    sys.exit(0)
if sys.argv[1] == "lock":
    timer.set(1.0)
    ctypes.PyDLL(None).sleep(60)  # a call that holds the lock of Python's interpreter
child = os.fork()
if child == 0:
    timer.set(0.2)  # that of the parent is none of the child's
    time.sleep(0.4)
    os._exit(0)
assert os.waitpid(child, 0) == (child, 0)
timer.set(0.2, last=True)
timer.set(600.0)
os.kill(os.getpid(), signal.SIGSTOP)
"""


ENDINGS = {"stop": -signal.SIGKILL, "rank": -signal.SIGKILL, "lock": -signal.SIGKILL, "end": 0}


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A process for each ending, side by side: they mostly wait."""
    command = [sys.executable, "-c", STOPPED]
    started = {ending: subprocess.Popen([*command, ending], stderr=subprocess.PIPE) for ending in ENDINGS}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_timer_kills_unless_it_is_set_again(ending: str, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    _, errors = processes[ending].communicate(timeout=60)
    assert processes[ending].returncode == ENDINGS[ending]
    # No thread of Python prints stacks while the lock is held.
    assert (b"most recent call first" in errors) == (ending == "lock")


TIMEOUT_OF_ENGINES = timedelta(seconds=2)
LONGEST_S = 30


def compute(reported: threading.Event) -> None:
    """Compute until the line is printed."""
    assert reported.wait(LONGEST_S)


def stop(reported: threading.Event) -> None:
    """Stop as a process whose node has failed: none of its threads runs, until others have ended."""
    until_then = (
        f"for i in $(seq {LONGEST_S}0); do test -e reported && break; sleep 0.1; done; kill -CONT {os.getpid()}"
    )
    subprocess.Popen(["sh", "-c", until_then])
    os.kill(os.getpid(), signal.SIGSTOP)


class Pausing(nn.Linear):
    """Does something else before its third token slice, on one rank."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__(models.HIDDEN, models.HIDDEN)
        self.pause, self.seen = pause, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        if self.seen == 3:
            self.pause()
        return super().forward(hidden)


def _watched(directory: str) -> tuple[StallWatch, threading.Event, list[str]]:
    """A watch that does not end the process, an event for that it would have, and its lines."""
    os.chdir(directory)
    lines: list[str] = []
    reported = threading.Event()

    def end() -> None:
        Path("reported").touch()
        reported.set()

    made = watch_this_rank(TIMEOUT_OF_ENGINES, Path(directory), name="test", end=end)
    made._report = lines.append
    dist.barrier()
    return made, reported, lines


def _trained(
    directory: str, setup: Setup, pausing_rank: int, pause: Callable[[threading.Event], None]
) -> tuple[list[str], str]:
    """Train a step in which a rank pauses: the lines of this rank."""
    watch, reported, lines = _watched(directory)
    pauses = (lambda: pause(reported)) if dist.get_rank() == pausing_rank else (lambda: None)
    layers = [LayerSpec(models.Embedding), LayerSpec(models.Block), LayerSpec(Pausing, pauses)]
    layers.append(LayerSpec(nn.Linear, models.HIDDEN, models.VOCAB))
    engine = build(
        setup,
        layers=layers,
        partition="0,2,3,4" if setup.pp == 3 else "parameters",
        # It would call the layer that counts.
        engine_keywords={"watch": watch, "check_token_slices": False},
    )
    engine.train_batch(feed(engine, setup))
    assert reported.wait(LONGEST_S)
    watch.end()
    return lines, ""


def _lines(results: list[tuple[list[str], str]]) -> list[str]:
    return [line for lines, _ in results for line in lines]


def _ledgers(directory: Path) -> dict[int, dict]:
    return {int(path.stem.removeprefix("rank_")): json.loads(path.read_text()) for path in directory.glob("*.json")}


def test_a_slow_rank_is_named_and_all_ranks_write_their_ledgers(tmp_path: Path) -> None:
    setup = Setup(pp=3, cut=(6, 6, 6, 6), micro_batches=1)
    (line,) = _lines(run_distributed(_trained, 3, str(tmp_path), setup, 1, compute))
    assert f"the run has stalled: rank 1 (host {HOST}) blocks the run: rank 1 is at 'forward 1F0.2" in line
    # Those that have waited long enough by then are named: on a busy host only one of them.
    assert re.search(r"\(train step 1, instruction .*; rank [02] is at '.*; the ledger of each rank is in", line)
    ledgers = _ledgers(tmp_path)
    assert ledgers.keys() == {0, 1, 2}
    assert (
        ledgers[1]["waiting"] | {"stage": 1, "micro_batch": 0, "token_slice": 2, "peer": None} == ledgers[1]["waiting"]
    )
    assert ledgers[2]["waiting"]["op"] == "2F0.2" and ledgers[2]["waiting"]["peer"] == 1
    assert "forward 2F0.1 @1" in ledgers[2]["done"]
    # What a rank has done, does, and has to do is its whole program.
    for ledger in ledgers.values():
        position = ledger["position"]
        assert len(ledger["done"]) == position["done"]
        assert len(ledger["done"]) + len(ledger["to_do"]) == position["total"]
        assert ledger["to_do"][0] == position["doing"]


def test_a_stopped_replica_is_named(tmp_path: Path) -> None:
    setup = Setup(dp=2, cut=(6, 6, 6, 6), micro_batches=1)
    lines = _lines(run_distributed(_trained, 2, str(tmp_path), setup, 1, stop))
    assert len(lines) == 1
    assert f"rank 1 (host {HOST}) blocks the run: it gives no sign of life; rank 0 is at 'sums" in lines[0]
    assert "for a collective of the replicas" not in lines[0]  # the collectives of rank 1 are unknown
    assert 0 in _ledgers(tmp_path)


def _ordinary(directory: str) -> tuple[list[str], str]:
    watch, reported, lines = _watched(directory)
    setup = Setup(pp=2, dp=2, cut=(6, 6, 6, 6), micro_batches=1)
    engine = build(setup, engine_keywords={"watch": watch})
    for step in range(2):
        engine.train_batch(feed(engine, setup, step=step))
    counts = json.dumps(engine.ledger.collectives.counts(), sort_keys=True)
    assert isinstance(engine.ledger, OpLedger) and not reported.is_set()
    watch.end()
    return lines, counts


def test_ranks_count_the_same_collectives(tmp_path: Path) -> None:
    results = run_distributed(_ordinary, 4, str(tmp_path))
    assert not _lines(results) and not _ledgers(tmp_path)
    counts = [json.loads(found) for _, found in results]
    # No rank has a lead in a group, by which it would seem to wait for the others.
    for first in counts:
        for other in counts:
            shared = first.keys() & other.keys()
            assert {name: first[name] for name in shared} == {name: other[name] for name in shared}
    assert any(name.startswith("replicas#") and count > 0 for name, count in counts[0].items())
