"""Each finding fires over made-up facts in which one thing is wrong, and none does where nothing is."""

from dataclasses import replace
from functools import reduce

import pytest

from megatron_terapipe.doctor.facts import Clock, Examined, Imports
from megatron_terapipe.doctor.findings import Finding, Level
from megatron_terapipe.doctor.launching import variables_of_rank
from megatron_terapipe.doctor.report import findings
from tests.doctor.made import GIB, Change, alone, everywhere, facts, healthy, launching, link, on

ONE_DEVICE = facts(1, devices=1).devices[0]


def device(**changes: object) -> Change:
    """Change all devices of the second host."""
    return on(2, devices=(replace(ONE_DEVICE, **changes),) * 8)  # type: ignore[arg-type]


def interface(number: int, **changes: object) -> Change:
    """Change eth0 of a host."""
    lo, eth0, eth1 = facts(number, devices=8).interfaces
    return on(number, interfaces=(lo, replace(eth0, **changes), eth1))  # type: ignore[arg-type]


def bad(examined: Examined) -> list[Finding]:
    """Findings that are not good."""
    return [each for each in findings(examined) if each.level is not Level.OK]


@pytest.mark.parametrize("examined", [healthy(), healthy(devices=0), alone()], ids=["devices", "cores", "alone"])
def test_nothing_is_found_where_nothing_is_wrong(examined: Examined) -> None:
    assert bad(examined) == []
    assert len(findings(examined)) > 15


