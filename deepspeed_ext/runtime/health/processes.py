"""The processes around a rank on its host: its launch, the ends of others, the page of the host's ranks, its own end.

    rank <- deepspeed.launcher.launch <- deepspeed                    one host
    rank <- deepspeed.launcher.launch <- bash -c ... <- sshd          another host, started by pdsh
    rank <- torchrun; rank <- mpirun or orted; rank <- slurmstepd

Processes above a launch belong to the user: a shell may be closed, and `nohup deepspeed ... &` continues.

`HostRanks` is a page of memory in which the ranks of one host note that they run, and how they end:

    local rank 0    rank 4, process 4711, here
    local rank 1    rank 5, process 4712, ending        it has reported why

It needs neither a network nor a rank that serves it, so it distinguishes a death from an orderly end at any time: while
packages are imported, and after the process group is left. It is a file until all ranks of the host have opened it;
then its name is removed, and its memory is freed with the last of them.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import mmap
import os
import re
import select
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, takewhile
from pathlib import Path, PurePath
from typing import NamedTuple

import psutil

RUNNERS = frozenset(
    {"deepspeed", "ds", "deepspeed.pt", "deepspeed.launcher.runner", "megatron_terapipe.command.launcher_process"}
)
"""DeepSpeed's command, which starts one launcher on every host, also as `terapipe train` runs it."""

HOST_LAUNCHERS = frozenset({"deepspeed.launcher.launch", "launch.py"})
"""DeepSpeed's launcher of the ranks of one host."""

OTHER_LAUNCHERS = frozenset(
    "torchrun torch.distributed.run torch.distributed.launch torch.distributed.launcher accelerate"
    " mpirun mpiexec mpiexec.hydra orterun orted prterun prted hydra_pmi_proxy slurmstepd".split()
)
"""Launchers of torch, MPI and Slurm, each the parent of the ranks that it starts."""

REMOTE_SHELLS = frozenset({"sshd", "sshd-session"})
"""Programs at the end of a connection by which a launcher was started on this host."""

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish"})
_LAUNCHERS = RUNNERS | HOST_LAUNCHERS | OTHER_LAUNCHERS
_OPTIONS_WITH_A_VALUE = frozenset({"-W", "-X", "-Q", "--check-hash-based-pycs"})


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A process above this one."""

    pid: int
    command: tuple[str, ...]
    start: float
    """Time at which it started, as `start_of` gives it: identifies it, together with the number."""

    @property
    def program(self) -> str:
        """Name of the program: of a Python process the script or the module."""
        if not self.command or not self.command[0]:
            return ""
        # A process may have replaced its command by a title, such as `sshd: user@notty`.
        program = PurePath(self.command[0].split()[0].rstrip(":")).name
        return _python_program(self.command[1:]) if program.startswith("python") else program


def _python_program(arguments: Sequence[str]) -> str:
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "-m":
            return next(remaining, "")
        if argument in _OPTIONS_WITH_A_VALUE:
            next(remaining, None)
        elif not argument.startswith("-"):
            return PurePath(argument).name
    return ""


def start_of(pid: int) -> float | None:
    """Time at which a process started, in ticks of a clock that cannot be set.

    None if it has ended, also if its parent has not collected it yet.
    """
    try:
        # The name, in brackets, may contain anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else float(fields[18])


def own_launch() -> tuple[Ancestor, ...]:
    """Processes of the launch of this rank."""
    above = []
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            start = start_of(process.pid)
            with suppress(psutil.AccessDenied):
                above += [] if start is None else [Ancestor(process.pid, tuple(process.cmdline()), start)]
    return launch_of(above, outlives_its_terminal=signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)


def launch_of(above: Sequence[Ancestor], *, outlives_its_terminal: bool = False) -> tuple[Ancestor, ...]:
    """Processes of the launch among those above a rank, its parent first; empty without a launcher.

    Args:
        outlives_its_terminal: whether the end of a connection is ignored, as under `nohup`.
    """
    programs = [each.program for each in above]
    first = next((place for place, program in enumerate(programs) if program in _LAUNCHERS), None)
    if first is None:
        return ()
    last = first
    while programs[last] not in RUNNERS and last + 1 < len(above) and programs[last + 1] in _LAUNCHERS:
        last += 1
    if programs[last] in HOST_LAUNCHERS and not outlives_its_terminal:
        # The end of the connection that carries the launcher's output, and the shells below it.
        place = last + 1
        while place < len(above) and programs[place] in _SHELLS and "-c" in above[place].command:
            place += 1
        if place < len(above) and programs[place] in REMOTE_SHELLS and "notty" in " ".join(above[place].command):
            last = place
    return tuple(above[: last + 1])


def host_launcher(launch: Sequence[Ancestor]) -> Ancestor | None:
    """The process that started all ranks of this host; None without a launcher."""
    return next((each for each in launch if each.program in _LAUNCHERS), None)


def states_ranks(launch: Sequence[Ancestor]) -> bool:
    """Whether the flags of DeepSpeed's command, which come before the program, state hosts or numbers of ranks."""
    words = chain.from_iterable(each.command[1:] for each in launch if each.program in RUNNERS)
    own = takewhile(lambda word: not word.endswith(".py"), words)
    return any(re.match(r"-[Hie]|--(hostfile|include|exclude|num_)", word) for word in own)


