"""Watches a rank: when the run stalls, reports which rank blocks it, writes the ledgers and ends the process.

Stalled ranks cannot use their communicators, on which they wait for each other. So each rank has a thread that watches
it, and the threads communicate over a connection of their own to the store by which the ranks met:

    rank 0   stalled for too long     --> question -> reads the answers: "rank 2 blocks"; writes its ledger, ends
    rank 1   stalled                          '-> answers, reads the same; writes its ledger, ends
    rank 2   computes for ever                '-> answers, reads the same; writes its ledger, ends

    0 ------------------ timeout / 2 ------------------- timeout ---------- + 5 s --------- + 30 s
    a rank stops         roll call of                    roll call:        the kernel       communicators
                         all ranks                       all end           kills it         time out

A collective that hangs on an accelerator never raises, so the thread ends the process. The rank that serves the store
may be the one that has stopped. So a second thread, which uses no store, keeps the time; it ends a rank whose store no
longer answers. A third one follows the accelerator, and may block (`OpLedger.follow`). A stopped process handles no
signals but SIGKILL: a timer of the kernel, which needs none of its threads, kills it. While a call of a library holds
the lock of Python's interpreter, none of them runs: `faulthandler`, which needs no lock, prints the stacks before.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.health.ledger import (
    OpLedger,
    accelerator_mark,
    innermost_caller,
    is_in_collective,
    main_stack,
)
from deepspeed_ext.runtime.health.processes import KILLED_AFTER_S, STALLED, KillTimer
from deepspeed_ext.runtime.health.stall import Position, RollCall, explain, explain_silent_store

GRACE = timedelta(seconds=30)
"""Time that communicators wait longer than the timeout, so that the watch reports first."""

_ANSWERS = 3
"""Looks at the store that a living rank takes while another waits for answers."""

_SILENT = 1 / 3
"""Part of the timeout without answers after which a rank counts as stopped: a library may block all threads of a
process for a while."""

_CONCLUDES_IN_S = 20.0
"""Longest time to write a ledger and print the line, after which the process is killed: a file system may hang, too."""

_JOIN_S = 10.0
"""Longest time to wait for the end of a thread: calls to a living store take less, on a busy host too."""


def end_process() -> None:
    """End this process at once, although its main thread may hang."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(STALLED)


