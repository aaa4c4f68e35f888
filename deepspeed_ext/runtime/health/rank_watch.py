"""Watches the processes around a rank: when its launcher or another rank dies, reports which, and ends this rank.

A thread of every rank waits for the end of two kinds of processes (`processes.py`):

    the launch of the rank (`own_launch`)         has ended: this rank ends
    the other ranks of the host (`HostRanks`)     one has ended without notice: the first remaining rank reports which,
                                                  and all end

The thread needs neither the main thread, which may hang in a call that never returns, nor a network. As long as it
runs, it sets a timer by which the kernel kills a rank that is stopped, also before the ranks have met.

Where ranks are on several hosts, `HostNews` notifies the others, over the store where all ranks meet. Only the first
rank of each host listens: a second connection of every rank would be too many for the rank that serves the store. It
has a connection and a thread of its own: the connection of the process group is locked while the main thread waits for
another rank, perhaps the dead one.

A host without living ranks cannot report it. So the listening ranks also write signs of life. These are compared only
once a rank has lost a connection: a rank that is only stopped is a case of the stall watch.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from math import inf
from types import FrameType, TracebackType
from typing import Any, Self

from deepspeed_ext.runtime.health.processes import (
    KILLED_AFTER_S,
    RUNNERS,
    STALLED,
    Ancestor,
    HostRank,
    HostRanks,
    KillTimer,
    ProcessEnds,
    RankMark,
    host_launcher,
    is_orphan,
    own_launch,
    page_of,
    start_of,
)
from deepspeed_ext.runtime.launch import LaunchEnvironment, MeetingError

__all__ = ["RankWatch", "watch_rank"]

_LOOK_AT_STORE_S = 1.0
"""Seconds between two looks at the store."""

_SEND_S = 2.0
"""Longest time to wait until news is stored: a living store answers sooner."""

_SILENT_S = 4.0
"""Seconds without a sign of life after which a rank counts as dead, if a connection was lost."""

_CONNECT_S = 5.0
"""Longest time of one attempt to connect."""

_JOIN_S = _CONNECT_S + 1.0
"""Longest time to wait for the end of the thread: calls to a living store take less."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The end of a process without which the run ends."""

    text: str
    """The process and how it ended: the beginning of the line for the user."""
    printed: bool = False
    """Whether a line for the user has been printed."""


