"""The place of this process among all that were launched, from the variables of its launcher.

torch             RANK, WORLD_SIZE: by torchrun, by DeepSpeed's launcher over pdsh, or by hand
Open MPI          mpirun, and deepspeed --launcher openmpi
MVAPICH           mpirun_rsh, and deepspeed --launcher mvapich
MPICH, Intel MPI  mpiexec, and deepspeed --launcher mpich or impi
Slurm             srun, and deepspeed --launcher slurm

A process may have the variables of several: mpirun starts ranks through srun, and other launchers run in an allocation
of Slurm. All numbers are taken from the launcher nearest to the process, the first of `LAUNCHERS`: numbers of two
launchers would contradict each other. Imports only the standard library, since it runs before torch loads.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import NamedTuple

from deepspeed_ext.plan.errors import UserError

__all__ = ["LaunchEnvironment"]


class MeetingError(UserError):
    """Rank 0 does not serve the place where the ranks are to meet; most ranks of a host have the same error."""


class AbsentRankError(MeetingError):
    """A rank did not come to the place in time."""


_FIRST_HOST = re.compile(r"(?:[^,\[\]]|\[\d[\d,-]*\])+")
_FIRST_NUMBER = re.compile(r"\[(\d+)[^\]]*\]")
_SAME_NODES = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def first_host(hosts: str) -> str:
    """Return the first host of a list such as `rack[03-05,9]-gpu[1-2],login`, here `rack03-gpu1`."""
    first = _FIRST_HOST.match(hosts)
    if first is None:
        raise UserError(f"{hosts[:80]!r} is not a list of hosts as Slurm writes it: set MASTER_ADDR to the first host")
    return _FIRST_NUMBER.sub(r"\1", first[0])


def tasks_of_node(counts: str, node: int) -> int:
    """Return the number of tasks of a node.

    Args:
        counts: of all nodes, such as `4(x2),1` for three nodes of 4, 4 and 1 tasks.
    """
    passed = 0
    for part in counts.split(","):
        same = _SAME_NODES.fullmatch(part)
        if same is None:
            break
        passed += int(same[2] or 1)
        if node < passed:
            return int(same[1])
    raise UserError(
        f"{counts[:80]!r} has no number of tasks for node {node}, as 4(x2),1 has: set RANK, WORLD_SIZE, "
        "LOCAL_RANK and LOCAL_SIZE"
    )


def is_this_host(name: str) -> bool:
    """Whether a name, or `user@name`, is of this host."""
    try:
        found = socket.getaddrinfo(name.rpartition("@")[2], 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)  # Only addresses of this host can be bound.
            return True
    return False


PORTS = range(20_000, 32_768)
"""Ports where ranks can meet: below the ports of outgoing connections."""

Variables = Mapping[str, str]


Meeting = tuple[str | None, int | None]
"""Host of the first rank, and a port there; None if unknown."""


class Launcher(NamedTuple):
    """The variables of a launcher."""

    name: str
    rank: str
    size: str
    local_rank: str
    """Number among the ranks of this host."""
    local_sizes: tuple[str, ...]
    """Number of processes on this host; the first that is set counts."""
    sign: str
    """A variable that only its own processes have."""
    meeting: Callable[[Variables], Meeting] = lambda variables: (None, None)


def launcher_of(variables: Variables) -> Launcher | None:
    """The launcher that set the rank of this process; None if it was not launched as one of several."""
    found = next((each for each in LAUNCHERS if each.rank in variables and each.sign in variables), None)
    if found is None:
        _refuse_single_process_of_tasks(variables)
    elif found is not TORCH and TORCH.size in variables and number(variables, found.size) is not None:
        stated, launched = number(variables, TORCH.size), number(variables, found.size)
        if stated != launched:
            raise UserError(
                f"{TORCH.size}={stated} is not the {launched} processes that {found.name} launched ({found.size}): "
                f"unset {TORCH.size}"
            )
    return found


def number(variables: Variables, name: str) -> int | None:
    """Return the number in a variable; None if it is not set."""
    if name not in variables:
        return None
    if not re.fullmatch(r"\s*-?\d{1,18}\s*", variables[name]):
        raise UserError(f"{name}={variables[name][:80]!r} is not a whole number: set one, or unset {name}")
    return int(variables[name])


def _refuse_single_process_of_tasks(variables: Variables) -> None:
    """Refuse a process of a batch script or of an allocation: it would wait for tasks that were never started."""
    tasks = None if SLURM.sign in variables or TORCH.size in variables else number(variables, "SLURM_NTASKS")
    if tasks is not None and tasks > 1:
        raise UserError(
            f"SLURM_NTASKS={tasks}, and this process is none of the {tasks} tasks: write srun before the command, or "
            "srun -n 1 for one"
        )


def _at_mpirun(variables: Variables) -> Meeting:
    """The host of mpirun, which every process of Open MPI 4 has, and a port by the job's number."""
    job = number(variables, "OMPI_MCA_ess_base_jobid")
    port = None if job is None else PORTS[job % len(PORTS)]
    if variables["OMPI_COMM_WORLD_SIZE"] == variables.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        return "127.0.0.1", port
    mpirun, daemon = (variables.get(f"OMPI_MCA_orte_{name}_uri") for name in ("hnp", "local_daemon"))
    address = re.search(r"tcp://([\d.]+)", mpirun or "")
    if address is None or "MASTER_ADDR" in variables:
        return None, port
    if variables["OMPI_COMM_WORLD_RANK"] == "0" and daemon != mpirun:
        raise UserError(
            "the first rank is on another host than mpirun, which is unknown: add -x MASTER_ADDR=HOST with the "
            "host of the first rank, or run mpirun there"
        )
    return address[1], port


