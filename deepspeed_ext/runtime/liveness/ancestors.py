"""The launch of a rank: the processes that started it, and whose end is the end of the run.

    rank <- deepspeed.launcher.launch <- deepspeed                    one host
    rank <- deepspeed.launcher.launch <- bash -c ... <- sshd          another host, started by pdsh
    rank <- torchrun; rank <- mpirun or orted; rank <- slurmstepd

What stands above belongs to the user: his shell may be closed, and `nohup deepspeed ... &` goes on.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

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
    """Return the time at which a process started: on Linux in ticks of a clock that nobody sets, else in seconds.

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
        above: the processes above it, its parent first.
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


def own_launch(above: Callable[[], Sequence[Ancestor]] = ancestors) -> tuple[Ancestor, ...]:
    """Return the processes of the launch of this rank."""
    return launch_of(above(), outlives_its_terminal=signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
