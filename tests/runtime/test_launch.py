"""The place of a process among all that were launched, from the variables that each launcher sets."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime import launch as environment_module
from deepspeed_ext.runtime.launch import PORTS, LaunchEnvironment, first_host, is_this_host, tasks_of_node
from tests.runtime import recorded_launches as recorded

START = "start with deepspeed, torchrun, mpirun or srun"


def place(rank: int, world_size: int, local_rank: int, local_size: int, *meeting: object) -> LaunchEnvironment:
    sizes = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "local_size": local_size}
    return LaunchEnvironment(**sizes, meeting=meeting or (None, None))


OF_TORCH = place(5, 8, 1, 4)


OF_SLURM = place(2, 3, 0, 1, "tslice-29807-1-host1", 20100)
LAUNCHED: dict[str, tuple[dict[str, str], LaunchEnvironment]] = {
    "deepspeed": (recorded.DEEPSPEED, OF_TORCH),
    "torchrun": (recorded.TORCHRUN, OF_TORCH),
    "mpirun": (recorded.OPEN_MPI, place(2, 3, 1, 2, "10.88.0.1", 27841)),
    "its first rank": (recorded.OPEN_MPI_FIRST, place(0, 3, 0, 1, "10.88.0.1", 27841)),
    "mpirun on one host": (recorded.OPEN_MPI_ONE_HOST, place(1, 2, 1, 2, "127.0.0.1", 30977)),
    "mpiexec": (recorded.MPICH, place(1, 2, 1, 2)),
    "srun": (recorded.SLURM, OF_SLURM),
    "srun --mpi=pmi2": (recorded.SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3"}, OF_SLURM),
    "mpirun in slurm": (recorded.OPEN_MPI_IN_SLURM, place(3, 4, 1, 2, "10.88.0.1", 30305)),
    # Slurm's local numbers may be of other ranks: none is taken from a launcher farther away.
    "by hand in srun": (recorded.SLURM | {"RANK": "1", "WORLD_SIZE": "2"}, place(1, 2, 0, 2)),
    # Each rank still gets cores of its own.
    "without a number of local ranks": ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, place(5, 8, 1, 8)),
    "no launcher": ({"PATH": "/bin"}, place(0, 1, 0, 1)),
    "a script of one task": (recorded.BATCH_SCRIPT | {"SLURM_NTASKS": "1"}, place(0, 1, 0, 1)),
}


@pytest.mark.parametrize(("variables", "expected"), LAUNCHED.values(), ids=LAUNCHED)
def test_every_launcher_is_understood(variables: dict[str, str], expected: LaunchEnvironment) -> None:
    assert LaunchEnvironment.read(variables) == expected
    if expected.world_size > 1:
        assert LaunchEnvironment.of_dry_run(variables, stated=None, least=2) == expected


def test_the_launcher_nearest_to_the_process_counts() -> None:
    for inner in (recorded.DEEPSPEED, recorded.TORCHRUN):
        for outer in (recorded.SLURM, recorded.BATCH_SCRIPT, recorded.OPEN_MPI, recorded.OPEN_MPI_IN_SLURM):
            assert LaunchEnvironment.read(outer | inner) == OF_TORCH


@pytest.mark.parametrize(
    ("variables", "stated", "world_size"),
    [
        ({}, None, 2),
        ({}, 16, 16),
        ({"WORLD_SIZE": "64"}, None, 64),
        (recorded.BATCH_SCRIPT, 16, 16),
        (recorded.BATCH_SCRIPT, None, 4),
        (recorded.BATCH_SCRIPT | {"WORLD_SIZE": "8"}, None, 8),
    ],
)
def test_a_dry_run_without_a_launcher_is_the_first_rank(
    variables: dict[str, str], stated: int | None, world_size: int
) -> None:
    found = LaunchEnvironment.of_dry_run(variables, stated=stated, least=2)
    assert found == place(0, world_size, 0, world_size)


@pytest.mark.parametrize(
    ("launched", "stated", "least", "world_size"),
    [(1, None, 16, 16), (1, 32, 16, 32), (8, None, 16, 16), (8, None, 4, 8), (3, None, 2, 3)],
)
def test_a_dry_run_needs_no_devices(launched: int, stated: int | None, least: int, world_size: int) -> None:
    """As `deepspeed pretrain_gpt.py --dry-run` starts ranks on a host with fewer devices than the run has."""
    sizes = {"WORLD_SIZE": str(launched), "LOCAL_SIZE": str(launched), "CROSS_RANK": "0"}
    variables = {"RANK": "0", "LOCAL_RANK": "0"} | sizes
    found = LaunchEnvironment.of_dry_run(variables | {"CROSS_SIZE": "1"}, stated=stated, least=least)
    assert found == place(0, world_size, 0, world_size)
    # Two hosts, and launchers whose numbers are always stated.
    for others in ({"CROSS_SIZE": "2"}, {}):
        assert LaunchEnvironment.of_dry_run(variables | others, stated=stated, least=least).world_size == launched


def test_the_flag_gives_the_local_rank_without_a_variable() -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8"}
    assert LaunchEnvironment.read(variables, local_rank=3).local_rank == 3
    assert LaunchEnvironment.read(variables | {"LOCAL_RANK": "0"}, local_rank=3).local_rank == 0


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "1"}, f"WORLD_SIZE is not set, but RANK is: {START}"),
        ({"WORLD_SIZE": "2"}, f"RANK is not set, but WORLD_SIZE is: {START}"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number: set one, or unset RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, f"RANK 2 is not below WORLD_SIZE 2: {START}"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, f"RANK -1 is not below WORLD_SIZE 2: {START}"),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "2"}, f"RANK='{'9' * 80}' is not a whole number: set one, or unset RANK"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            f"LOCAL_RANK 2 is not below the number of ranks of this host 2: {START}",
        ),
        (
            recorded.SLURM | {"WORLD_SIZE": "16"},
            "WORLD_SIZE=16 is not the 3 processes that srun launched (SLURM_STEP_NUM_TASKS): unset WORLD_SIZE",
        ),
        (
            recorded.BATCH_SCRIPT,
            "SLURM_NTASKS=4, and this process is none of the 4 tasks: write srun before the command, or srun -n 1 for "
            "one",
        ),
        (
            recorded.SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"},
            "'2(x' has no number of tasks for node 1, as 4(x2),1 has: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_SIZE",
        ),
        (
            recorded.OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"},
            "the first rank is on another host than mpirun, which is unknown: add -x MASTER_ADDR=HOST with the "
            "host of the first rank, or run mpirun there",
        ),
    ],
)
def test_half_an_environment_or_two_that_contradict_are_refused(variables: dict[str, str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        LaunchEnvironment.read(variables)
    assert str(caught.value) == line


STATED = recorded.OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "MASTER_ADDR": "10.88.0.2"}
EXPORTED = {
    "stated": ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"} | recorded.TORCHRUN, "10.88.0.1", "29400"),
    "of the launcher": (recorded.SLURM, "tslice-29807-1-host1", "20100"),
    "half stated": (recorded.SLURM | {"MASTER_ADDR": "ib0-host1"}, "ib0-host1", "20100"),
    "not on the host of mpirun": (STATED, "10.88.0.2", "27841"),
    "one process": ({"MASTER_PORT": "1234"}, "127.0.0.1", "1234"),
    "one process, to meet elsewhere": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere"}, "127.0.0.1", "0"),
    # Any free port: runs on one host must not meet.
    "one process, not stated": ({}, "127.0.0.1", "0"),
}


@pytest.mark.parametrize(("variables", "address", "port"), EXPORTED.values(), ids=EXPORTED)
def test_the_place_to_meet_is_exported(variables: dict[str, str], address: str, port: str) -> None:
    exported = dict(variables)
    place = LaunchEnvironment.read(exported)
    place.export(exported)
    assert (exported["MASTER_ADDR"], exported["MASTER_PORT"]) == (address, port)
    again = LaunchEnvironment.read(exported)
    assert (again.rank, again.world_size, again.local_rank) == (place.rank, place.world_size, place.local_rank)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port: set a number from 1 to 65535, or unset it"),
        ({"MASTER_PORT": "a"}, "MASTER_PORT=a is not a port: set a number from 1 to 65535, or unset it"),
        # DeepSpeed's launcher starts ranks here if the hostfile, or what is included of it, is one other host.
        (
            {"CROSS_SIZE": "1", "MASTER_ADDR": "192.0.2.1"},
            "DeepSpeed's launcher started the ranks of a single host on ",
        ),
    ],
)
def test_places_to_meet_that_cannot_be(variables: dict[str, str], line: str) -> None:
    for launched in (recorded.DEEPSPEED, {"RANK": "0", "WORLD_SIZE": "1"}):
        with pytest.raises(UserError) as caught:
            LaunchEnvironment.read(launched).export(launched | variables)
        assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("name", "is_here"),
    [
        ("localhost", True),
        ("root@127.0.0.1", True),
        (socket.gethostname(), True),
        ("192.0.2.1", False),
        ("a..b", False),
    ],
)
def test_names_of_this_host(name: str, is_here: bool) -> None:
    assert is_this_host(name) == is_here


@pytest.mark.parametrize("number", ["1", "99999999", "2147483647"])
def test_the_port_of_a_job_is_none_of_outgoing_connections(number: str) -> None:
    for variables in (
        recorded.SLURM | {"SLURM_JOB_ID": number},
        recorded.OPEN_MPI | {"OMPI_MCA_ess_base_jobid": number},
    ):
        assert LaunchEnvironment.read(variables).meeting[1] in PORTS


def test_ranks_without_a_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under MPICH. Where mpi4py is installed DeepSpeed finds out by itself."""
    monkeypatch.setattr(environment_module, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^MASTER_ADDR not set, so the 8 ranks cannot meet: set them to the first host"
    ):
        OF_TORCH.export({"MASTER_PORT": "29500"})
    monkeypatch.setattr(environment_module, "find_spec", lambda name: object() if name == "mpi4py" else None)
    OF_TORCH.export({})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("tslice-29807-1-host[1-2]", "tslice-29807-1-host1"),
        ("gpu[003-005,009],login", "gpu003"),
        ("login,gpu[3-5]", "login"),
        ("rack[03-05,9]-gpu[1-2]", "rack03-gpu1"),
        ("a[7].example.org,b", "a7.example.org"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_no_list_of_hosts_is_refused() -> None:
    for hosts in ("", "[", ",a", "[a-b]"):
        with pytest.raises(UserError, match=r"is not a list of hosts as Slurm writes it: set MASTER_ADDR"):
            first_host(hosts)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=5), st.data())
def test_tasks_of_each_node(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    expanded = [tasks for tasks, nodes in runs for _ in range(nodes)]
    node = data.draw(st.integers(0, len(expanded) - 1))
    assert tasks_of_node(text, node) == expanded[node]
    with pytest.raises(UserError, match="has no number of tasks for node"):
        tasks_of_node(text, len(expanded))


def test_a_list_of_very_many_nodes_takes_no_time() -> None:
    assert tasks_of_node("8(x999999999),1", 999_999_999) == 1
    with pytest.raises(UserError):
        tasks_of_node("8(x" + "9" * 5000 + ")", 0)
