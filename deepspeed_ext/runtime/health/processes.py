"""The processes around a rank on its host: its launch, the ends of others, the page of the host's ranks, its own end.

    rank <- deepspeed.launcher.launch <- deepspeed                    one host
    rank <- deepspeed.launcher.launch <- bash -c ... <- sshd          another host, started by pdsh
    rank <- torchrun; rank <- mpirun or orted; rank <- slurmstepd

What stands above a launch belongs to the user: a shell may be closed, and `nohup deepspeed ... &` goes on.

`HostRanks` is a page of memory in which the ranks of one host note that they run, and how they end:

    local rank 0    rank 4, process 4711, here
    local rank 1    rank 5, process 4712, ending        it has reported why

It needs neither a network nor a rank that keeps it, so it tells a death from an orderly end at any time: while packages
are imported, and after the process group is left. It is a file until all ranks of the host have it; then it has no name
any more, and is gone with the last of them.
"""

import atexit
import mmap
import os
import select
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path, PurePath
from typing import Generic, NamedTuple, TypeVar

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
"""Ends of a connection by which a launcher was started on this host."""

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish"})
_LAUNCHERS = RUNNERS | HOST_LAUNCHERS | OTHER_LAUNCHERS
_OPTIONS_WITH_A_VALUE = frozenset({"-W", "-X", "-Q", "--check-hash-based-pycs"})


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A process above this one."""

    pid: int
    words: tuple[str, ...]
    born: float
    """Time at which it started, as `birth_of` gives it: with the number, no other process has it."""

    @property
    def program(self) -> str:
        """Name of the program: of a Python process the script or the module."""
        if not self.words or not self.words[0]:
            return ""
        # A process may have replaced its words by a title, such as `sshd: user@notty`.
        program = PurePath(self.words[0].split()[0].rstrip(":")).name
        return _python_program(self.words[1:]) if program.startswith("python") else program


def _python_program(words: Sequence[str]) -> str:
    left = iter(words)
    for word in left:
        if word == "-m":
            return next(left, "")
        if word in _OPTIONS_WITH_A_VALUE:
            next(left, None)
        elif not word.startswith("-"):
            return PurePath(word).name
    return ""


def ancestors() -> list[Ancestor]:
    """Return the processes above this one, its parent first, as far as this user may see them."""
    found = []
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            with suppress(psutil.AccessDenied):
                found.append(Ancestor(process.pid, tuple(process.cmdline()), birth_of(process)))
    return found


def birth_of(process: psutil.Process) -> float:
    """Return the time at which a process started: on Linux in ticks of a clock that cannot be set, else in seconds.

    Raises:
        psutil.NoSuchProcess: if it is gone.
    """
    with suppress(OSError, IndexError, ValueError):
        # Its name, in brackets, may hold anything.
        return float(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    return float(process.create_time())


def launch_of(above: Sequence[Ancestor], *, outlives_its_terminal: bool = False) -> tuple[Ancestor, ...]:
    """Return the processes of the launch among those above a rank, its parent first; empty if nobody launched it.

    Args:
        outlives_its_terminal: whether the user asked, as `nohup` does, that the end of a connection be ignored.
    """
    programs = [each.program for each in above]
    first = next((place for place, program in enumerate(programs) if program in _LAUNCHERS), None)
    if first is None:
        return ()
    last = first
    while programs[last] not in RUNNERS and last + 1 < len(above) and programs[last + 1] in _LAUNCHERS:
        last += 1
    if programs[last] in HOST_LAUNCHERS and not outlives_its_terminal:
        last = _connection(above, last)
    return tuple(above[: last + 1])


def _connection(above: Sequence[Ancestor], launcher: int) -> int:
    """Return the place of the connection that carries a launcher's output; the launcher's own if there is none."""
    place = launcher + 1
    while place < len(above) and above[place].program in _SHELLS and "-c" in above[place].words:
        place += 1
    if place < len(above) and above[place].program in REMOTE_SHELLS and "notty" in " ".join(above[place].words):
        return place
    return launcher


def host_launcher(launch: Sequence[Ancestor]) -> Ancestor | None:
    """Return the process that started all ranks of this host; None if nobody did."""
    return next((each for each in launch if each.program in _LAUNCHERS), None)


def is_orphan(launch: Sequence[Ancestor], environment: Mapping[str, str] = os.environ) -> bool:
    """Whether DeepSpeed's launcher started this process, and ended before the process could look for it."""
    return "CROSS_RANK" in environment and not launch


def own_launch() -> tuple[Ancestor, ...]:
    """Return the processes of the launch of this rank."""
    return launch_of(ancestors(), outlives_its_terminal=signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)


Name = TypeVar("Name", bound=Hashable)

