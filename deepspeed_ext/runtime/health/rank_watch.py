"""Watches the processes around a rank: when its launcher or another rank dies, reports which, and ends this rank.

A thread of every rank waits for the end of two kinds of processes (`processes.py`):

    the launch of the rank (`own_launch`)         gone: this rank ends
    the other ranks of the host (`HostRanks`)     gone without a word: the first one left reports which, and all end

The thread needs neither the main thread, which may hang in a call that never returns, nor a network. Where ranks are on
several hosts, `HostNews` tells the others, over the store where all ranks meet. One rank of each host listens, the
first; a second connection of every rank would be too many for the rank that keeps the store. It has a connection and a
thread of its own: the connection of the process group is locked while the main thread waits for another rank, perhaps
the dead one.

A host on which no rank is left cannot report it. So the listening ranks also give signs of life. These are read only
once a rank has lost a connection: a rank that is only stopped is left to the stall watch.
"""

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Self

from deepspeed_ext.runtime.health.processes import (
    RUNNERS,
    Ancestor,
    HostRank,
    HostRanks,
    Mark,
    ProcessEnds,
    host_launcher,
    is_orphan,
    own_launch,
    page_of,
)
from deepspeed_ext.runtime.launch import LaunchEnvironment

__all__ = ["RankWatch", "watch_rank"]

_LOOK_AT_STORE_S = 1.0
"""Seconds between two looks at the store."""

_TELL_S = 2.0
"""Longest time to wait until news is stored: a store that lives answers sooner."""

_SILENT_S = 4.0
"""Seconds without a sign of life after which a rank is taken for dead, where a connection has been lost, too."""

_CONNECT_S = 5.0
"""Longest time of one attempt to connect."""

_PARTING_S = _CONNECT_S + 1.0
"""Longest time to wait for a thread that is to end: calls to a store that answers take less."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Somebody who is gone, so that the run ends."""

    what: str
    """Who, and how: the beginning of the line for the user."""
    said: bool = False
    """Whether a line for the user has been printed."""


class HostNews:
    """The connection of one rank to the store.

    Args:
        attempt: how often the ranks were started: a store may outlive them.
        heard: called with the news of another host, in the thread of the connection.
        keeps_store: whether this rank keeps the store, which is gone with it.
    """

    def __init__(self, attempt: str, *, heard: Callable[[Gone], object], keeps_store: bool) -> None:
        self._prefix, self._heard, self._keeps_store = f"liveness/{attempt}", heard, keeps_store
        self._key = f"{self._prefix}/gone"
        self._to_tell: queue.SimpleQueue[Gone | None] = queue.SimpleQueue()
        self._told, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.compares = False
        """Whether to find out whose signs of life have stopped, because a connection is lost."""
        self.connected = False
        """Whether this rank has reached the store."""

    def begin(self, address: str, port: int, *, name: str, listens: bool) -> None:
        """Connect as the rank `name`; one that does not listen connects only when it has something to tell."""
        arguments = (address, port, name, listens)
        self._thread = threading.Thread(target=self._run, args=arguments, name="news of other hosts", daemon=True)
        self._thread.start()

    def tell(self, gone: Gone) -> None:
        """Tell the other hosts, unless they cannot be reached."""
        if self._thread is None or self._ended.is_set():
            return
        self._to_tell.put(gone)
        if self._told.wait(_TELL_S) and self._keeps_store:
            time.sleep(2 * _LOOK_AT_STORE_S)  # They have yet to look.

    def end(self) -> None:
        """Hear nothing any more: the store may go."""
        self._ended.set()
        self._to_tell.put(None)

    def join(self) -> None:
        """Wait, after `end`, for the thread: one that is left in a call to the store takes the process down with it."""
        if self._thread is not None:
            self._thread.join(_PARTING_S)

    def _run(self, address: str, port: int, name: str, listens: bool) -> None:
        news = None if listens else self._to_tell.get()
        # Torch takes seconds to import, and the main thread has done it by now.
        from torch.distributed import TCPStore

        timeout, store = timedelta(seconds=_CONNECT_S), None
        while store is None:
            if self._ended.is_set():
                return
            with suppress(RuntimeError):
                store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        try:
            self._talk(store, news, _SignsOfLife(store, self._prefix, name) if listens else None)
        except RuntimeError:
            if not self._ended.is_set():
                self._heard(Gone(f"the store of rank 0 at {address}:{port}, where the ranks met, is gone"))

    def _talk(self, store: Any, news: Gone | None, signs: "_SignsOfLife | None") -> None:
        self.connected = True
        while not self._ended.is_set():
            if news is not None:
                store.compare_set(self._key, "", json.dumps(asdict(news)))
                self._told.set()
            elif store.check([self._key]):
                self._heard(Gone(**json.loads(store.get(self._key)) | {"said": True}))
                return
            elif signs is not None and (silent := signs.give_and_read(compare=self.compares)):
                own = json.dumps(asdict(Gone(f"{silent} died")))
                # Ranks of several hosts may find out; only the first one prints it.
                first = store.compare_set(self._key, "", own)
                self._heard(Gone(**json.loads(first) | {"said": first != own.encode()}))
                return
            news = None
            with suppress(queue.Empty):
                news = self._to_tell.get(timeout=_LOOK_AT_STORE_S)


