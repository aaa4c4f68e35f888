"""Who a process is, from the variables that each launcher sets."""

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training import launch_environment
from megatron_terapipe.training.launch_environment import LaunchEnvironment

EXPECTED = LaunchEnvironment(rank=5, world_size=8, local_rank=1, local_size=4)
LAUNCHERS = {
    "deepspeed": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1"},
    "torchrun": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    },
    "slurm": {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"},
}


@pytest.mark.parametrize("variables", LAUNCHERS.values(), ids=LAUNCHERS)
def test_every_launcher_is_understood(variables: dict[str, str]) -> None:
    assert LaunchEnvironment.read(variables) == EXPECTED


@pytest.mark.parametrize("inner", ["deepspeed", "torchrun"])
def test_the_launcher_nearest_to_the_process_counts(inner: str) -> None:
    """An allocation of one SLURM task, inside which another launcher starts the ranks."""
    outer = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}
    assert LaunchEnvironment.read(outer | LAUNCHERS[inner]) == EXPECTED


def test_alone_without_variables() -> None:
    alone = LaunchEnvironment(rank=0, world_size=1, local_rank=0, local_size=1)
    assert LaunchEnvironment.read({}) == alone
    assert LaunchEnvironment.read({"PATH": "/bin"}, local_rank=0) == alone


@pytest.mark.parametrize(
    ("variables", "stated", "world_size"),
    [
        ({}, None, 2),
        ({}, 16, 16),
        ({"WORLD_SIZE": "64"}, None, 64),
        ({"SLURM_NTASKS": "1"}, 16, 16),
    ],
    ids=["the least", "stated", "by a variable", "an allocation"],
)
def test_a_dry_run_is_the_first_of_ranks_that_nobody_launched(
    variables: dict[str, str], stated: int | None, world_size: int
) -> None:
    place = LaunchEnvironment.of_dry_run(variables, stated=stated, least=2)
    assert place == LaunchEnvironment(rank=0, world_size=world_size, local_rank=0, local_size=world_size)


def test_a_dry_run_under_a_launcher_is_where_the_launcher_says() -> None:
    assert LaunchEnvironment.of_dry_run(LAUNCHERS["deepspeed"], stated=None, least=2) == EXPECTED


def test_the_flag_says_the_local_rank_where_no_variable_does() -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8"}
    assert LaunchEnvironment.read(variables, local_rank=3).local_rank == 3
    assert LaunchEnvironment.read(variables | {"LOCAL_RANK": "0"}, local_rank=3).local_rank == 0


def test_where_nobody_says_how_many_share_the_host_all_may() -> None:
    """`srun -n 8` does not; each rank still gets cores of its own."""
    variables = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    assert LaunchEnvironment.read(variables).local_size == 8


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set, but its counterpart is: start with deepspeed or torchrun"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, but its counterpart is: start with deepspeed or torchrun"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a number: set it as a rank"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4(x2)"}, "SLURM_NTASKS='4(x2)' is not a number: set it as a rank"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 is not below WORLD_SIZE 2: start with deepspeed or torchrun"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK -1 is not below WORLD_SIZE 2: start with deepspeed or torchrun"),
    ],
)
def test_half_an_environment_is_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LaunchEnvironment.read(variables)
    assert str(caught.value) == said


def test_what_is_exported_is_read_back_by_torch_and_deepspeed() -> None:
    meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    environment = dict(meeting)
    EXPECTED.export(environment)
    assert environment == meeting | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    assert LaunchEnvironment.read(environment) == EXPECTED


def test_alone_a_place_to_meet_is_exported_unless_there_is_one() -> None:
    environment = {"MASTER_PORT": "1234"}
    LaunchEnvironment.read({}).export(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "1234")
    nowhere: dict[str, str] = {}
    LaunchEnvironment.read({}).export(nowhere)
    assert nowhere["MASTER_PORT"] == "0"  # any that is free: runs beside each other must not meet


def test_ranks_that_do_not_know_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a plain `srun`. Where mpi4py is installed DeepSpeed finds out by itself."""
    monkeypatch.setattr(launch_environment, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^MASTER_ADDR not set, so the 8 ranks cannot meet: set them to the first host"
    ):
        EXPECTED.export({"MASTER_PORT": "29500"})
    monkeypatch.setattr(launch_environment, "find_spec", lambda name: object() if name == "mpi4py" else None)
    EXPECTED.export({})
