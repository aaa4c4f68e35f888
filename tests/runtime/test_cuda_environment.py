"""Variables of CUDA runs are set before torch starts, a user's value stays, and ranks that differ are reported."""

import pytest

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.cuda_environment import (
    HARDWARE_QUEUES,
    VARIABLES,
    check_same_environment,
    compared_variables,
    hardware_queues,
    prepare_cuda_environment,
    visible_devices,
    will_use_cuda,
)

OURS = {variable.name: variable.value for variable in VARIABLES}


def prepared(environment: dict[str, str], num_pipeline_ranks: int = 2) -> list[str]:
    return prepare_cuda_environment(environment, num_pipeline_ranks=num_pipeline_ranks, has_device=True)


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("1,0", ["1", "0"]),
        (" 2, 3 ", ["2", "3"]),
        ("GPU-8932f937,1", ["GPU-8932f937", "1"]),
        ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2", ["MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"]),
        ("0,-1,1", ["0"]),
        *((hidden, []) for hidden in ("", "-1", "NoDevFiles", "none")),
    ],
)
def test_visible_devices(value: str, devices: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": value}) == devices
    assert visible_devices({}) is None


def test_unset_variables_are_set_and_listed() -> None:
    environment = {"PATH": "/bin"}
    assert prepared(environment) == [
        "CUDA environment: set CUDA_DEVICE_MAX_CONNECTIONS=32, CUDA_MODULE_LOADING=EAGER, "
        "PYTORCH_ALLOC_CONF=expandable_segments:True, TORCH_NCCL_HIGH_PRIORITY=1, "
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING=false"
    ]
    assert environment == OURS | {"PATH": "/bin"}


def test_a_users_value_stays_under_either_name() -> None:
    users = {HARDWARE_QUEUES: "16", "PYTORCH_CUDA_ALLOC_CONF": "backend:native", "TORCH_NCCL_HIGH_PRIORITY": "0"}
    environment = dict(users)
    assert prepared(environment) == [
        "CUDA environment: set CUDA_MODULE_LOADING=EAGER, TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING=false; "
        "kept CUDA_DEVICE_MAX_CONNECTIONS=16, "
        "PYTORCH_CUDA_ALLOC_CONF=backend:native, TORCH_NCCL_HIGH_PRIORITY=0"
    ]
    assert environment == {name: value for name, value in OURS.items() if name != "PYTORCH_ALLOC_CONF"} | users


def test_a_repeatable_run_needs_more() -> None:
    environment = {"NCCL_ALGO": "Tree"}
    (line,) = prepare_cuda_environment(environment, num_pipeline_ranks=2, deterministic=True, has_device=True)
    assert line.endswith("CUBLAS_WORKSPACE_CONFIG=:4096:8; kept NCCL_ALGO=Tree")
    assert environment == OURS | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Tree"}


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        *((name, "anything", "leaves the order of sums open") for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")),
        *((HARDWARE_QUEUES, value, "is not a number from 1 to 32") for value in ("0", "33", "many", "")),
        ("CUDA_LAUNCH_BLOCKING", "1", "makes every launch wait for the device"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "makes every release of memory wait for the device"),
    ],
)
def test_values_that_lock_or_are_not_repeatable_are_refused(name: str, value: str, fault: str) -> None:
    environment = {name: value}
    with pytest.raises(UserError, match=rf"^{name}='?{value}'? {fault}.*: unset it, or "):
        prepare_cuda_environment(environment, num_pipeline_ranks=2, deterministic=True, has_device=True)
    assert environment == {name: value}


def test_without_a_pipeline_nothing_locks() -> None:
    for name in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        assert prepared({name: "0"})
        assert prepared({name: "1"}, num_pipeline_ranks=1)


def test_hardware_queues_are_those_of_the_driver_unless_stated() -> None:
    assert [hardware_queues(each) for each in ({}, {HARDWARE_QUEUES: "1"}, OURS)] == [8, 1, 32]


@pytest.mark.parametrize(
    ("environment", "has_device", "used"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"DS_ACCELERATOR": "cpu"}, True, False),
        ({"DS_ACCELERATOR": "cuda"}, False, True),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, False),
        ({"CUDA_VISIBLE_DEVICES": "3"}, True, True),
    ],
)
def test_where_cuda_is_not_used_nothing_is_set(environment: dict[str, str], has_device: bool, used: bool) -> None:
    assert will_use_cuda(environment, has_device=has_device) == used
    before = dict(environment)
    lines = prepare_cuda_environment(environment, num_pipeline_ranks=2, has_device=has_device)
    assert bool(lines) == (environment != before) == used


@pytest.mark.parametrize(
    ("name", "value", "warns"),
    [
        (HARDWARE_QUEUES, "1", True),
        (HARDWARE_QUEUES, "8", False),
        ("CUDA_MODULE_LOADING", "LAZY", True),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", True),
        ("TORCH_NCCL_BLOCKING_WAIT", "0", False),
    ],
)
def test_unwise_values_are_warned_of_where_ranks_exchange_messages(name: str, value: str, warns: bool) -> None:
    warnings = prepared({name: value})[1:]
    assert [line.startswith(f"warning: {name}={value} ") for line in warnings] == [True] * warns
    assert len(prepared({name: value}, num_pipeline_ranks=1)) == 1


HOSTS = ("a", "a", "b")


def test_ranks_with_other_numbers_of_queues_are_refused_and_other_differences_listed() -> None:
    mine = compared_variables(OURS | {"PATH": "/bin", "NCCL_SOCKET_IFNAME": "eth0"})
    assert mine == OURS
    assert check_same_environment([mine] * 3, HOSTS) == []
    (line,) = check_same_environment([mine, mine, mine | {"CUDA_MODULE_LOADING": "LAZY"}], HOSTS)
    values = "CUDA_MODULE_LOADING=LAZY on rank 2 (host b) and CUDA_MODULE_LOADING=EAGER on rank 0 (host a)"
    assert line.startswith(f"{values}: set it for all")
    (line,) = check_same_environment([mine, mine | {"TORCH_NCCL_BLOCKING_WAIT": "1"}], HOSTS)
    assert "TORCH_NCCL_BLOCKING_WAIT=1 on rank 1 (host a) and TORCH_NCCL_BLOCKING_WAIT unset on rank 0 " in line
    with pytest.raises(UserError, match=rf"^{HARDWARE_QUEUES}=8 on rank 1 .* and {HARDWARE_QUEUES}=32 on rank 0 "):
        check_same_environment([mine, mine | {HARDWARE_QUEUES: "8"}], HOSTS)