def launched_here() -> tuple[list[int], list[int]]:
    """Launchers of this host that this process, a command of DeepSpeed, has started, and their ranks."""
    launchers: list[int] = []
    ranks: list[int] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # It has ended.
            if Ancestor(child.pid, tuple(child.cmdline()), 0).program in HOST_LAUNCHERS:
                launchers.append(child.pid)
                ranks += [rank.pid for rank in child.children()]
    return launchers, ranks


def is_orphan(launch: Sequence[Ancestor], environment: Mapping[str, str] = os.environ) -> bool:
    """Whether DeepSpeed's launcher started this process, and ended before the process could look for it."""
    return "CROSS_RANK" in environment and not launch


_LOOK_S = 0.5
"""Seconds between two looks at processes without a file descriptor that is readable at their end, as Linux has."""


class ProcessEnds:
    """Processes, by names, and those that have ended. For one thread."""

    def __init__(self, wake: int) -> None:
        self._wake = wake
        self._running: dict[Ancestor | int, tuple[int, float]] = {}
        self._descriptors: dict[Ancestor | int, int] = {}
        self._ended: set[Ancestor | int] = set()
        self._num_reported = 0

    def add(self, name: Ancestor | int, pid: int, *, start: float | None = None) -> None:
        """Watch another process.

        Args:
            start: time at which it started, to distinguish it from a later process of that number; None for any.
        """
        found = start_of(pid)
        if found is None or start not in (None, found):
            self._ended.add(name)
        else:
            self._running[name] = pid, found
            with suppress(AttributeError, OSError):
                self._descriptors[name] = os.pidfd_open(pid)

    def wait(self, seconds: float) -> set[Ancestor | int]:
        """Names of all that have ended, as soon as there is a new one or a byte to read, or after some seconds."""
        deadline = time.monotonic() + seconds
        while True:
            has_news = len(self._ended) > self._num_reported
            remaining = 0.0 if has_news else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._wake, *self._descriptors.values()], [], [], min(remaining, _LOOK_S))
            ended = [name for name, (pid, start) in self._running.items() if start_of(pid) != start]
            self._ended.update(ended)
            for name in ended:
                del self._running[name]
                if name in self._descriptors:
                    os.close(self._descriptors.pop(name))
            if readable or ended or has_news or time.monotonic() >= deadline:
                self._num_reported = len(self._ended)
                return set(self._ended)

    def close(self) -> None:
        """Close the file descriptors."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


_SLOT = struct.Struct("=iii")


class RankMark(IntEnum):
    """State of a rank, as it notes it."""

    ABSENT = 0
    """It has not started yet."""

    HERE = 1
    """It runs. If its process is gone, it died."""

    DONE = 2
    """It has done its work."""

    ENDING = 3
    """It ends before its work is done, for a reason that has been printed."""


class HostRank(NamedTuple):
    """Entry of a rank on the page."""

    rank: int
    pid: int
    mark: RankMark


class HostRanks:
    """The page of the ranks of this host."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = open(os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR), "rb+", buffering=0)
        if os.fstat(self._file.fileno()).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        self._file.truncate(size * _SLOT.size)
        self._page = mmap.mmap(self._file.fileno(), size * _SLOT.size)

    def write(self, local_rank: int, rank: HostRank) -> None:
        """Write the entry of a rank."""
        _SLOT.pack_into(self._page, local_rank * _SLOT.size, *rank)

    def read(self) -> dict[int, HostRank]:
        """Entries of the ranks that have started, by local rank; the file is removed once all have."""
        slots = (_SLOT.unpack_from(self._page, place * _SLOT.size) for place in range(self._size))
        found = {place: HostRank(rank, pid, RankMark(mark)) for place, (rank, pid, mark) in enumerate(slots) if mark}
        if len(found) == self._size:
            self.remove_file()
        return found

    def claim(self) -> bool:
        """Whether no other living rank has claimed the page."""
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def remove_file(self) -> None:
        """Remove the name of the page; ranks that have opened it keep the memory."""
        with suppress(OSError):
            self._path.unlink()