class _SignsOfLife:
    """Signs of life of the ranks that listen, one of each host."""

    def __init__(self, store: Any, prefix: str, name: str) -> None:
        self._store, self._hosts, self._sign, self._name = store, f"{prefix}/hosts", f"{prefix}/sign of life/", name
        self._own = store.add(self._hosts, 1)
        self._given = 0
        self._before: dict[str, bytes] = {}
        self._since_s = 0.0

    def give_and_read(self, *, compare: bool) -> str:
        """Give a sign of life, and return the names of those that have given none for long, if that is asked for."""
        self._given += 1
        self._store.set(f"{self._sign}{self._own}", f"{self._given} {self._name}")
        if not compare:
            return ""
        others = (f"{self._sign}{host}" for host in range(1, self._store.add(self._hosts, 0) + 1) if host != self._own)
        signs = {key: self._store.get(key) for key in others if self._store.check([key])}
        if not self._before:
            self._before, self._since_s = signs, time.monotonic()
        if time.monotonic() < self._since_s + _SILENT_S:
            return ""
        silent = [sign.decode().split(" ", 1)[1] for key, sign in signs.items() if self._before.get(key) == sign]
        return " and ".join(silent)


ENDS_WITHIN_S = 30.0
"""Seconds after the death of a rank or a launcher in which all others have surely ended."""

_PATIENCE_S = 8.0
"""Seconds for a rank to end by itself, as by an error of its communication, before its process is ended."""

_REQUEST_S = 600.0
"""The same where the rank has a handler of its own for SIGTERM, which takes it for a request."""

_REPORTS_IN_S = 10.0
"""Seconds for a report of why this rank leaves at once; then it leaves without."""

_LOOK_FOR_RANKS_S = 0.5
"""Seconds between two looks for ranks of the host that have not come yet."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a rank that ends by SIGTERM, as shells give it."""

DIED_TOO = 1
"""Exit code of a rank that ends because another one is gone."""