class StallWatch:
    """The threads that watch one rank.

    Args:
        world_size: number of ranks. A single rank waits for no other, and is not watched.
        connect: opens a connection of its own to the store of all ranks; called by the watch's thread, as it waits for
            ever where the process that serves the store has stopped.
        kill_timer: of this process, ended by another; None for one of the watch.
        report: prints the line.
        ending: called with the reason, on the first rank and on the one that prints the line, before the process ends.
    """

    def __init__(
        self,
        ledger: OpLedger,
        *,
        rank: int,
        world_size: int,
        connect: Callable[[], Any],
        timeout: timedelta,
        directory: Path,
        kill_timer: KillTimer | None = None,
        remedy: Callable[[], str] = lambda: "start it again",
        report: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True),
        end: Callable[[], object] = end_process,
        ending: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self.ledger, self.timeout = ledger, timeout
        self._rank, self._world_size, self._connect = rank, world_size, connect
        timeout_s = timeout.total_seconds()
        self._interval_s = min(max(timeout_s / 20, 0.02), 5.0)
        # By the timeout all have answered.
        self._limit_s = timeout_s - (_ANSWERS + 1) * self._interval_s
        self._directory, self._remedy, self._report, self._end = directory, remedy, report, end
        self._ending = ending
        self._clock_s = self._answered_s = self._moved_s = 0.0
        self._asks_at_s = self._limit_s / 2
        self._position = ledger.position()
        self._hosts: dict[int, str] = {}
        # First question without an answer of a rank since its last answer, by the clock.
        self._silent_since: dict[int, float] = {}
        self._ended, self._concluding = threading.Event(), threading.Lock()
        self._kill_timer, self._ends_timer = kill_timer or KillTimer(), kill_timer is None
        self._killed_after_s = timeout_s + KILLED_AFTER_S
        device = get_accelerator().current_device()
        self._threads = [
            threading.Thread(target=run, args=given, name="stall watch", daemon=True)
            for run, *given in ((self._ask,), (self._keep_time,), *[(self._follow, device)] * ledger.has_device)
        ]
        if world_size > 1:
            self._kill_timer.set(self._killed_after_s)  # Before its thread does: the process may stop at any time.
            for thread in self._threads:
                thread.start()

    def __enter__(self) -> Self:
        """Watch until the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching."""
        self.end()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        # A thread that Python ends in the middle of a call to the store aborts the process. The thread that drops the
        # last reference to an engine ends its watch, which may be this one.
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(timeout=_JOIN_S)
        if self._ends_timer:
            self._kill_timer.end()

    def _follow(self, device: int) -> None:
        # A thread starts on the first device of the host, and the wait for an event there would take memory of it.
        get_accelerator().set_device(device)
        self.ledger.follow(self._ended, self._interval_s / 4)

    # ------------------------------------------------------------------ the thread without the store

    def _keep_time(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(self._interval_s):
            now = time.monotonic()
            # A process that was stopped, such as by Ctrl-Z, has not waited for other ranks in that time.
            self._clock_s += min(now - before, 2 * self._interval_s)
            before = now
            self._kill_timer.set(self._killed_after_s)
            position = self.ledger.position()
            if position.place != self._position.place:
                self._position, self._moved_s, self._asks_at_s = position, self._clock_s, self._limit_s / 2
            silent_s = self._clock_s - self._answered_s
            # Not before ranks with a store: the end of this one would end them before their ledgers are written.
            if silent_s > self.timeout.total_seconds() and self._still_s > self._limit_s / 2:
                self._conclude(explain_silent_store(self._where(), silent_s, self._hosts), prints=True)

    @property
    def _still_s(self) -> float:
        """Seconds since this rank last proceeded."""
        return self._clock_s - self._moved_s

    def _where(self) -> Position:
        """Position of this rank, with the place of its main thread in the code."""
        stack = main_stack()
        code, in_collective = innermost_caller(stack), is_in_collective(stack)
        return replace(self._position, seconds=self._still_s, code=code, in_collective=in_collective)

    # ------------------------------------------------------------------ the thread with the store

    def _ask(self) -> None:
        try:
            self._roll_call = RollCall(self._connect(), self._rank)
            self._roll_call.set_host(socket.gethostname())
        except RuntimeError:
            return  # The store is gone; the other thread continues.
        while not self._ended.wait(self._interval_s):
            try:
                if 0 not in self._hosts:  # Of the rank that serves the store, which may stop later.
                    self._hosts |= self._roll_call.hosts([0])
                self._look()
            except RuntimeError:
                return
            self._answered_s = self._clock_s

    def _look(self) -> None:
        if self._still_s > self._asks_at_s:
            self._asks_at_s += self._limit_s / 2
            self._roll_call.start()
        elif not self._roll_call.is_open():
            return
        asked_s = self._clock_s
        self._roll_call.answer(self._where())
        if not self._roll_call.has_verdict():
            self._ended.wait(_ANSWERS * self._interval_s)
        answers = self._roll_call.answers()
        line, first = self._roll_call.settle(
            explain(self._with_silent(answers, asked_s), self._limit_s, self._roll_call.hosts)
        )
        if line is not None:
            self._conclude(line, prints=first, adopted_by=len(answers))
        self._roll_call.next()

    def _with_silent(self, answers: dict[int, Position], asked_s: float) -> dict[int, Position | None]:
        """Positions of the ranks that answered, and None for ranks that have not for too long."""
        positions: dict[int, Position | None] = dict(answers)
        for rank in range(self._world_size):
            if rank in answers:
                self._silent_since.pop(rank, None)
            elif asked_s - self._silent_since.setdefault(rank, asked_s) > _SILENT * self._limit_s:
                positions[rank] = None
        return positions

    # ------------------------------------------------------------------ the end

    def _conclude(self, line: str, *, prints: bool, adopted_by: int = 0) -> None:
        """Write the ledger, print the line, and end the process once all living ranks have done so."""
        with self._concluding:
            if self._ended.is_set():
                return
            self._ended.set()
        self._kill_timer.set(_CONCLUDES_IN_S, last=True)
        try:
            written = self._write(line)
            if prints:
                self._report(f"error: the run has stalled: {line}; {written}: {self._remedy()}")
            if adopted_by:
                self._wait_for_others(adopted_by)
            if prints or self._rank == 0:
                self._ending(f"the run has stalled: {line}")
        finally:
            self._end()
            self._kill_timer.end()

    def conclude_silent(self, ranks: Sequence[int], *, prints: bool) -> None:
        """End this process, because other ranks of this host have not ended and give no sign of life."""
        positions = {self._rank: replace(self._position, seconds=self._still_s), **dict.fromkeys(ranks)}
        line = explain(positions, 0.0, lambda named: dict.fromkeys(named, socket.gethostname()))
        self._conclude(str(line), prints=prints)

    def _write(self, line: str) -> str:
        """Write the ledger, and return a text with the directory of the ledgers, or the error."""
        try:
            self.ledger.write(self._directory, line, self._where())
            return f"the ledger of each rank is in {self._directory}"
        except OSError as error:
            return f"ledgers cannot be written to {self._directory} ({error.strerror})"

    def _wait_for_others(self, number: int) -> None:
        """Wait until all have done so: a launcher ends all once one ends, and the store ends with rank 0."""
        deadline = time.monotonic() + _ANSWERS * self._interval_s
        with suppress(RuntimeError):
            self._roll_call.count_adopted(1)
            while self._roll_call.count_adopted() < number and time.monotonic() < deadline:
                time.sleep(self._interval_s / 10)


def watch_this_rank(timeout: timedelta, directory: Path, *, name: str, **ending: Any) -> StallWatch:
    """The watch of this rank among all that have met, with a new ledger. Every rank must call this.

    Args:
        name: of the watch, the same on all ranks, and of no other watch.
        **ending: `kill_timer`, `remedy`, `end` and `ending` of `StallWatch`.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    return StallWatch(
        OpLedger(rank, accelerator_mark()),
        rank=rank,
        world_size=dist.get_world_size(),
        connect=lambda: dist.PrefixStore(f"stall watch {name}", _own_connection(store)),
        timeout=timeout,
        directory=directory,
        **ending,
    )


def _own_connection(store: Any) -> Any:
    """The store over another connection: one is locked while the main thread waits on it."""
    try:
        return store.clone()
    except dist.DistError:
        raise
    except RuntimeError:
        return store  # One written in Python, which has no connection.