def _on_the_first_node(variables: Variables) -> Meeting:
    """The first node of the step, and a port by the numbers of job and step, which all tasks have."""
    hosts = variables.get("SLURM_STEP_NODELIST")
    job, step = number(variables, "SLURM_JOB_ID"), number(variables, "SLURM_STEP_ID")
    port = None if job is None or step is None else PORTS[(100 * job + step) % len(PORTS)]
    return None if hosts is None else first_host(hosts), port


TORCH = Launcher("torch", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"), "RANK")

OPEN_MPI = Launcher(
    *("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *(("OMPI_COMM_WORLD_LOCAL_SIZE",), "OMPI_COMM_WORLD_RANK", _at_mpirun),
)

MVAPICH = Launcher(
    *("mpirun_rsh", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    *(("MV2_COMM_WORLD_LOCAL_SIZE",), "MV2_COMM_WORLD_RANK"),
)

# Slurm sets PMI_RANK for libraries of MPI, too, but MPI_LOCALRANKID only mpiexec does.
MPICH = Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), "MPI_LOCALRANKID")

# A batch script has a SLURM_PROCID, too, but is not a task of its own allocation.
SLURM = Launcher(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", (), "SLURM_STEP_ID", _on_the_first_node
)

LAUNCHERS = (TORCH, OPEN_MPI, MVAPICH, MPICH, SLURM)
"""The launcher nearest to the process first."""


def _local_size(launcher: Launcher, variables: Variables) -> int | None:
    """Number of processes on this host; None if no variable has it."""
    if launcher is SLURM:
        counts, node = variables.get("SLURM_STEP_TASKS_PER_NODE"), number(variables, "SLURM_NODEID")
        return None if counts is None or node is None else tasks_of_node(counts, node)
    return next((number(variables, name) for name in launcher.local_sizes if name in variables), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnvironment:
    """Place of this process among all that were launched."""

    rank: int
    world_size: int
    local_rank: int
    """Number among the ranks of this host."""
    local_size: int
    """Number of processes on this host."""
    meeting: Meeting = (None, None)
    """Where they meet, if the launcher sets it."""

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ, *, local_rank: int | None = None) -> "LaunchEnvironment":
        """Read the variables of the launcher; without one, this is the only process.

        Args:
            local_rank: value of `--local_rank`, for launchers that pass it as a flag.
        """
        launcher = launcher_of(environment)
        if launcher is None:
            if TORCH.size in environment:
                raise UserError("RANK is not set, but WORLD_SIZE is: start with deepspeed, torchrun, mpirun or srun")
            return cls.first_of(1)
        rank, world_size = number(environment, launcher.rank), number(environment, launcher.size)
        if rank is None or world_size is None:
            raise UserError(
                f"{launcher.size} is not set, but {launcher.rank} is: start with deepspeed, torchrun, mpirun or srun"
            )
        on_this_host = number(environment, launcher.local_rank)
        place = cls(
            rank=rank,
            world_size=world_size,
            local_rank=(local_rank or 0) if on_this_host is None else on_this_host,
            # If unknown, the largest possible number, so that no two ranks share a core.
            local_size=_local_size(launcher, environment) or world_size,
            meeting=launcher.meeting(environment),
        )
        for mine, name, all_of_them, size in (
            (place.rank, launcher.rank, place.world_size, launcher.size),
            (place.local_rank, launcher.local_rank, place.local_size, "the number of ranks of this host"),
        ):
            if not 0 <= mine < all_of_them:
                raise UserError(
                    f"{name} {mine} is not below {size} {all_of_them}: start with deepspeed, torchrun, mpirun or srun"
                )
        return place

    @classmethod
    def of_dry_run(
        cls, environment: Mapping[str, str] = os.environ, *, stated: int | None, least: int
    ) -> "LaunchEnvironment":
        """The place of a dry run: as its launcher gives it, or the first of ranks that were not launched.

        DeepSpeed's command starts a rank for each device of this host if it does not state them, and a dry run needs
        no devices: fewer than the run has count as ranks of the run.

        Args:
            environment: variables; without a rank they may still have the number of ranks.
            stated: number of ranks by the flags; None if they do not state it.
            least: smallest number of ranks of the run.
        """
        sizes = [number(environment, name) for name in (TORCH.size, "SLURM_NTASKS")]
        unlaunched = {name: value for name, value in environment.items() if name not in (TORCH.size, "SLURM_NTASKS")}
        if launcher_of(unlaunched) is not None:
            place, size = cls.read(environment), stated or least
            if environment.get("CROSS_SIZE") == "1" and place.world_size < size:
                # Imported here: it needs psutil.
                from deepspeed_ext.runtime.health.processes import own_launch, states_ranks

                if not states_ranks(own_launch()):
                    return replace(place, world_size=size, local_size=size)
            return place
        return cls.first_of(stated or sizes[0] or sizes[1] or least)

    @classmethod
    def first_of(cls, world_size: int) -> "LaunchEnvironment":
        """The place of the first of some processes on one host."""
        return cls(rank=0, world_size=world_size, local_rank=0, local_size=world_size)

    def export(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Set the variables that torch and deepspeed read; the place to meet only if it is not set."""
        environment["RANK"], environment["WORLD_SIZE"] = str(self.rank), str(self.world_size)
        environment["LOCAL_RANK"], environment["LOCAL_SIZE"] = str(self.local_rank), str(self.local_size)
        port = environment.get("MASTER_PORT", "0").strip()
        if not re.fullmatch(r"\d{1,5}", port) or int(port) > 65_535:
            raise UserError(f"MASTER_PORT={port[:80]} is not a port: set a number from 1 to 65535, or unset it")
        host = environment.get("MASTER_ADDR")
        if host is not None and environment.get("CROSS_SIZE") == "1" and not is_this_host(host):
            raise MeetingError(
                f"DeepSpeed's launcher started the ranks of a single host on {socket.gethostname()}, and the hostfile "
                f"names another (MASTER_ADDR={host}): add --force_multi, or use terapipe train"
            )
        meeting = self.meeting
        if self.world_size == 1:
            # The store of a single rank takes any free port; no other needs it, wherever it was to meet them.
            meeting = "127.0.0.1", 0
            if environment.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
                environment.pop("MASTER_ADDR", None)
        for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), meeting, strict=True):
            if value is not None:
                environment.setdefault(name, str(value))
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing and find_spec("mpi4py") is None:  # With it, DeepSpeed asks MPI.
            raise UserError(
                f"{' and '.join(missing)} not set, so the {self.world_size} ranks cannot meet: set them to the first "
                "host and a free port there, or start with deepspeed or torchrun"
            )
