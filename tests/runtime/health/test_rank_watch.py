"""The end of a launcher or of another rank ends a rank, in one line; sleeping processes take their place."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from deepspeed_ext.runtime.health import rank_watch
from deepspeed_ext.runtime.health.processes import (
    STALLED,
    Ancestor,
    HostRank,
    HostRanks,
    ProcessEnds,
    RankMark,
    start_of,
)
from deepspeed_ext.runtime.health.rank_watch import TERMINATED, Lost, RankWatch, _SignsOfLife
from deepspeed_ext.runtime.launch import LaunchEnvironment, MeetingError

SOON_S = 20
"""Longer than anything here takes on a busy machine."""


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Rank:
    """The watch of this process as rank `local_rank` of two on this host, and its results."""

    def __init__(self, folder: Path, local_rank: int = 0, **keywords: object) -> None:
        self.lines: list[str] = []
        self.code: int | None = None
        self._left = threading.Event()
        self.page = HostRanks(folder / "page", 2)
        world_size = keywords.pop("world_size", 2)
        place = LaunchEnvironment(rank=local_rank, world_size=world_size, local_rank=local_rank, local_size=2)
        self.watch = RankWatch(
            place,
            **{"launch": (), "host": self.page, "remedy": lambda: "REMEDY"} | keywords,
            report=self.lines.append,
            leave=self._leave,
        )

    def _leave(self, code: int) -> None:
        self.code = self.code or code
        self._left.set()

    def left(self) -> int | None:
        assert self._left.wait(SOON_S)
        return self.code


def until(condition: Callable[[], bool]) -> None:
    tries = threading.Event()
    for _ in range(100 * SOON_S):
        if condition():
            return
        tries.wait(0.01)
    raise AssertionError("it never happened")


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_dead_rank_is_named_by_the_remaining_one(tmp_path: Path, local_rank: int) -> None:
    rank, other = Rank(tmp_path, local_rank), 1 - local_rank
    with sleeper() as process, rank.watch as watch:
        rank.page.write(other, HostRank(other, process.pid, RankMark.HERE))
        process.kill()
        until(lambda: bool(rank.lines))
        assert re.fullmatch(rf"error: rank {other} \(host \S+, process {process.pid}\) died: REMEDY", rank.lines[0])
        assert watch.lost is not None
    assert len(rank.lines) == 1


@pytest.mark.parametrize(("mark", "ends"), [(RankMark.DONE, False), (RankMark.ENDING, True)], ids=["done", "ending"])
def test_a_rank_that_has_reported_its_end_is_not_named(tmp_path: Path, mark: RankMark, ends: bool) -> None:
    rank = Rank(tmp_path)
    rank.page.write(1, HostRank(1, os.getpid(), mark))
    rank.watch._look_at_others(ended={1})
    assert (rank.watch.lost is not None, rank.lines) == (ends, [])


def test_a_rank_that_died_before_it_was_looked_at_is_named(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    with sleeper() as process:
        process.kill()
        process.wait()
        rank.page.write(1, HostRank(1, process.pid, RankMark.HERE))
        with rank.watch:
            until(lambda: bool(rank.lines))


def launcher_of(process: subprocess.Popen[bytes], program: str) -> Ancestor:
    return Ancestor(process.pid, (program,), start_of(process.pid) or 0.0)


def test_a_launcher_that_dies_ends_its_rank_and_the_command_above_it(tmp_path: Path) -> None:
    with sleeper() as launcher, sleeper() as command:
        launch = (launcher_of(launcher, "deepspeed.launcher.launch"), launcher_of(command, "deepspeed"))
        rank = Rank(tmp_path, launch=launch)
        with rank.watch:
            launcher.kill()
            assert rank.left() == TERMINATED
            assert command.wait(SOON_S) == -signal.SIGTERM
        pattern = (
            rf"error: the launcher deepspeed.launcher.launch \(host \S+, process {launcher.pid}\) is gone, .*REMEDY"
        )
        assert re.fullmatch(pattern, rank.lines[0])


def test_a_handler_of_sigterm_is_called(tmp_path: Path) -> None:
    asked = threading.Event()
    with sleeper() as launcher:
        rank = Rank(tmp_path, launch=(launcher_of(launcher, "torchrun"),))
        with rank.watch:
            # Stays to the end of the watch, which gives back the handler of before.
            signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
            launcher.kill()
            assert asked.wait(SOON_S)
        assert rank.code is None
    (line,) = rank.lines
    assert line.endswith("without it: the run ends after this iteration, with a checkpoint if --save is given")


def test_a_rank_whose_launcher_has_ended_ends(tmp_path: Path) -> None:
    rank = Rank(tmp_path, orphan=True)
    with rank.watch:
        assert rank.left() == TERMINATED


def test_sigterm_ends_a_rank_whose_main_thread_hangs(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    with rank.watch as watch:
        watch._waking.send(bytes([signal.SIGTERM]))  # as the system does, before Python calls any handler
        assert rank.left() == TERMINATED
        assert rank.page.read()[0].mark is RankMark.ENDING
        assert watch.lost is None
    (line,) = rank.lines
    pattern = r"error: rank 0 \(host \S+, process \d+\) received SIGTERM, directly or from its launcher: REMEDY"
    assert re.fullmatch(pattern, line)


def test_ranks_end_whose_call_to_a_lost_store_does_not_return(tmp_path: Path) -> None:
    one, other = (Rank(tmp_path, place) for place in (0, 1))
    with one.watch as watch:
        with watch.limit(SOON_S, "not this one"):
            pass
        with watch.limit(0.01, "the ranks did not meet"):
            assert one.left() == STALLED
        with other.watch, other.watch.limit(0.01, "the ranks did not meet"):
            assert other.left() == STALLED
    assert (one.lines, other.lines) == (["error: the ranks did not meet"], [])


def test_a_rank_that_died_is_named_and_not_the_connection_that_it_closed(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    with pytest.raises(MeetingError), sleeper() as process, rank.watch:
        rank.page.write(1, HostRank(1, process.pid, RankMark.HERE))
        threading.Timer(0.1, process.kill).start()
        raise MeetingError("connection closed")
    assert len(rank.lines) == 1 and not rank.watch.ends_first


@pytest.mark.parametrize("mark", [RankMark.ENDING, RankMark.HERE], ids=["ended", "died"])
def test_sigterm_after_the_end_of_another_rank_is_not_printed(tmp_path: Path, mark: RankMark) -> None:
    """A launcher ends all ranks when one has ended."""
    rank = Rank(tmp_path)
    with sleeper() as process:
        process.kill()
        process.wait()
        rank.page.write(1, HostRank(1, process.pid, mark))
    rank.watch._terminated(signal.SIGTERM, None)
    assert (rank.code, rank.lines) == (TERMINATED, [])


def test_of_ranks_that_get_sigterm_together_one_prints(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, place) for place in (0, 1)]
    for place, rank in enumerate(ranks):
        rank.page.write(place, HostRank(place, os.getpid(), RankMark.HERE))
    threads = [threading.Thread(target=rank.watch._terminated, args=(signal.SIGTERM, None)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [rank.code for rank in ranks] == [TERMINATED, TERMINATED]
    assert sum(len(rank.lines) for rank in ranks) == 1


def test_ctrl_c_is_reported_at_once_and_sigterm_after_it_ends_a_rank_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_watch, "_PATIENCE_S", 0.2)
    lines: list[str] = []
    rank = Rank(tmp_path, interrupted=partial(lines.append, "interrupted"))
    with rank.watch as watch, sleeper() as process:
        watch._waking.send(bytes([signal.SIGINT]))
        until(lambda: lines == ["interrupted"])
        watch._waking.send(bytes([signal.SIGINT]))
        # The other rank ends first, as by Ctrl-C.
        rank.page.write(1, HostRank(1, process.pid, RankMark.ENDING))
        process.kill()
        process.wait()
        watch._waking.send(bytes([0]))
        watch._look_at_others({1})
        watch._waking.send(bytes([signal.SIGTERM]))
        assert rank.left() == TERMINATED, "it hangs"
    assert (lines, rank.lines) == (["interrupted"], [])


def test_the_end_of_a_launcher_by_ctrl_c_is_not_an_error(tmp_path: Path) -> None:
    with sleeper() as process:
        launch = (Ancestor(process.pid, ("deepspeed",), start_of(process.pid)),)
        rank = Rank(tmp_path, launch=launch)
        with rank.watch as watch:
            watch._waking.send(bytes([signal.SIGINT]))
            process.kill()
            process.wait()
            assert rank.left() == TERMINATED
    assert rank.lines == []


@pytest.mark.parametrize("local_rank", [0, 1])
def test_ranks_wait_for_each_other_at_the_end(tmp_path: Path, local_rank: int) -> None:
    rank, other = Rank(tmp_path, local_rank), 1 - local_rank
    assert rank.watch.late_ranks(0.0) == {}, "the other one has not started"
    rank.page.write(other, HostRank(other, os.getpid(), RankMark.HERE))
    assert rank.watch.late_ranks(0.2) == {other: other}
    assert rank.page.read()[local_rank].mark is RankMark.DONE
    done = threading.Timer(0.2, rank.page.write, (other, HostRank(other, os.getpid(), RankMark.DONE)))
    done.start()
    assert rank.watch.late_ranks(SOON_S) == {}


def test_the_end_is_marked_and_the_handler_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    rank = Rank(tmp_path)
    with rank.watch:
        assert rank.page.read() == {0: HostRank(0, os.getpid(), RankMark.HERE)}
    assert rank.page.read()[0].mark is RankMark.DONE
    assert signal.getsignal(signal.SIGTERM) == before
    failing = Rank(tmp_path)
    with pytest.raises(KeyError), failing.watch:
        raise KeyError
    later = Rank(tmp_path, 1, host=failing.page)
    with pytest.raises(KeyError), later.watch:
        raise KeyError
    assert failing.page.read()[0].mark is RankMark.ENDING
    assert [each.watch.ends_first for each in (rank, failing, later)] == [False, True, False]


def test_another_host_receives_the_loss_and_prints_nothing(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SOON_S))
    names = make(tmp_path, "here", "there")
    here, there = (Rank(tmp_path / name, place, world_size=4) for place, name in zip((1, 0), names, strict=True))
    with sleeper() as process, there.watch:
        there.watch.meet("127.0.0.1", store.port)
        # Two watches of one process: signals are the inner one's.
        with here.watch:
            here.watch.meet("127.0.0.1", store.port)
            here.page.write(0, HostRank(0, process.pid, RankMark.HERE))
            process.kill()
            until(lambda: there.watch.lost is not None)
    assert f"process {process.pid}) died" in there.watch.lost.text
    assert (len(here.lines), there.lines) == (1, [])


def test_other_hosts_are_notified_before_the_rank_leaves(tmp_path: Path) -> None:
    rank, came = Rank(tmp_path), []
    # It still prints when the main thread leaves.
    rank.watch._report = lambda line: rank.watch._left.wait(SOON_S)
    calls = {name: partial(came.append, name) for name in ("end", "join")}
    rank.watch._news = SimpleNamespace(send=lambda loss: came.append("send"), **calls)
    with sleeper() as process, rank.watch as watch:
        rank.page.write(1, HostRank(1, process.pid, RankMark.HERE))
        process.kill()
        until(lambda: watch.lost is not None)
    assert came == ["send", "end", "join"]


def test_a_lost_store_is_named_but_not_after_the_end(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SOON_S))
    lost, parted = (Rank(tmp_path / name, world_size=4) for name in make(tmp_path, "lost", "parted"))
    port = store.port
    with lost.watch:
        lost.watch.meet("127.0.0.1", port)
        until(lambda: lost.watch._news.connected)
        with parted.watch:
            parted.watch.meet("127.0.0.1", port)
            until(lambda: parted.watch._news.connected)
            parted.watch.part()
            del store
            until(lambda: lost.watch.lost is not None)
    assert lost.lines == [f"error: the store of rank 0 at 127.0.0.1:{port}, where the ranks met, is gone: REMEDY"]
    assert (parted.watch.lost, parted.lines) == (None, [])


def test_a_dead_host_is_named_once_a_connection_is_lost(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SOON_S))
    dead, living = (_SignsOfLife(store, "prefix", name) for name in ("rank 4 (host b)", "rank 0 (host a)"))
    assert dead.write_and_read(compare=False) == ""
    assert living.write_and_read(compare=True) == ""
    living._since_s -= 100.0
    assert living.write_and_read(compare=True) == "rank 4 (host b)"
    dead.write_and_read(compare=False)
    assert living.write_and_read(compare=True) == ""


def make(folder: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        (folder / name).mkdir()
    return names


def test_ends_of_processes() -> None:
    reading, writing = os.pipe()
    ends = ProcessEnds(reading)
    with sleeper() as first, sleeper() as second:
        ends.add(1, first.pid)
        ends.add(2, second.pid)
        ends.add(3, second.pid, start=1.0)
        assert ends.wait(0.0) == {3}, "a later process of that number"
        second.kill()
        until(lambda: ends.wait(1.0) == {2, 3})
        second.wait()
        ends.add(4, second.pid)
        assert 4 in ends.wait(0.0), "it has ended long ago"
        os.write(writing, b"\0")
        assert 1 not in ends.wait(600.0), "a byte ends the wait"
    os.close(reading)
    os.close(writing)


def test_the_reason_is_reported_before_a_rank_leaves(tmp_path: Path) -> None:
    reported: list[object] = []
    rank = Rank(tmp_path, ending=lambda reason, failed: reported.append((reason, failed, rank.code)))
    with rank.watch as watch:
        watch._terminated(signal.SIGTERM, None)
        assert reported == [("terminated by SIGTERM", False, None)]
        watch._conclude(Lost("rank 1 died"), prints=True)
        watch._terminated(signal.SIGTERM, None)
    assert reported[1:] == [("rank 1 died", True, TERMINATED)]


def test_of_other_ranks_the_one_that_prints_reports(tmp_path: Path) -> None:
    reported: list[object] = []
    rank = Rank(tmp_path, local_rank=1, ending=lambda reason, failed: reported.append(reason))
    with rank.watch as watch:
        watch._terminated(signal.SIGTERM, None)
        assert (reported, rank.left(), watch.reports_end) == ([], TERMINATED, False)
        watch._conclude(Lost("rank 0 died"), prints=True)
        assert watch.reports_end
        watch._terminated(signal.SIGTERM, None)
    assert reported == ["rank 0 died"]
