"""`doctor` over two hosts: it finds faults, and leaves no file or process there."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_terapipe.doctor.probe import PREFIX
from tests.end_to_end.hosts.network import Host, Network
from tests.end_to_end.launching import TIMEOUT_S, environment

pytestmark = [pytest.mark.hosts, pytest.mark.thorough]

LISTENS = "import socket, time; taken = socket.create_server(('', 29500)); print('up', flush=True); time.sleep(600)"


def command(host: Host, *words: str) -> list[str]:
    """The command on a host."""
    return host.command([sys.executable, "-m", "megatron_terapipe.doctor", "--hostfile", "hostfile", *words])


def faults(network: Network, folder: Path, *words: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and the lines of each check that did not pass."""
    done = subprocess.run(
        command(network.hosts[0], "--no-imports", "--save", "shared", "--json", "-", *words),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, list[str]] = {}
    document: dict[str, Any] = json.loads(done.stdout)
    for each in document["findings"]:
        # The speed of links and the variables of this shell are not tested here.
        is_slow = each["check"] == "links" and each["level"] == "warning"
        if each["level"] != "ok" and each["check"] != "variables" and not is_slow:
            found.setdefault(each["check"], []).append(f"{', '.join(each['hosts'])}: {each['found']}")
    return done.returncode, found


def inside(host: Host, *words: object) -> None:
    """Run a command among the mounts that ssh finds on a host."""
    (sshd,) = [path for path in Path("/proc").glob("[0-9]*") if is_sshd(path, host)]
    subprocess.run(["nsenter", f"--mount={sshd}/ns/mnt", *map(str, words)], check=True)


def is_sshd(process: Path, host: Host) -> bool:
    """Whether a process is the sshd of a host."""
    try:
        line = (process / "cmdline").read_bytes().replace(b"\0", b" ")
        return line.startswith(b"sshd: ") and os.readlink(process / "ns" / "net") == os.readlink(
            f"/proc/{host._init.pid}/ns/net"  # type: ignore[union-attr]
        )
    except OSError:
        return False


def test_faults_of_hosts_are_found(two_hosts: Network, tmp_path: Path) -> None:
    first, second = two_hosts.hosts
    (tmp_path / "shared").mkdir()
    (tmp_path / "hostfile").write_text(two_hosts.hostfile())
    code, found = faults(two_hosts, tmp_path)
    assert (code, found) == (0, {})
    # A port that another program has, one disk for each host, more slots than cores, and a host that is not there.
    (tmp_path / "hostfile").write_text(f"{first.name} slots=1\n{second.name} slots=512\nnode3 slots=1\n")
    inside(second, "mount", "-t", "tmpfs", "-o", "ro", "tmpfs", tmp_path / "shared")
    with subprocess.Popen(first.command([sys.executable, "-c", LISTENS]), stdout=subprocess.PIPE) as taken:
        assert taken.stdout is not None
        taken.stdout.readline()
        code, found = faults(two_hosts, tmp_path)
        for pid in first.processes():
            os.kill(pid, signal.SIGKILL)
    assert code == 1
    assert found["meeting"] == [f"{first.name}: port 29500: address already in use"]
    assert found["disk"] == [f"{second.name}: {tmp_path / 'shared'}: Read-only file system"]
    assert found["shared disk"] == [f"{second.name}: {tmp_path / 'shared'} is another directory than on {first.name}"]
    assert found["cores"][0].startswith(f"{second.name}: 512 ranks on ")
    assert found["reach"][0].startswith("node3: ssh: Could not resolve hostname node3")
    assert not list(tmp_path.glob(f"**/{PREFIX}*"))
    # Packets to a port that a firewall drops: here the answers to them.
    (tmp_path / "hostfile").write_text(two_hosts.hostfile())
    subprocess.run(first.command("ip rule add sport 29500 blackhole".split()), check=True)
    code, found = faults(two_hosts, tmp_path)
    assert found["links"] == [f"{second.name}: port 29500 of {first.name} ({first.address}): no answer"]


def test_nothing_is_left_of_a_doctor_that_is_interrupted(two_hosts: Network, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(two_hosts.hostfile())
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    paths = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    with subprocess.Popen(
        command(two_hosts.hosts[0], "--timeout", "600"),
        cwd=tmp_path,
        env=environment(PYTHONPATH=paths),
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores Ctrl-C for what it starts in the background, and tests may be started so.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + 60
        # Until both hosts import torch.
        while not all(any("import torch" in line for line in host.processes().values()) for host in two_hosts.hosts):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for pid, line in two_hosts.hosts[0].processes().items():
            if "megatron_terapipe.doctor --hostfile" in line:
                os.kill(pid, signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "interrupted\n"
    two_hosts.wait_for_all()