_LOOK_S = 0.25
"""Seconds between two looks at processes where the system does not report their ends."""


class ProcessEnds(Generic[Name]):
    """Processes, and which of them have ended. For one thread.

    Linux reports an end at once, by a file descriptor of the process. Elsewhere the processes are looked at.
    """

    def __init__(self, wake: int) -> None:
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        self._running: dict[Name, tuple[psutil.Process, int | None]] = {}
        self._ended: set[Name] = set()
        self._num_reported = 0

    def add(self, name: Name, pid: int, *, born: float | None = None) -> None:
        """Wait for the end of a process, too.

        Args:
            born: time at which it started, so that it is told from a later process of that number.
        """
        try:
            process = psutil.Process(pid)
            descriptor = _descriptor_of(pid)
            if born is not None and birth_of(process) != born:
                raise psutil.NoSuchProcess(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            self._ended.add(name)
            return
        self._running[name] = process, descriptor
        if descriptor is not None:
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> set[Name]:
        """Return the names of all that have ended so far, as soon as there is a new one, or after some seconds."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic()) if len(self._ended) == self._num_reported else 0.0
            reported = all(descriptor is not None for _, descriptor in self._running.values())
            ready = dict(self._poll.poll(1000 * (left if reported else min(left, _LOOK_S))))
            for name, (process, descriptor) in list(self._running.items()):
                if _has_ended(process) if descriptor is None else descriptor in ready:
                    self._ended.add(name)
                    del self._running[name]
                    if descriptor is not None:
                        self._poll.unregister(descriptor)
                        os.close(descriptor)
            if ready or len(self._ended) > self._num_reported or time.monotonic() >= deadline:
                self._num_reported = len(self._ended)
                return set(self._ended)

    def close(self) -> None:
        """Wait for nothing any more."""
        for _, descriptor in self._running.values():
            if descriptor is not None:
                os.close(descriptor)
        self._running.clear()


def _descriptor_of(pid: int) -> int | None:
    """Return a descriptor that can be read once a process has ended; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


_SLOT = struct.Struct("=iii")


class Mark(IntEnum):
    """State of a rank, as it notes it."""

    ABSENT = 0
    """It has not come yet."""

    HERE = 1
    """It runs. If its process is gone, it died."""

    DONE = 2
    """It has done its work."""

    ENDING = 3
    """It ends before its work is done, for a reason that is printed or known."""


class HostRank(NamedTuple):
    """Entry of a rank on the page."""

    rank: int
    pid: int
    mark: Mark


class HostRanks:
    """The page of the ranks of this host."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise PermissionError(f"{path} is another user's")
            os.ftruncate(descriptor, size * _SLOT.size)
            self._page = mmap.mmap(descriptor, size * _SLOT.size)
        finally:
            os.close(descriptor)

    def write(self, local_rank: int, rank: HostRank) -> None:
        """Write the entry of a rank."""
        _SLOT.pack_into(self._page, local_rank * _SLOT.size, *rank)

    def read(self) -> dict[int, HostRank]:
        """Return the ranks that have come so far, by their place on the host; the file goes once all have."""
        slots = (_SLOT.unpack_from(self._page, place * _SLOT.size) for place in range(self._size))
        found = {place: HostRank(rank, pid, Mark(mark)) for place, (rank, pid, mark) in enumerate(slots) if mark}
        if len(found) == self._size:
            self.remove_file()
        return found

    def remove_file(self) -> None:
        """Remove the name of the page, so that nothing is left of it."""
        with suppress(OSError):
            self._path.unlink()


def page_of(launcher: Ancestor, size: int, attempt: str) -> HostRanks | None:
    """Return the page of the ranks that a launcher started on this host; None where it cannot be had.

    Args:
        attempt: how often the launcher has started them, with launchers that start ranks again.
    """
    name = f"ranks-of-{os.geteuid()}-{launcher.pid}-{launcher.born:.0f}-{attempt}"
    with suppress(OSError):
        return HostRanks(Path(tempfile.gettempdir()) / name, size)
    return None


class ProcessEnd:
    """Ends this process with its exit code, also where daemon threads are left.

    The interpreter ends a daemon thread when it comes back from a call, and before Python 3.14 it does so by unwinding
    its stack. In C++, as in calls of torch to a store or over gloo, that aborts the process: its exit code is that of
    SIGABRT and hides the cause. Such a thread cannot be joined, because it may wait for a rank that is gone.

    Make it first of all: functions that were registered last at `atexit` are called first, and none after this.
    """

    def __init__(self) -> None:
        self.code = 1
        """Exit code of the process; that of an exception until it is set."""
        atexit.register(self._leave)

    def _leave(self) -> None:
        if any(thread.daemon for thread in threading.enumerate()):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self.code)
