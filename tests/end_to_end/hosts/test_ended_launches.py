"""A launch over two hosts is ended on both, also where ssh is killed and its programs do not listen."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.hosts.network import Network
from tests.end_to_end.launching import environment

pytestmark = pytest.mark.hosts

PROGRAM = "trap '' TERM HUP PIPE; while :; do sleep 0.1; done"
"""Ignores all signals, and runs without a reader of its output."""

ASKS = """
import sys
from megatron_terapipe.launch.launcher import supervised
hosts, program = sys.argv[1:]
launch = f'pdsh -S -R ssh -w {hosts} "export PYTHON_LAUNCH_MARK=$PYTHON_LAUNCH_MARK; exec sh -c \\\\"{program}\\\\""'
with supervised(["sh", "-c", launch], hosts.split(",")) as process:
    process.wait()
"""


def programs(two_hosts: Network) -> list[list[int]]:
    """Numbers of the launched programs of each host."""
    return [
        [pid for pid, line in host.processes().items() if line.startswith("sh -c trap")] for host in two_hosts.hosts
    ]


@pytest.mark.parametrize("killed", ["the command", "ssh", "none, SIGTERM"])
def test_nothing_is_left_on_any_host(killed: str, two_hosts: Network, tmp_path: Path) -> None:
    first, second = two_hosts.hosts
    command = [sys.executable, "-c", ASKS, f"{first.name},{second.name}", PROGRAM]
    launch = subprocess.Popen(first.command(command), cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not all(programs(two_hosts)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid, line in first.processes().items():
        if line.startswith("ssh ") if killed == "ssh" else line.startswith(f"{sys.executable} -c"):
            os.kill(pid, signal.SIGTERM if killed.startswith("none") else signal.SIGKILL)
    launch.wait(60)
    two_hosts.wait_for_all()