class HostNews:
    """The connection of one rank to the store.

    Args:
        attempt: number of earlier starts: a store may outlive the ranks.
        received: called with the news of another host, in the thread of the connection.
        serves_store: whether this rank serves the store, which ends with it.
    """

    def __init__(self, attempt: str, *, received: Callable[[Lost], object], serves_store: bool) -> None:
        self._prefix, self._received, self._serves_store = f"liveness/{attempt}", received, serves_store
        self._key = f"{self._prefix}/gone"
        self._address: tuple[str, int] | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.compares = False
        """Whether to look for ranks without signs of life, because a connection was lost."""
        self.connected = False
        """Whether this rank has reached the store."""

    def begin(self, address: str, port: int, *, name: str, listens: bool) -> None:
        """Use the store at an address as the rank `name`; one that does not listen connects only to send."""
        self._address = address, port
        if listens:
            self._thread = threading.Thread(target=self._listen, args=(name,), name="news of other hosts", daemon=True)
            self._thread.start()

    def send(self, loss: Lost) -> None:
        """Notify the other hosts, unless they cannot be reached."""
        if self._address is None or self._ended.is_set():
            return
        with suppress(RuntimeError):
            self._connection(_SEND_S).compare_set(self._key, "", json.dumps(asdict(loss)))
            if self._serves_store:
                time.sleep(2 * _LOOK_AT_STORE_S)  # They have yet to look.

    def end(self) -> None:
        """Stop listening: the store may end."""
        self._ended.set()

    def join(self) -> None:
        """Wait, after `end`, for the thread: one that is in a call to the store would abort the process."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _connection(self, timeout_s: float) -> Any:
        # Torch takes seconds to import, which the main thread has done by now.
        from torch.distributed import TCPStore

        assert self._address is not None, "after `begin`"
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(*self._address, is_master=False, timeout=timeout, wait_for_workers=False)

    def _listen(self, name: str) -> None:
        store = None
        while store is None:
            if self._ended.is_set():
                return
            with suppress(RuntimeError):
                store = self._connection(_CONNECT_S)
        self.connected = True
        try:
            signs = _SignsOfLife(store, self._prefix, name)
            while not self._ended.is_set():
                if store.check([self._key]):
                    self._received(Lost(**json.loads(store.get(self._key)) | {"printed": True}))
                    return
                if silent := signs.write_and_read(compare=self.compares):
                    own = json.dumps(asdict(Lost(f"{silent} died")))
                    # Ranks of several hosts may find it; only the first one prints it.
                    first = store.compare_set(self._key, "", own)
                    self._received(Lost(**json.loads(first) | {"printed": first != own.encode()}))
                    return
                self._ended.wait(_LOOK_AT_STORE_S)
        except RuntimeError:
            if not self._ended.is_set():
                at = ":".join(map(str, self._address or ()))
                self._received(Lost(f"the store of rank 0 at {at}, where the ranks met, is gone"))


class _SignsOfLife:
    """Signs of life of the ranks that listen, one of each host."""

    def __init__(self, store: Any, prefix: str, name: str) -> None:
        self._store, self._hosts, self._sign, self._name = store, f"{prefix}/hosts", f"{prefix}/sign of life/", name
        self._own = store.add(self._hosts, 1)
        self._written = 0
        self._before: dict[str, bytes] = {}
        self._since_s = 0.0

    def write_and_read(self, *, compare: bool) -> str:
        """Write a sign of life; to compare, return the names of ranks that have written none for too long."""
        self._written += 1
        self._store.set(f"{self._sign}{self._own}", f"{self._written} {self._name}")
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


_PATIENCE_S = 8.0
"""Seconds for a rank to end by itself, as by an error of its communication, before its process is ended."""

_REQUEST_S = 600.0
"""The same where the rank handles SIGTERM as a request to end."""

_REPORTS_IN_S = 10.0
"""Longest time of a report before the rank exits."""

_LOOK_S = 60.0
"""Seconds between two looks at processes whose ends wake the thread."""

_LOOK_FOR_RANKS_S = 0.5
"""Seconds between two looks for ranks of the host that have not started yet."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a rank that ends by SIGTERM, as shells give it."""

LOST = 1
"""Exit code of a rank that ends because another one has died."""

CTRL_C = "interrupted by Ctrl-C"
"""Reason of the end of such a run."""


