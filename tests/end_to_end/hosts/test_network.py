"""Hosts of tests: links, processes, and the removal of networks of dead processes."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.hosts.network import ETC, NAMESPACES, Host, Network, network
from tests.end_to_end.launching import environment

pytestmark = [pytest.mark.hosts, pytest.mark.thorough]

THAT_DIES = """
import os, signal, sys
from pathlib import Path
from tests.end_to_end.hosts.network import network
with network(1, Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def reaches(host: Host, other: Host, seconds: int = 5) -> bool:
    """Whether ssh reaches the other host by its name, and finds itself there."""
    ssh = ["ssh", "-o", f"ConnectTimeout={seconds}", other.name, "hostname"]
    return host.run(ssh).stdout == f"{other.name}\n"


def test_links_are_cut_delayed_and_restored(two_hosts: Network) -> None:
    first, second = two_hosts.hosts
    assert reaches(first, second)
    two_hosts.cut(second)
    assert not reaches(first, second, 1)
    two_hosts.restore(second)
    with two_hosts.link(delay_ms=5, rate_mbit=100, dropped=0.05):
        assert reaches(first, second, 20)
    with two_hosts.link(dropped=1.0):
        assert not reaches(first, second, 1)
    assert reaches(first, second)


def test_a_network_removes_only_networks_of_dead_processes(two_hosts: Network, tmp_path: Path) -> None:
    for name in ("dead", "mine"):
        (tmp_path / name).mkdir()
    dying = subprocess.run([sys.executable, "-c", THAT_DIES, tmp_path / "dead"], env=environment(), check=False)
    assert dying.returncode == -signal.SIGKILL
    left = [path for folder in (NAMESPACES, ETC) for path in folder.iterdir() if is_left(path)]
    assert left
    with network(1, tmp_path / "mine") as mine:
        assert not any(path.exists() for path in left)
        assert reaches(mine.hosts[0], mine.hosts[0])
        assert reaches(*two_hosts.hosts)


def is_left(path: Path) -> bool:
    """Whether the process that a namespace is named after is gone."""
    prefix, maker, *_ = path.name.split("-")
    return prefix == "tslice" and not Path("/proc", maker).exists()


def test_processes_of_a_host_are_killed_there_only(two_hosts: Network) -> None:
    first, second = two_hosts.hosts
    begun = [subprocess.Popen(host.command(["sleep", "61"])) for host in (first, second)]
    while not (first.processes() and second.processes()):
        time.sleep(0.01)
    assert [*first.processes().values()] == ["sleep 61"]
    subprocess.run(first.command(["pkill", "-f", "sleep 61"]), check=True)
    begun[0].wait()
    assert first.processes() == {}
    assert [*second.processes().values()] == ["sleep 61"]
    second.shut_down()
    begun[1].wait()
    assert second.processes() == {}