def page_of(launcher: Ancestor, size: int, attempt: str) -> HostRanks | None:
    """The page of the ranks that a launcher started on this host; None if it cannot be created.

    Args:
        attempt: number of earlier starts, with launchers that restart ranks.
    """
    name = f"ranks-of-{os.geteuid()}-{launcher.pid}-{launcher.start:.0f}-{attempt}"
    with suppress(OSError):
        return HostRanks(Path(tempfile.gettempdir()) / name, size)
    return None


class ProcessEnd:
    """Ends this process with its exit code, also while threads run that the interpreter cannot end.

    The interpreter ends a daemon thread when it returns from a call, and before Python 3.14 it does so by unwinding its
    stack. In C++, as in calls of torch to a store or over gloo, that aborts the process: its exit code is
    SIGABRT's and hides the cause. Such a thread cannot be joined, because it may wait for a rank that has died.

    After an error the groups of the ranks are not destroyed, and their own threads may see that others have ended.

    Create it first: functions that were registered last at `atexit` are called first, and none after this.
    """

    def __init__(self) -> None:
        self.code = 1
        """Exit code of the process; until it is set, as after an exception."""
        atexit.register(self._leave)

    def _leave(self) -> None:
        has_groups = getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)
        if has_groups() or any(thread.daemon for thread in threading.enumerate()):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self.code)


STALLED = 75
"""Exit code of a rank that ends because the run has stalled: `EX_TEMPFAIL`, a failure that may not recur."""

KILLED_AFTER_S = 5.0
"""Seconds after the timeout at which a rank without running threads is killed."""

_STACKS = 3 / 4
"""Part of the time to the kill after which stacks are printed: before other ranks report this one, and end the run."""

_CLOCK_MONOTONIC = 1

_EVENT = struct.pack("Pii48x", 0, signal.SIGKILL, 0)
"""Linux's `struct sigevent`: value, signal, and SIGEV_SIGNAL as the way in which it comes."""


class KillTimer:
    """A timer by which the kernel kills this process. Its stacks are printed before. It is off until it is set.

    A thread that sets it again and again proves that the process runs: one that is stopped handles no signals.
    """

    def __init__(self) -> None:
        self._process, self._is_last = os.getpid(), False
        self._changing = threading.Lock()
        """Held while the timer is set or removed: the kernel would set another timer in place of a removed one."""
        self._timer: ctypes.c_void_p | None = None
        self._library = ctypes.CDLL(None)
        timer = ctypes.c_void_p()
        try:
            if self._library.timer_create(_CLOCK_MONOTONIC, _EVENT, ctypes.byref(timer)) == 0:
                self._timer = timer
        except AttributeError:
            pass  # A C library without it: the launcher kills ranks that do not end.

    def set(self, seconds: float, *, last: bool = False) -> None:
        """Kill the process after this time, in place of an earlier setting, unless that was the last one."""
        # A child process that was forked has no timer.
        if os.getpid() != self._process:
            return
        with self._changing:
            if self._timer is None or self._is_last:
                return
            self._is_last = last
            whole = int(seconds)
            # The C library's `struct itimerspec`: seconds and nanoseconds of the interval, and of the first time.
            setting = struct.pack("4l", 0, 0, whole, int((seconds - whole) * 1e9))
            self._library.timer_settime(self._timer, 0, setting, None)
            faulthandler.dump_traceback_later(_STACKS * seconds, file=2)

    def end(self) -> None:
        """Remove the timer."""
        if os.getpid() != self._process:
            return
        with self._changing:
            timer, self._timer = self._timer, None
            if timer is not None:
                self._library.timer_delete(timer)
                faulthandler.cancel_dump_traceback_later()