class RankWatch:
    """The thread that looks after one rank. Enter and leave it in the main thread.

    Args:
        host: the page of the ranks of this host; None where there is none.
        attempt: how often the ranks were started, with launchers that start them again.
        orphan: whether its launcher is gone already.
        leave: ends the process with an exit code, at once.
        ending: told why the run ends, and whether something is wrong, before this rank leaves at once: on the first
            rank, and on one that prints the line because others are gone.
    """

    def __init__(
        self,
        place: LaunchEnvironment,
        *,
        launch: Sequence[Ancestor],
        host: HostRanks | None,
        attempt: str = "0",
        orphan: bool = False,
        remedy: Callable[[], str] = lambda: "start it again",
        say: Callable[[str], object] = lambda line: os.write(2, f"{line}\n".encode()),
        leave: Callable[[int], object] = os._exit,
        ending: Callable[[str, bool], object] = lambda why, failed: None,
    ) -> None:
        self.place, self.remedy = place, remedy
        self._launch, self._host, self._say, self._leave = launch, host, say, leave
        self.ending, self._orphan = ending, orphan
        self.tells_end = place.rank == 0
        """Whether this rank is the one that notes how the run ends."""
        self.gone: Gone | None = None
        """Who is gone, so that this rank ends; None while all are there."""
        self._concluding, self._known = threading.Lock(), threading.Event()
        self._left = threading.Event()
        self._wake, waking = socket.socketpair()
        self._waking = waking
        for each in (self._wake, waking):
            each.setblocking(False)
        self._ends: ProcessEnds[Ancestor | int] = ProcessEnds(self._wake.fileno())
        self._others: set[int] = set()
        self._news: HostNews | None = None
        if place.local_size < place.world_size:
            self._news = HostNews(attempt, heard=self._hear, keeps_store=place.rank == 0)
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)

    # ------------------------------------------------------------------ from start to end

    def __enter__(self) -> Self:
        """Look after this rank from now on."""
        self._mark(Mark.HERE)
        self._before = signal.signal(signal.SIGTERM, self._terminated)
        # Written to by the system when a signal comes, also while the main thread is in a call that never returns.
        self._waked_before = signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say how this rank ends, and look after it no more."""
        self._mark(Mark.DONE if kind is None else Mark.ENDING)
        self._left.set()
        with suppress(OSError):
            self._waking.send(b"\0")
        # A thread that has found out who is gone prints it and tells the other hosts before this rank ends.
        self._thread.join()
        with self._concluding:
            pass
        if self._news is not None:
            if kind is not None and self.gone is None:
                self._news.tell(Gone(f"rank {self.place.rank} (host {socket.gethostname()}) ended", said=True))
            self._news.end()
            self._news.join()
        signal.set_wakeup_fd(self._waked_before)
        signal.signal(signal.SIGTERM, self._before)
        self._wake.close()
        self._waking.close()

    def meet(self, address: str, port: int) -> None:
        """Exchange news with other hosts from now on, over the store where the ranks meet."""
        if self._news is not None:
            name = _name(self.place.rank, os.getpid())
            self._news.begin(address, port, name=name, listens=self.place.local_rank == 0)

    def reason_of_a_lost_connection(self, seconds: float) -> Gone | None:
        """Return who is gone, as soon as it is known; None if none is found within the time."""
        if self._news is not None:
            self._news.compares = True
        self._known.wait(seconds)
        return self.gone

    def part(self) -> None:
        """Take the ends of ranks on other hosts for orderly ones from now on; all ranks call it before a barrier."""
        if self._news is not None:
            self._news.end()

    def end_is_explained(self) -> None:
        """Mark this rank as about to end for a reason that has been printed."""
        self._mark(Mark.ENDING)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        for ancestor in self._launch:
            self._ends.add(ancestor, ancestor.pid, born=ancestor.born)
        try:
            if self._orphan:
                self._launcher_gone(None)
            while not self._left.is_set():
                complete = self._host is None or len(self._others) == self.place.local_size - 1
                self._look(self._ends.wait(60.0 if complete else _LOOK_FOR_RANKS_S))
        finally:
            self._ends.close()
            if self._host is not None:
                self._host.remove_file()

    def _look(self, ended: set[Ancestor | int]) -> None:
        if self._left.is_set():
            return
        with suppress(BlockingIOError):
            # A handler of the rank's own takes the signal for a request, and ends the rank in its time.
            if signal.SIGTERM in self._wake.recv(64) and signal.getsignal(signal.SIGTERM) == self._terminated:
                self._terminated(signal.SIGTERM, None)
        if self.gone is not None:
            return
        for ancestor in self._launch:
            if ancestor in ended:
                self._launcher_gone(ancestor)
                return
        self._look_at_others(ended)

    def _look_at_others(self, ended: set[Ancestor | int]) -> None:
        if self._host is None:
            return
        marks = {place: rank for place, rank in self._host.read().items() if place != self.place.local_rank}
        for place in marks.keys() - self._others:
            self._others.add(place)
            self._ends.add(place, marks[place].pid)
        for place, other in sorted(marks.items()):
            if place in ended and other.mark in (Mark.HERE, Mark.ENDING):
                # Of those that are left, only the first one prints.
                before = (each for each in marks if each < self.place.local_rank)
                first = all(each in ended and marks[each].mark is Mark.HERE for each in before)
                died, who = other.mark is Mark.HERE, _name(other.rank, other.pid)
                self._conclude(
                    Gone(f"{who} {'died' if died else 'ended'}", said=not died), says=first and died, tells=first
                )
                return

    def _launcher_gone(self, launcher: Ancestor | None) -> None:
        first = self.place.local_rank == 0
        process = "" if launcher is None else f", process {launcher.pid}"
        name = "the launcher" if launcher is None else f"the launcher {launcher.program}"
        # DeepSpeed's command ends with code 0, as if all were well, where its launcher was killed.
        for each in self._launch:
            if each is not launcher and each.program in RUNNERS:
                with suppress(OSError):
                    os.kill(each.pid, signal.SIGTERM)
        gone = Gone(f"{name} (host {socket.gethostname()}{process}) is gone, and ranks do not train on without it")
        if signal.getsignal(signal.SIGTERM) == self._terminated:
            self._mark(Mark.ENDING)
            self._conclude(gone, says=first, tells=first)
            self._leave_told(gone.what, TERMINATED)
        else:
            self._conclude(gone, says=first, patience_s=_REQUEST_S)
            os.kill(os.getpid(), signal.SIGTERM)

    def _hear(self, gone: Gone) -> None:
        """Handle news of another host, or the loss of the store."""
        self._conclude(gone, says=not gone.said)

    def _conclude(
        self, gone: Gone, *, says: bool = False, tells: bool = False, patience_s: float = _PATIENCE_S
    ) -> None:
        """End this rank because somebody is gone: give it time to end by itself, and then none."""
        with self._concluding:
            if self.gone is not None:
                return
            self.gone = gone
            self.tells_end = self.tells_end or says
            self._known.set()
            # First of all: a line that is not read would block the thread that writes it.
            _after(patience_s, self._leave_told, gone.what, DIED_TOO)
            if says:
                with suppress(OSError):
                    self._say(f"error: {gone.what}: {self.remedy()}")
        if tells and self._news is not None:
            self._news.tell(gone)

    def _terminated(self, number: int, _: FrameType | None) -> None:
        self._mark(Mark.ENDING)
        if self._news is not None and self.place.local_rank == 0:
            self._news.tell(Gone(f"rank {self.place.rank} (host {socket.gethostname()}) was told to end"))
        if self.gone is None:
            self._leave_told("told to end by SIGTERM", TERMINATED, failed=False)
        else:
            self._leave_told(self.gone.what, TERMINATED)

    def _leave_told(self, why: str, code: int, *, failed: bool = True) -> None:
        """Leave at once, but for a report of why, which may not take for ever."""
        if self.tells_end:
            timer = _after(_REPORTS_IN_S, self._leave, code)
            with suppress(Exception):
                self.ending(why, failed)
            timer.cancel()
        self._leave(code)

    def _mark(self, mark: Mark) -> None:
        if self._host is not None:
            self._host.write(self.place.local_rank, HostRank(self.place.rank, os.getpid(), mark))
            # Nobody comes any more once a rank ends; and the last one to come leaves no file.
            self._host.read() if mark is Mark.HERE else self._host.remove_file()


def _after(seconds: float, function: Callable[..., object], *arguments: object) -> threading.Timer:
    """Call a function after some seconds, unless the process has ended or the timer is cancelled."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()
    return timer


def _name(rank: int, pid: int) -> str:
    """Return the name of a rank of this host, as a user reads it."""
    return f"rank {rank} (host {socket.gethostname()}, process {pid})"


def watch_rank(
    place: LaunchEnvironment,
    *,
    remedy: Callable[[], str],
    ending: Callable[[str, bool], object] = lambda why, failed: None,
) -> RankWatch:
    """Return the watch of this rank, as its launcher started it; `remedy` and `ending` as in `RankWatch`."""
    launch, attempt = own_launch(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    launcher = host_launcher(launch)
    return RankWatch(
        place,
        launch=launch,
        host=None if launcher is None else page_of(launcher, place.local_size, attempt),
        attempt=attempt,
        orphan=is_orphan(launch),
        remedy=remedy,
        ending=ending,
    )