FAULTS: list[tuple[str, str, tuple[Change, ...]]] = [
    # Level and hosts, check and a part of the line, what is changed.
    ("error node2", "reach: ssh-copy-id node2", (on(2, failure="node2: Permission denied (publickey)", facts=None),)),
    ("error node2", "reach: run ssh node2 once", (on(2, failure="Host key verification failed.", facts=None),)),
    ("error node2", "reach: open port 22", (on(2, failure="connect to host: Connection timed out", facts=None),)),
    ("error node2", "reach: --ssh-port", (on(2, failure="port 22: Connection refused", facts=None),)),
    ("error node2", "reach: /etc/hosts", (on(2, failure="Could not resolve hostname node2", facts=None),)),
    ("error node2", "reach: by hand", (on(2, failure="Segmentation fault", facts=None),)),
    ("error", "launcher: no pdsh on the PATH of this machine", (launching(programs={"ssh": "/usr/bin/ssh"}),)),
    (
        "error node1 node2 node3",
        "launcher: no mpirun on the PATH; --launcher openmpi needs it",
        (launching(launcher="openmpi", programs={"mpirun": "/usr/bin/mpirun"}),),
    ),
    (
        "error node2",
        "hostfile: is the same machine as node1",
        (on(2, names={"hostname": "node1", "listed_addresses": ("10.0.0.1", "10.1.0.1")}),),
    ),
    ("error node3", "directory: no directory /shared/work", (on(3, software={"has_folder": False}),)),
    ("error node3", "python: no /env/bin/python", (on(3, software={"python": None}),)),
    ("error node3", "project: no megatron-terapipe in /project", (on(3, software={"digest": None}),)),
    ("error node3", "project: node1 has 0123456789ab", (on(3, software={"digest": "ba9876543210"}),)),
    ("warning", "packages: megatron-terapipe is not installed", (launching(requirements=None),)),
    ("error node1 node2 node3", "packages: Python 3.10.1", (everywhere(software={"python_version": "3.10.1"}),)),
    ("error", "packages: 3.12.4 on node1, node3; 3.11.2 on node2", (on(2, software={"python_version": "3.11.2"}),)),
    (
        "error node1 node2 node3",
        "packages: no numpy; needs numpy>=1.26: pip install 'numpy>=1.26'",
        (everywhere(software={"packages": {"torch": "2.13.0", "deepspeed": "0.19.8"}}),),
    ),
    (
        "error node1 node2 node3",
        "packages: deepspeed 0.20.1; must be >=0.19.8 and <0.20",
        (everywhere(software={"packages": {"torch": "2.13.0", "deepspeed": "0.20.1", "numpy": "2.0"}}),),
    ),
    (
        "error",
        "packages: torch 2.13.0 on node1, node2; 2.12.1+cu128 on node3",
        (on(3, software={"packages": {"torch": "2.12.1+cu128", "deepspeed": "0.19.8", "numpy": "2.4.0"}}),),
    ),
    ("warning node1", "apex: pip uninstall apex", (on(1, software={"apex": "other"}),)),
    ("error node2", "imports: no module", (on(2, imports=Imports(error="no module named deepspeed")),)),
    ("error", "imports: accelerator cuda on node1, node3; cpu on node2", (on(2, imports={"accelerator": "cpu"}),)),
    ("error node2", "cuda: a torch without CUDA", (on(2, imports={"cuda": None, "nccl": "2.27.3"}),)),
    ("error node2", "cuda: driver 570.86 lists 8 devices, torch sees none", (on(2, imports={"num_devices": 0}),)),
    ("warning node2", "toolkit: nvcc 11.8", (on(2, software={"toolkit": "11.8"}),)),
    ("error", "nccl: 2.26.1 on node3", (on(3, imports={"nccl": "2.26.1"}),)),
    ("warning", "cuda: driver 570.86 on node1, node3; 550.54 on node2", (device(driver="550.54"),)),
    ("error node1", "slots: slots=9, and 8 devices; every slot needs a device: write slots=8", (on(1, slots=9),)),
    ("error node2", "slots: leave this host out", (on(2, devices=(), imports={"num_devices": 0}),)),
    ("warning", "device kinds: none on node2", (on(2, devices=(), imports={"num_devices": 0}),)),
    ("warning node1", "slots: slots=7, and 8 devices; 1 of the devices would be idle", (on(1, slots=7),)),
    ("warning node1", "cores: 8 ranks on 4 cores", (on(1, resources={"cores": 4}),)),
    ("warning node2", "device memory: 40.0 of 80.0 GiB free", (device(free_bytes=40 * GIB),)),
    ("warning node2", "device memory: used by python (4711)", (device(processes=("python (4711)",)),)),
    ("warning", "device kinds: NVIDIA H100 on node1, node3; NVIDIA A100 on node2", (device(name="NVIDIA A100"),)),
    ("warning node1", "memory: 2.0 of 512.0 GiB", (on(1, resources={"free_memory_bytes": 2 * GIB}),)),
    (
        "warning node1",
        "shared memory: --shm-size",
        (on(1, resources={"shared_memory_bytes": GIB // 16, "free_shared_memory_bytes": GIB // 16}),),
    ),
    ("warning node1", "open files: ulimit -n 256; the ranks may need 352", (on(1, resources={"open_files": 256}),)),
    ("warning node1", "processes: ulimit -u 100", (on(1, resources={"processes": 100}),)),
    ("error node1", "locked memory: ulimit -l 64", (on(1, resources={"locked_memory_bytes": 65536}),)),
    ("error", "deepspeed_env: line 2 of", (launching(environment_file=("NCCL_DEBUG=INFO", "", "A=1")),)),
    (
        "warning",
        "variables: CUDA_MODULE_LOADING=EAGER of this",
        (launching(variables={"CUDA_MODULE_LOADING": "EAGER"}),),
    ),
    ("warning", "variables: TORCH_LOGS=all on node2", (on(2, variables={"TORCH_LOGS": "all"}),)),
    ("error", "variables: NCCL_ALGO=Tree on node2", (on(2, variables={"NCCL_ALGO": "Tree"}),)),
    (
        "error node1 node2 node3",
        "variables: CUDA_LAUNCH_BLOCKING=1 makes every launch wait",
        (everywhere(variables={"CUDA_LAUNCH_BLOCKING": "1"}),),
    ),
    (
        "warning node1 node2 node3",
        "variables: CUDA_DEVICE_MAX_CONNECTIONS=1 lets streams hold",
        (launching(environment_file=("CUDA_DEVICE_MAX_CONNECTIONS=1",)),),
    ),
    (
        "warning node1 node2 node3",
        "threads: OMP_NUM_THREADS=16 for 8 ranks on 64 cores; threads that share a core wait for each other: set 8",
        (launching(environment_file=("OMP_NUM_THREADS=16",)),),
    ),
    (
        "error node1 node2 node3",
        "threads: OMP_NUM_THREADS=all",
        (launching(environment_file=("OMP_NUM_THREADS=all",)),),
    ),
    (
        "error node1 node2 node3",
        "interfaces: NCCL_SOCKET_IFNAME=ib; no such interface is up; there are lo, eth0, eth1",
        (launching(variables={"NCCL_SOCKET_IFNAME": "ib"}),),
    ),
    (
        "error node1 node2 node3",
        "interfaces: GLOO_SOCKET_IFNAME=eth",
        (launching(environment_file=("GLOO_SOCKET_IFNAME=eth",)),),
    ),
    ("warning node2", "names: leads nowhere", (on(2, names={"own_addresses": ()}),)),
    ("warning node2", "names: node2 leads to 127.0.1.1", (on(2, names={"own_addresses": ("127.0.1.1",)}),)),
    ("warning node2", "lookup: cannot look up node3", (on(2, names={"others": {"node1": ("10.0.0.1",)}}),)),
    (
        "error node2",
        "lookup: takes node1 for itself",
        (on(2, names={"others": {"node1": ("127.0.0.1",), "node3": ("10.0.0.3",)}}),),
    ),
    (
        "error node1",
        "meeting: port 29500: address already in use",
        (lambda e: replace(e, meeting_fault="address already in use"),),
    ),
    ("error node1", "meeting: hostname -I prints no address", (on(1, names={"listed_addresses": ()}),)),
    ("warning node1", "meeting: port 40000 is one of 32768 to 60999", (launching(master_port=40000),)),
    ("warning node1", "meeting: sysctl", (on(1, resources={"outgoing_ports": (1024, 65535)}),)),
    (
        "warning node1",
        "meeting: hostname -I prints 172.17.0.1 first; its name leads to 10.0.0.1",
        (on(1, names={"listed_addresses": ("172.17.0.1", "10.0.0.1")}),),
    ),
    (
        "error node2",
        "meeting: port 29500 of node1 (10.0.0.1): no answer",
        (link(2, 1, meeting=True, fault="no answer"),),
    ),
    (
        "error node3",
        "ports: port 40000 of node2 (10.0.0.2): connection refused",
        (link(3, 2, fault="connection refused"),),
    ),
    ("error node3", "ports: MTU", (link(3, 1, fault="small messages pass, large ones do not: no answer"),)),
    (
        "error node2",
        "ports: has no address but loopback",
        (
            on(2, names={"own_addresses": (), "listed_addresses": ()}),
            launching(variables={"GLOO_SOCKET_IFNAME": "lo"}),
            interface(2, addresses=()),
        ),
    ),
    ("warning node1", "bandwidth: 0.8 Gbit/s to node2 over eth0; its card has 25 Gbit/s", (link(1, 2, bandwidth=1e8),)),
    (
        "warning node1",
        "bandwidth: 5 Gbit/s to node2 over eth0; the others have 16 Gbit/s",
        (link(1, 2, bandwidth=6.25e8),),
    ),
    ("warning node1", "round trip: 5000 us to node2 and back", (link(1, 2, round_trip_s=5e-3),)),
    (
        "warning node2",
        "route: messages go over eth1 with 1000 Mbit/s; eth0 has 25 Gbit/s: set NCCL_SOCKET_IFNAME=eth0",
        (link(2, 3, interface="eth1"), link(2, 1, interface="eth1"), link(2, 1, interface="eth1", meeting=True)),
    ),
    ("warning", "route: MTU", (interface(2, largest_packet=1500),)),
    ("error node2", "disk: /shared: permission denied", (on(2, folder={"fault": "permission denied"}),)),
    ("warning node2", "disk: 2.0 GB free in /shared", (on(2, folder={"free_bytes": 2 * 10**9}),)),
    ("error node2", "shared disk: another directory than on node1", (on(2, folder={"sees_token": False}),)),
    (
        "warning node3",
        "clocks: +3.199 s (within 0.101 s)",
        (on(3, clock=Clock(offset_s=3.2, uncertainty_s=0.1)),),
    ),
]


@pytest.mark.parametrize(("where", "said", "changes"), FAULTS, ids=[said for _, said, _ in FAULTS])
def test_a_fault_is_found(where: str, said: str, changes: tuple[Change, ...]) -> None:
    examined = reduce(lambda made, change: change(made), changes, healthy())
    check, _, part = said.partition(": ")
    level, *hosts = where.split()
    found = [each for each in bad(examined) if each.check == check and part in each.line]
    assert [(each.level, each.hosts) for each in found][:1] == [(level, tuple(hosts))], bad(examined)
    for each in found:
        assert "\n" not in each.line
        assert each.remedy


ON_CORES: list[tuple[str, str, Change]] = [
    (
        "warning node1",
        "cores: 8 ranks on 2 cores; ranks that share a core wait for each other",
        on(1, resources={"cores": 2}),
    ),
    ("error node2", "names: node2 leads to 127.0.1.1", on(2, names={"own_addresses": ("127.0.1.1",)})),
]


@pytest.mark.parametrize(("where", "said", "change"), ON_CORES, ids=[said for _, said, _ in ON_CORES])
def test_a_fault_of_hosts_without_devices_is_found(where: str, said: str, change: Change) -> None:
    (found,) = bad(change(healthy(devices=0)))
    assert f"{found.level} {' '.join(found.hosts)}" == where
    assert said.partition(": ")[2] in found.line


def test_every_check_fires_in_one_of_these() -> None:
    examined = [reduce(lambda made, change: change(made), changes, healthy()) for _, _, changes in FAULTS]
    fired = {each.check for one in examined for each in bad(one)}
    assert fired == {each.check for one in [*examined, healthy(), alone()] for each in findings(one)}


def test_an_unwritable_working_directory_is_a_warning_where_nobody_named_it() -> None:
    examined = launching(save_is_given=False)(on(2, folder={"fault": "permission denied"})(healthy()))
    assert [each.level for each in bad(examined)] == [Level.WARNING]


@pytest.mark.parametrize(
    ("launcher", "reaching"), [("pdsh", {"NCCL_ALGO"}), ("slurm", {"NCCL_ALGO", "OMP_NUM_THREADS"}), ("ssh", set())]
)
def test_which_variables_reach_ranks_depends_on_the_launcher(launcher: str, reaching: set[str]) -> None:
    shell = {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1"}
    examined = launching(launcher=launcher, variables=shell, programs={"srun": "", "pdsh": "", "ssh": ""})(healthy())
    assert set(variables_of_rank(examined.launching, {})) == reaching
    lost = [each for each in bad(examined) if "does not hand these on" in each.line]
    assert bool(lost) == (launcher == "pdsh")


@pytest.mark.parametrize(
    "change",
    [
        on(2, variables={"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO"}),  # Hosts may have other cards.
        everywhere(clock=Clock(offset_s=-40.0, uncertainty_s=0.001)),  # The launching machine's is wrong.
        on(3, clock=Clock(offset_s=3.2, uncertainty_s=2.5)),  # It may be right.
    ],
    ids=["cards", "clock of the launch", "uncertain clock"],
)
def test_what_may_differ_is_no_fault(change: Change) -> None:
    assert bad(change(healthy())) == []


def test_a_host_that_slurm_starts_need_not_be_reached_by_the_launcher() -> None:
    examined = launching(launcher="slurm", programs={"srun": "/usr/bin/srun"})(healthy())
    assert bad(examined) == []
    (lost,) = bad(on(2, failure="Connection refused")(examined))
    assert "the doctor must reach it by ssh" in lost.line


def test_a_host_that_is_lost_in_the_middle_keeps_its_facts() -> None:
    (found,) = bad(on(2, failure="no answer within 60 s")(healthy()))
    assert found.check == "reach"


def test_what_several_hosts_share_is_one_line() -> None:
    (found,) = bad(everywhere(resources={"open_files": 256})(healthy()))
    assert found.hosts == ("node1", "node2", "node3")


def test_errors_come_first() -> None:
    examined = on(1, slots=9)(on(2, resources={"cores": 4})(healthy()))
    assert [each.level for each in findings(examined)][:3] == [Level.ERROR, Level.WARNING, Level.OK]
