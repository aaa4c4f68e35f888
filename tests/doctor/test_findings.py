"""Each check fails for facts with one fault, and passes for facts without."""

from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from megatron_terapipe.doctor.checks import findings
from megatron_terapipe.doctor.facts import Clock, Examined, Imports, variables_of_rank
from megatron_terapipe.doctor.findings import Finding, Level
from tests.doctor.made import GIB, Change, alone, everywhere, facts, healthy, launching, link, on

ALL = "node1 node2 node3"
VERSIONS = {"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.0"}


def device(**changes: object) -> Change:
    """Change all devices of the second host."""
    return on(2, devices=(replace(facts(1, devices=1).devices[0], **changes),) * 8)  # type: ignore[arg-type]


def bad(examined: Examined) -> list[Finding]:
    """Findings of checks that did not pass."""
    return [each for each in findings(examined) if each.level is not Level.OK]


@pytest.mark.parametrize("examined", [healthy(), healthy(devices=0), alone()], ids=["devices", "cores", "alone"])
def test_all_checks_pass_without_a_fault(examined: Examined) -> None:
    assert bad(examined) == []
    assert len(findings(examined)) > 15


FAULTS: list[tuple[Any, ...]] = [
    # Level and hosts, check and a part of the line, and changes of the facts.
    ("error node2", "reach: ssh-copy-id node2", on(2, failure="node2: Permission denied (publickey)", facts=None)),
    ("error node2", "reach: run ssh node2 once", on(2, failure="Host key verification failed.", facts=None)),
    ("error node2", "reach: port 22", on(2, failure="connect to host: Connection timed out", facts=None)),
    ("error node2", "reach: --ssh-port", on(2, failure="port 22: Connection refused", facts=None)),
    ("error node2", "reach: /etc/hosts", on(2, failure="Could not resolve hostname node2", facts=None)),
    ("error node2", "reach: by hand", on(2, failure="Segmentation fault", facts=None)),
    ("error node2", "reach: no answer within 60 s", on(2, failure="no answer within 60 s")),
    (
        "error node2",
        "reach: Connection refused; the doctor",
        launching(launcher="slurm", programs={"srun": "srun"}),
        on(2, failure="Connection refused"),
    ),
    ("error", "launcher: no pdsh", launching(programs={"ssh": "/usr/bin/ssh"})),
    (f"error {ALL}", "launcher: no mpirun", launching(launcher="openmpi", programs={"mpirun": "/usr/bin/mpirun"})),
    (
        "error node2",
        "hostfile: the same machine as node1",
        on(2, names={"hostname": "node1", "listed_addresses": ("10.0.0.1", "10.1.0.1")}),
    ),
    ("error node3", "directory: /shared/work", on(3, software={"has_folder": False})),
    ("error node3", "python: /env/bin/python", on(3, software={"python": None})),
    ("error node3", "project: /project", on(3, software={"digest": None})),
    ("error node3", "project: node1 has 0123456789ab", on(3, software={"digest": "ba9876543210"})),
    ("warning", "packages: pip install", launching(requirements=None)),
    (f"error {ALL}", "packages: Python 3.10.1", everywhere(software={"python_version": "3.10.1"})),
    ("error", "packages: 3.12.4 on node1, node3; 3.11.2 on node2", on(2, software={"python_version": "3.11.2"})),
    (
        f"error {ALL}",
        "packages: no numpy; needs numpy>=1.26: pip install 'numpy>=1.26'",
        everywhere(software={"packages": {"torch": "2.13.0", "deepspeed": "0.19.8"}}),
    ),
    (
        f"error {ALL}",
        "packages: deepspeed 0.20.1; must be >=0.19.8 and <0.20",
        everywhere(software={"packages": VERSIONS | {"deepspeed": "0.20.1"}}),
    ),
    (
        "error",
        "packages: torch 2.13.0 on node1, node2; 2.12.1+cu128 on node3",
        on(3, software={"packages": VERSIONS | {"torch": "2.12.1+cu128"}}),
    ),
    ("error node2", "imports: no module", on(2, imports=Imports(error="no module named deepspeed"))),
    ("error", "imports: accelerator cuda on node1, node3; cpu on node2", on(2, imports={"accelerator": "cpu"})),
    ("error", "imports: 2.26.1 on node3", on(3, imports={"nccl": "2.26.1"})),
    ("error node2", "cuda: without CUDA", on(2, imports={"cuda": None, "nccl": "2.27.3"})),
    ("error node2", "cuda: driver 570.86 lists 8 devices", on(2, imports={"num_devices": 0})),
    ("warning", "cuda: driver 570.86 on node1, node3; 550.54 on node2", device(driver="550.54")),
    ("error node1", "slots: slots=9, and 8 devices", on(1, slots=9)),
    ("error node2", "slots: and 0 devices", on(2, devices=(), imports={"num_devices": 0})),
    ("warning", "device kinds: none on node2", on(2, devices=(), imports={"num_devices": 0})),
    ("warning node1", "slots: slots=7, and 8 devices; 1 of", on(1, slots=7)),
    ("warning node1", "cores: 8 ranks on 4 cores", on(1, resources={"cores": 4})),
    ("warning node2", "device memory: 40.0 of 80.0 GiB free", device(free_bytes=40 * GIB)),
    ("warning node2", "device memory: used by python (4711)", device(processes=("python (4711)",))),
    ("warning", "device kinds: NVIDIA H100 on node1, node3; NVIDIA A100 on node2", device(name="NVIDIA A100")),
    ("warning node1", "memory: 2.0 of 512.0 GiB", on(1, resources={"free_memory_bytes": 2 * GIB})),
    ("warning node1", "shared memory: --shm-size", on(1, resources={"free_shared_memory_bytes": GIB // 16})),
    ("warning node1", "limits: ulimit -n 256; the ranks may need 352", on(1, resources={"open_files": 256})),
    ("warning node1", "limits: ulimit -u 100", on(1, resources={"processes": 100})),
    ("error node1", "limits: ulimit -l 64", on(1, resources={"locked_memory_bytes": 65536})),
    ("error", "deepspeed_env: line 2 of", launching(environment_file=("NCCL_DEBUG=INFO", "", "A=1"))),
    (
        "error",
        "deepspeed_env: line 1 of .deepspeed_env has $ in the value of B",
        launching(environment_file=("B=a$HOME",)),
    ),
    ("warning", "variables: CUDA_MODULE_LOADING=EAGER", launching(variables={"CUDA_MODULE_LOADING": "EAGER"})),
    ("warning", "variables: TORCH_LOGS=all on node2", on(2, variables={"TORCH_LOGS": "all"})),
    ("error", "variables: NCCL_ALGO=Tree on node2", on(2, variables={"NCCL_ALGO": "Tree"})),
    (f"error {ALL}", "variables: CUDA_LAUNCH_BLOCKING=1", everywhere(variables={"CUDA_LAUNCH_BLOCKING": "1"})),
    (
        f"warning {ALL}",
        "variables: CUDA_DEVICE_MAX_CONNECTIONS=1",
        launching(environment_file=("CUDA_DEVICE_MAX_CONNECTIONS=1",)),
    ),
    (
        f"warning {ALL}",
        "threads: OMP_NUM_THREADS=16 for 8 ranks on 64 cores",
        launching(environment_file=("OMP_NUM_THREADS=16",)),
    ),
    (f"error {ALL}", "threads: OMP_NUM_THREADS=all", launching(environment_file=("OMP_NUM_THREADS=all",))),
    (
        f"error {ALL}",
        "interfaces: NCCL_SOCKET_IFNAME=ib; no such interface is up; there are lo, eth0, eth1",
        launching(variables={"NCCL_SOCKET_IFNAME": "ib"}),
    ),
    (f"error {ALL}", "interfaces: GLOO_SOCKET_IFNAME=eth", launching(environment_file=("GLOO_SOCKET_IFNAME=eth",))),
    ("warning node2", "names: own name node2", on(2, names={"own_addresses": ()})),
    ("warning node2", "names: 127.0.1.1", on(2, names={"own_addresses": ("127.0.1.1",)})),
    (
        "error node1",
        "meeting: port 29500: address already in use",
        lambda examined: replace(examined, meeting_fault="address already in use"),
    ),
    ("error node1", "meeting: --master_addr ADDRESS", on(1, names={"listed_addresses": ()})),
    ("warning node1", "meeting: --master_addr 10.0.0.1", on(1, names={"listed_addresses": ("172.17.0.1", "10.0.0.1")})),
    ("error node2", "links: port 29500 of node1 (10.0.0.1): no", link(2, 1, meeting=True, fault="no answer")),
    ("error node2", "links: port 40000 of node3 (10.0.0.3): refused", link(2, 3, fault="refused")),
    ("warning node1", "links: 5000 us to port 40000 of node2", link(1, 2, round_trip_s=5e-3)),
    (
        "error node2",
        "links: no address but loopback",
        on(2, names={"own_addresses": (), "listed_addresses": ()}, interfaces=()),
        launching(variables={"GLOO_SOCKET_IFNAME": "lo"}),
    ),
    ("error node2", "disk: /shared: permission denied", on(2, folder={"fault": "permission denied"})),
    (
        "warning node2",
        "disk: /shared: not writable",
        on(2, folder={"fault": "not writable"}),
        launching(save_is_given=False),
    ),
    ("warning node2", "disk: 2.0 GB free in /shared", on(2, folder={"free_bytes": 2 * 10**9})),
    ("error node2", "shared disk: another directory than on node1", on(2, folder={"sees_token": False})),
    ("warning node3", "clocks: +3.199 s (within 0.101 s)", on(3, clock=Clock(offset_s=3.2, uncertainty_s=0.1))),
]


def changed(examined: Examined, *changes: Change) -> Examined:
    """Facts after some changes."""
    return reduce(lambda made, change: change(made), changes, examined)


@pytest.mark.parametrize("fault", FAULTS, ids=[line for _, line, *_ in FAULTS])
def test_a_fault_is_found(fault: tuple[Any, ...]) -> None:
    where, line, *changes = fault
    examined = changed(healthy(), *changes)
    check, _, part = line.partition(": ")
    level, *hosts = where.split()
    found = [each for each in bad(examined) if each.check == check and part in each.line]
    assert [(each.level, each.hosts) for each in found][:1] == [(level, tuple(hosts))], bad(examined)
    assert all("\n" not in each.line and each.remedy for each in found)


def test_every_check_fails_in_one_of_these() -> None:
    examined = [changed(healthy(), *changes) for _, _, *changes in FAULTS]
    failed = {each.check for one in examined for each in bad(one)}
    assert failed == {each.check for one in [*examined, healthy(), alone()] for each in findings(one)}


def test_faults_of_hosts_without_devices() -> None:
    for check, level, change in (
        ("cores", "warning", on(1, resources={"cores": 2})),
        ("names", "error", on(1, names={"own_addresses": ("127.0.1.1",)})),
    ):
        (found,) = bad(change(healthy(devices=0)))
        assert (found.check, found.level, found.hosts) == (check, level, ("node1",))


@pytest.mark.parametrize(
    ("launcher", "reaching"), [("pdsh", {"NCCL_ALGO"}), ("slurm", {"NCCL_ALGO", "OMP_NUM_THREADS"}), ("ssh", set())]
)
def test_the_launcher_decides_the_variables_of_ranks(launcher: str, reaching: set[str]) -> None:
    shell = {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1"}
    examined = launching(launcher=launcher, variables=shell, programs={"srun": "", "pdsh": "", "ssh": ""})(healthy())
    assert set(variables_of_rank(examined.launching, {})) == reaching
    lost = [each for each in bad(examined) if ".deepspeed_env" in each.line]
    assert bool(lost) == (launcher == "pdsh")


@pytest.mark.parametrize(
    "change",
    [
        on(2, variables={"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO"}),  # Hosts may have other cards.
        everywhere(clock=Clock(offset_s=-40.0, uncertainty_s=0.001)),  # The clock of the launching machine is wrong.
        on(3, clock=Clock(offset_s=3.2, uncertainty_s=2.5)),  # It may be right.
    ],
    ids=["cards", "clock of the launch", "uncertain clock"],
)
def test_differences_that_are_no_fault(change: Change) -> None:
    assert bad(change(healthy())) == []


def test_equal_findings_are_one_line_and_errors_come_first() -> None:
    (found,) = bad(everywhere(resources={"open_files": 256})(healthy()))
    assert found.hosts == ("node1", "node2", "node3")
    examined = changed(healthy(), on(1, slots=9), on(2, resources={"cores": 4}))
    assert [each.level for each in findings(examined)][:3] == [Level.ERROR, Level.WARNING, Level.OK]
