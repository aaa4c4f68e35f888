"""What each launcher tells a process about its rank, and about the place where the ranks meet.

torch             RANK, WORLD_SIZE: by torchrun, by DeepSpeed's launcher over pdsh, or by hand
Open MPI          mpirun, and deepspeed --launcher openmpi
MVAPICH           mpirun_rsh, and deepspeed --launcher mvapich
MPICH, Intel MPI  mpiexec, and deepspeed --launcher mpich or impi
Slurm             srun, and deepspeed --launcher slurm

A process may see the variables of several: mpirun starts ranks through srun, and an allocation of Slurm is where others
launch. The launcher nearest to the process stands first in `LAUNCHERS`, and everything is taken from this one: of two
numbers that belong together, one from each would be no rank at all.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.launch.slurm import first_host, tasks_of_node

PORTS = range(20_000, 32_768)
"""Ports where ranks can meet: below those that systems give to outgoing connections."""

Variables = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the ranks meet."""

    address: str | None = None
    """Host of the first rank; None if nobody says it."""
    port: int | None = None
    """A port there; None if nobody says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """The variables of a launcher."""

    name: str
    rank: str
    size: str
    local_rank: str
    """Among those of this host."""
    local_size: Callable[[Variables], int | None]
    """Number of processes on this host, as the variables tell it; None if they do not."""
    sign: str
    """A variable that only its processes have."""
    meeting: Callable[[Variables], Meeting]


def launcher_of(variables: Variables) -> Launcher | None:
    """Return the launcher that gave this process its rank; None if it was not launched as one of several.

    Raises:
        UserError: if two say different numbers of processes, or the tasks of Slurm are elsewhere.
    """
    found = next((each for each in LAUNCHERS if each.rank in variables and each.sign in variables), None)
    if found is None:
        _refuse_to_stand_for_all_tasks(variables)
    elif found is not TORCH and TORCH.size in variables and number(variables, found.size) is not None:
        stated, launched = number(variables, TORCH.size), number(variables, found.size)
        if stated != launched:
            raise UserError(
                f"{TORCH.size}={stated} is not the {launched} processes that {found.name} launched ({found.size}): "
                f"unset {TORCH.size}"
            )
    return found


def number(variables: Variables, name: str) -> int | None:
    """Return the number in a variable; None if it is not set.

    Raises:
        UserError: if it is no number.
    """
    if name not in variables:
        return None
    if not re.fullmatch(r"\s*-?\d{1,18}\s*", variables[name]):
        raise UserError(f"{name}={variables[name][:80]!r} is not a number: set it as a rank")
    return int(variables[name])


def _refuse_to_stand_for_all_tasks(variables: Variables) -> None:
    """Refuse a process of a batch script or of an allocation: it would wait for tasks that nobody started."""
    tasks = None if SLURM.sign in variables or TORCH.size in variables else number(variables, "SLURM_NTASKS")
    if tasks is not None and tasks > 1:
        raise UserError(
            f"SLURM_NTASKS={tasks}, and this process is none of the {tasks} tasks: write srun before the command, or "
            "srun -n 1 for one"
        )


def _first_number(*names: str) -> Callable[[Variables], int | None]:
    """Return a function that returns the number of the first of some variables that is set."""

    def first(variables: Variables) -> int | None:
        return next((number(variables, name) for name in names if name in variables), None)

    return first


def _nowhere(variables: Variables) -> Meeting:
    return Meeting()


def _at_mpirun(variables: Variables) -> Meeting:
    """Return the host of mpirun, whose address every process of Open MPI 4 knows, and a port made of the job's number.

    Raises:
        UserError: on the first rank, if it is on another host.
    """
    job = number(variables, "OMPI_MCA_ess_base_jobid")
    port = None if job is None else PORTS[job % len(PORTS)]
    if variables["OMPI_COMM_WORLD_SIZE"] == variables.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        return Meeting(address="127.0.0.1", port=port)
    mpirun, daemon = (variables.get(f"OMPI_MCA_orte_{name}_uri") for name in ("hnp", "local_daemon"))
    address = re.search(r"tcp://([\d.]+)", mpirun or "")
    if address is None or "MASTER_ADDR" in variables:
        return Meeting(port=port)
    if variables["OMPI_COMM_WORLD_RANK"] == "0" and daemon != mpirun:
        raise UserError(
            "the first rank is on another host than mpirun, and nobody says where: add -x MASTER_ADDR=HOST with the "
            "host of the first rank, or run mpirun there"
        )
    return Meeting(address=address[1], port=port)


def _on_this_node(variables: Variables) -> int | None:
    counts, node = variables.get("SLURM_STEP_TASKS_PER_NODE"), number(variables, "SLURM_NODEID")
    return None if counts is None or node is None else tasks_of_node(counts, node)


def _on_the_first_node(variables: Variables) -> Meeting:
    """Return the first node of the step, and a port made of the numbers of job and step, which all tasks know."""
    hosts = variables.get("SLURM_STEP_NODELIST")
    job, step = number(variables, "SLURM_JOB_ID"), number(variables, "SLURM_STEP_ID")
    return Meeting(
        address=None if hosts is None else first_host(hosts),
        port=None if job is None or step is None else PORTS[(100 * job + step) % len(PORTS)],
    )


TORCH = Launcher(
    name="torch",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size=_first_number("LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    sign="RANK",
    meeting=_nowhere,
)

SLURM = Launcher(
    name="srun",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_size=_on_this_node,
    # A batch script has a SLURM_PROCID, too, and is no task of its own allocation.
    sign="SLURM_STEP_ID",
    meeting=_on_the_first_node,
)

LAUNCHERS = (
    TORCH,
    Launcher(
        name="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size=_first_number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        sign="OMPI_COMM_WORLD_RANK",
        meeting=_at_mpirun,
    ),
    Launcher(
        name="mpirun_rsh",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size=_first_number("MV2_COMM_WORLD_LOCAL_SIZE"),
        sign="MV2_COMM_WORLD_RANK",
        meeting=_nowhere,
    ),
    Launcher(
        name="mpiexec",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size=_first_number("MPI_LOCALNRANKS"),
        # Slurm sets PMI_RANK for libraries of MPI, too, but this one only mpiexec does.
        sign="MPI_LOCALRANKID",
        meeting=_nowhere,
    ),
    SLURM,
)
"""The launcher nearest to the process first."""