class RankWatch:
    """The thread that watches one rank. Enter and leave it in the main thread.

    Args:
        host: the page of the ranks of this host; None where there is none.
        timeout: longest time for which none of the threads of this rank may run; None for any, as of a single rank.
        attempt: number of earlier starts, with launchers that restart ranks.
        orphan: whether its launcher has ended already.
        report: prints a line for the user.
        leave: ends the process with an exit code, at once.
        ending: called with the reason for which the run ends, and whether that is a failure, before this rank leaves at
            once: on the first rank, and on one that prints the line.
        interrupted: called in the thread of the watch when Ctrl-C comes: the main thread may be in a long call.
    """

    def __init__(
        self,
        place: LaunchEnvironment,
        *,
        launch: Sequence[Ancestor],
        host: HostRanks | None,
        timeout: timedelta | None = None,
        attempt: str = "0",
        orphan: bool = False,
        remedy: Callable[[], str] = lambda: "start it again",
        report: Callable[[str], object] = lambda line: os.write(2, f"{line}\n".encode()),
        leave: Callable[[int], object] = os._exit,
        ending: Callable[[str, bool], object] = lambda reason, failed: None,
        interrupted: Callable[[], object] = lambda: None,
    ) -> None:
        self.place, self.remedy = place, remedy
        self._report_interrupt = interrupted
        self._launch, self._host, self._report, self._leave = launch, host, report, leave
        self.ending, self._orphan = ending, orphan
        self.reports_end = place.rank == 0
        """Whether this rank reports how the run ends."""
        self.ends_first = False
        """Whether this rank has ended by an error before all others of its host."""
        self.kill_timer = KillTimer()
        self._killed_after_s = inf if timeout is None else timeout.total_seconds() + KILLED_AFTER_S
        self.lost: Lost | None = None
        """The loss for which this rank ends; None while all processes run."""
        self._concluding, self._lost = threading.Lock(), threading.Event()
        self._left, self._terminating, self._interrupted = threading.Event(), threading.Lock(), False
        self._wake, waking = socket.socketpair()
        self._waking = waking
        for each in (self._wake, waking):
            each.setblocking(False)
        self._ends = ProcessEnds(self._wake.fileno())
        self._others: set[int] = set()
        self._news: HostNews | None = None
        if place.local_size < place.world_size:
            self._news = HostNews(attempt, received=self._received, serves_store=place.rank == 0)
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)

    # ------------------------------------------------------------------ from start to end

    def __enter__(self) -> Self:
        """Start to watch this rank."""
        self._prove_life()
        self._mark(RankMark.HERE)
        self._before = signal.signal(signal.SIGTERM, self._terminated)
        # Written to by the system on a signal, also while the main thread is in a call that never returns.
        self._wakeup_before = signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Note how this rank ends, and stop to watch it."""
        if kind is not None and issubclass(kind, MeetingError):
            self._lost.wait(4 * _LOOK_FOR_RANKS_S)  # A rank that dies closes its connections first.
        self.ends_first = kind is not None and self._is_first_to_end()
        self._mark(RankMark.DONE if kind is None else RankMark.ENDING)
        self._left.set()
        with suppress(OSError):
            self._waking.send(b"\0")
        # A thread that has found a loss prints it and notifies the other hosts before this rank ends.
        self._thread.join()
        with self._concluding:
            pass
        if self._news is not None:
            if kind is not None and self.lost is None:
                self._news.send(Lost(f"rank {self.place.rank} (host {socket.gethostname()}) ended", printed=True))
            self._news.end()
            self._news.join()
        self.kill_timer.end()
        signal.set_wakeup_fd(self._wakeup_before)
        signal.signal(signal.SIGTERM, self._before)
        self._wake.close()
        self._waking.close()

    def meet(self, address: str, port: int) -> None:
        """Exchange news with other hosts from now on, over the store where the ranks meet."""
        if self._news is not None:
            name = _name(self.place.rank, os.getpid())
            self._news.begin(address, port, name=name, listens=self.place.local_rank == 0)

    def reason_of_a_lost_connection(self, seconds: float) -> Lost | None:
        """The loss, as soon as it is found; None if none is found within the time."""
        if self._news is not None:
            self._news.compares = True
        self._lost.wait(seconds)
        return self.lost

    def late_ranks(self, seconds: float) -> dict[int, int]:
        """Ranks of the host, by local rank, that are not done as this one is, after these seconds at most."""
        self._mark(RankMark.DONE)
        deadline = time.monotonic() + seconds
        while self._host is not None:
            late = {place: each.rank for place, each in self._host.read().items() if each.mark is RankMark.HERE}
            if not late or time.monotonic() > deadline:
                return late
            time.sleep(_LOOK_FOR_RANKS_S / 10)
        return {}

    def part(self) -> None:
        """Regard further ends of ranks on other hosts as orderly; all ranks call it before a barrier."""
        if self._news is not None:
            self._news.end()

    @contextmanager
    def limit(self, seconds: float, error: str) -> Iterator[None]:
        """End this rank with an error if the block takes longer: a call to a store that is lost may never return."""
        timer = _after(seconds, self._end_late, error)
        try:
            yield
        finally:
            timer.cancel()

    def end_is_explained(self) -> None:
        """Mark this rank as about to end for a reason that has been printed."""
        self._mark(RankMark.ENDING)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        for ancestor in self._launch:
            self._ends.add(ancestor, ancestor.pid, start=ancestor.start)
        try:
            if self._orphan:
                self._launcher_ended(None)
            while not self._left.is_set():
                complete = self._host is None or len(self._others) == self.place.local_size - 1
                wait_s = min(_LOOK_S if complete else _LOOK_FOR_RANKS_S, self._killed_after_s / 20)
                self._look(self._ends.wait(wait_s))
                self._prove_life()
        finally:
            self._ends.close()
            if self._host is not None:
                self._host.remove_file()

    def _prove_life(self) -> None:
        if self._killed_after_s < inf:
            self.kill_timer.set(self._killed_after_s)

    def _look(self, ended: set[Ancestor | int]) -> None:
        if self._left.is_set():
            return
        with suppress(BlockingIOError):
            # Another handler treats the signal as a request, and ends the rank in its time.
            received = self._wake.recv(64)
            if signal.SIGINT in received and not self._interrupted:
                self._interrupted = True
                with suppress(OSError):
                    self._report_interrupt()
            if signal.SIGTERM in received and signal.getsignal(signal.SIGTERM) == self._terminated:
                self._terminated(signal.SIGTERM, None)
        if self.lost is not None:
            return
        for ancestor in self._launch:
            if ancestor in ended:
                self._launcher_ended(ancestor)
                return
        self._look_at_others(ended)

    def _look_at_others(self, ended: set[Ancestor | int]) -> None:
        if self._host is None or self._interrupted:  # All ranks of a host end by Ctrl-C.
            return
        marks = {place: rank for place, rank in self._host.read().items() if place != self.place.local_rank}
        for place in marks.keys() - self._others:
            self._others.add(place)
            self._ends.add(place, marks[place].pid)
        # Deaths before ends that were reported: both may show in one look.
        for place, other in sorted(marks.items(), key=lambda entry: (entry[1].mark, entry[0])):
            if place in ended and other.mark in (RankMark.HERE, RankMark.ENDING):
                # Of the remaining ranks, only the first one prints.
                before = (each for each in marks if each < self.place.local_rank)
                first = all(each in ended and marks[each].mark is RankMark.HERE for each in before)
                died, name = other.mark is RankMark.HERE, _name(other.rank, other.pid)
                loss = Lost(f"{name} {'died' if died else 'ended'}", printed=not died)
                self._conclude(loss, prints=first and died, sends=first)
                return

    def _launcher_ended(self, launcher: Ancestor | None) -> None:
        if self._interrupted:
            self._mark(RankMark.ENDING)
            self._leave_after_report(CTRL_C, TERMINATED, failed=False)
            return
        first = self.place.local_rank == 0
        process = "" if launcher is None else f", process {launcher.pid}"
        name = "the launcher" if launcher is None else f"the launcher {launcher.program}"
        # DeepSpeed's command ends with code 0, as after a success, where its launcher was killed.
        for each in self._launch:
            if each is not launcher and each.program in RUNNERS:
                with suppress(OSError):
                    os.kill(each.pid, signal.SIGTERM)
        loss = Lost(f"{name} (host {socket.gethostname()}{process}) is gone, and ranks do not train on without it")
        if signal.getsignal(signal.SIGTERM) == self._terminated:
            self._mark(RankMark.ENDING)
            self._conclude(loss, prints=first, sends=first)
            self._leave_after_report(loss.text, TERMINATED)
        else:
            self.remedy = lambda: "the run ends after this iteration, with a checkpoint if --save is given"
            self._conclude(loss, prints=first, patience_s=_REQUEST_S)
            os.kill(os.getpid(), signal.SIGTERM)

    def _received(self, loss: Lost) -> None:
        """Handle news of another host, or the loss of the store."""
        self._conclude(loss, prints=not loss.printed)

    def _conclude(
        self, loss: Lost, *, prints: bool = False, sends: bool = False, patience_s: float = _PATIENCE_S
    ) -> None:
        """End this rank because of a loss, after some time in which it may end by itself."""
        with self._concluding:
            if self.lost is not None:
                return
            self.lost = loss
            self.reports_end = self.reports_end or prints
            self._lost.set()
            # First of all: a line that is not read would block the thread that writes it.
            _after(patience_s, self._leave_after_report, loss.text, LOST)
            if prints:
                with suppress(OSError):
                    self._report(f"error: {loss.text}: {self.remedy()}")
        if sends and self._news is not None:
            self._news.send(loss)

    def _terminated(self, number: int, _: FrameType | None) -> None:
        if self.lost is not None and not self._interrupted:
            self._mark(RankMark.ENDING)
            self._leave_after_report(self.lost.text, TERMINATED)
        elif self._terminating.acquire(blocking=False):  # Called in the main thread and in that of the watch.
            first = self._is_first_to_end()
            self._mark(RankMark.ENDING)
            time.sleep(_LOOK_FOR_RANKS_S)  # A SIGINT before it may still be unread.
            if self._interrupted:
                # The main thread ends, unless it is in a call that never returns.
                _after(_PATIENCE_S, partial(self._leave_after_report, CTRL_C, TERMINATED, failed=False))
                return
            name = _name(self.place.rank, os.getpid())
            loss = Lost(f"{name} received SIGTERM, directly or from its launcher", printed=first)
            if first:
                with suppress(OSError):
                    self._report(f"error: {loss.text}: {self.remedy()}")
            if self._news is not None and (first or self.place.local_rank == 0):
                self._news.send(loss)
            self._leave_after_report("terminated by SIGTERM", TERMINATED, failed=False)

    def _end_late(self, error: str) -> None:
        first = self._is_first_to_end()
        self._mark(RankMark.ENDING)
        if first:
            with suppress(OSError):
                self._report(f"error: {error}")
        self._leave_after_report(error, STALLED)

    def _is_first_to_end(self) -> bool:
        """Whether no other rank of the host has ended, or is about to: launchers end all once one has."""
        marks = {} if self._host is None else self._host.read()
        others = [each for place, each in marks.items() if place != self.place.local_rank]
        return (self._host is None or self._host.claim()) and not any(
            each.mark is RankMark.ENDING or (each.mark is RankMark.HERE and start_of(each.pid) is None)
            for each in others
        )

    def _leave_after_report(self, reason: str, code: int, *, failed: bool = True) -> None:
        """Exit at once, after a report of limited time."""
        if self.reports_end:
            timer = _after(_REPORTS_IN_S, self._leave, code)
            with suppress(Exception):
                self.ending(reason, failed)
            timer.cancel()
        self._leave(code)

    def _mark(self, mark: RankMark) -> None:
        if self._host is not None:
            self._host.write(self.place.local_rank, HostRank(self.place.rank, os.getpid(), mark))
            # No rank starts once one has ended; and the last one to start removes the file.
            self._host.read() if mark is RankMark.HERE else self._host.remove_file()


def _after(seconds: float, function: Callable[..., object], *arguments: object) -> threading.Timer:
    """Call a function after some seconds, unless the process has ended or the timer is cancelled."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()
    return timer


def _name(rank: int, pid: int) -> str:
    """Name of a rank of this host in messages."""
    return f"rank {rank} (host {socket.gethostname()}, process {pid})"


def watch_rank(
    place: LaunchEnvironment,
    *,
    timeout: timedelta,
    remedy: Callable[[], str],
    ending: Callable[[str, bool], object] = lambda reason, failed: None,
    interrupted: Callable[[], object] = lambda: None,
) -> RankWatch:
    """The watch of this rank, as its launcher started it; arguments as in `RankWatch`."""
    launch, attempt = own_launch(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    launcher = host_launcher(launch)
    return RankWatch(
        place,
        launch=launch,
        host=None if launcher is None else page_of(launcher, place.local_size, attempt),
        timeout=timeout if place.world_size > 1 else None,
        attempt=attempt,
        orphan=is_orphan(launch),
        remedy=remedy,
        ending=ending,
        interrupted=interrupted,
    )
