"""The probe: what it reads on this machine, how it answers the doctor, and what it leaves behind, which is nothing."""

import asyncio
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from megatron_terapipe.doctor import examination, probe
from megatron_terapipe.doctor.examination import Examination, HostProbe, ProbeLost, Refused, local_command
from megatron_terapipe.doctor.facts import Examined, Host, HostFacts
from megatron_terapipe.doctor.launching import launching_here

TOKEN = "0f" * probe.TOKEN_BYTES

DRIVER = """#!/bin/sh
case "$1" in
*gpu=*) echo 'GPU-a, NVIDIA H100 80GB HBM3, 81559, 81000, 570.86.15'
        echo 'GPU-b, NVIDIA H100 80GB HBM3, 81559, 1000, 570.86.15' ;;
*apps=*) echo 'GPU-b, /usr/bin/python3, 4711' ;;
esac
"""


@pytest.mark.parametrize(
    ("driver", "devices"),
    [
        (DRIVER, [(81559 * 2**20, 81000 * 2**20, []), (81559 * 2**20, 1000 * 2**20, ["python3 (4711)"])]),
        ("#!/bin/sh\necho 'Failed to initialize NVML'; exit 9\n", []),
    ],
)
def test_devices_are_those_that_the_driver_lists(
    driver: str, devices: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(driver)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = probe.devices()
    assert [(each["memory_bytes"], each["free_bytes"], each["processes"]) for each in found] == devices
    assert {(each["name"], each["driver"]) for each in found} <= {("NVIDIA H100 80GB HBM3", "570.86.15")}


def test_variables_hold_no_passwords() -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "secret", "HF_TOKEN": "secret"}
    read = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
    assert probe.variables(secrets | read) == read


def test_the_digest_follows_the_sources(tmp_path: Path) -> None:
    digests = [probe.digest_of(tmp_path)]
    (tmp_path / "deepspeed_ext").mkdir()
    for text in "12":
        (tmp_path / "deepspeed_ext" / "a.py").write_text(text)
        digests.append(probe.digest_of(tmp_path))
    assert digests[0] is None and len(set(digests)) == 3


def test_a_directory_for_checkpoints_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe.folder(str(tmp_path / "new" / "checkpoints"), 10)
    # A run would make it, so the one above is tried.
    assert (found["path"], found["fault"]) == (str(tmp_path), None) and found["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert probe.folder(str(tmp_path / "file" / "checkpoints"), 10)["fault"] == f"{tmp_path / 'file'} is a file"
    assert probe.folder("/proc/checkpoints", 10)["fault"]
    answered = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answered.wait())
    assert probe.folder(str(tmp_path), 0.1)["fault"] == "the disk does not answer in 0 s"
    answered.set()


def test_bytes_come_through_a_port_of_the_same_doctor() -> None:
    listener, asked = probe.Listener(0, TOKEN), probe.Probe()
    assert 0 < asked.reach("127.0.0.1", listener.port, TOKEN)["round_trip_s"] < probe.LIMIT_S
    assert asked.bandwidth("127.0.0.1", listener.port, TOKEN, 0.01) > 0
    with pytest.raises(OSError, match="in use"):
        asked.listen(listener.port, TOKEN)
    with pytest.raises(OSError, match="another program answers"):
        asked.reach("127.0.0.1", listener.port, TOKEN[::-1])
    listener.close()


def asked(task: Callable[[HostProbe], Coroutine[Any, Any, Any]], command: list[str] | None = None) -> Any:
    """What a task gets from a probe that runs where this project cannot be imported."""

    async def run() -> Any:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        started = await HostProbe.start(command or local_command(), environment | {"PYTHONSAFEPATH": "1"}, 30)
        try:
            return await task(started)
        finally:
            await started.end()

    return asyncio.run(run())


def test_the_probe_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words: dict[str, Any] = {"python": sys.executable, "packages": ["torch", "no-such-package"]}
    words |= dict.fromkeys(("project", "directory", "checkpoints"), str(tmp_path))
    words["hosts"] = ["localhost", "no-such-host.invalid"]
    facts = TypeAdapter(HostFacts).validate_python(asked(lambda started: started.ask("facts", **words)))
    assert list(facts.software.packages) == ["torch"]
    assert facts.software.digest is None
    assert facts.names.hostname == socket.gethostname()
    assert facts.names.others["localhost"]
    assert facts.names.others["no-such-host.invalid"] == ()
    assert facts.resources.cores >= 1
    assert any("127.0.0.1" in each.addresses for each in facts.interfaces if each.name == "lo")


def runs(process: Path) -> bool:
    """Whether a process is there that is more than its exit code."""
    try:
        return "\nState:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


def test_nothing_is_left_of_a_probe_that_is_busy(tmp_path: Path) -> None:
    """It imports a torch that takes for ever, and its input is closed."""
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    written = {"directory": str(tmp_path), "token": "ab"}

    async def task(started: HostProbe) -> int:
        port = int(await started.ask("listen", port=0, token=TOKEN))
        await started.ask("write", **written)
        assert await started.ask("sees", **written)
        assert not await started.ask("sees", directory=str(tmp_path), token="cd")
        words = {"variables": {"PYTHONPATH": str(tmp_path)}, "directory": str(tmp_path), "seconds": 600}
        asking = asyncio.create_task(started.ask("imports", **words))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        await started.end()
        with suppress(ProbeLost):
            await asking
        return port

    port = asked(task)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["pid", "torch.py"]
    with pytest.raises(ConnectionRefusedError):
        probe.connect("127.0.0.1", port, TOKEN)
    process = Path("/proc", (tmp_path / "pid").read_text())
    # It was killed; a busy host takes its time to end it, and whoever inherits it to look.
    deadline = time.monotonic() + 60
    while runs(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("torch", "seconds", "error"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", 20, "ImportError: libcudart.so.12: cannot open"),
        ("import os; os._exit(7)", 20, "exit code 7"),
        ("import time; time.sleep(600)", 0.5, "no answer within 0 s"),
    ],
)
def test_imports_that_fail_have_a_cause(torch: str, seconds: float, error: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch)
    words = {"variables": {"PYTHONPATH": str(tmp_path)}, "directory": str(tmp_path), "seconds": seconds}
    assert asked(lambda started: started.ask("imports", **words))["error"] == error


def test_a_question_that_cannot_be_answered_is_refused_or_given_up(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no such file"):
        asked(lambda started: started.ask("write", directory="/no/such/folder", token="ab"))
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    words = {"variables": {"PYTHONPATH": str(tmp_path)}, "directory": str(tmp_path), "seconds": 600}
    with pytest.raises(ProbeLost, match="no answer within 1 s"):
        asked(lambda started: started.ask("imports", limit_s=1, **words))


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (["sh", "-c", "echo hello; echo 'Permission denied (publickey).' >&2; exit 255"], r"Permission denied \(pub"),
        (["sh", "-c", "exit 3"], "exit code 3"),
        (["no-such-program"], "No such file"),
    ],
)
def test_a_command_that_fails_has_a_cause(command: list[str], cause: str) -> None:
    with pytest.raises(ProbeLost, match=cause):
        asked(lambda started: started.ask("clock"), command)


# Several probes of this machine stand for hosts.

SLOW = ["sh", "-c", f"sleep 0.5; exec {shlex.join(local_command())}"]
UNABLE = ["sh", "-c", 'read source; read question; echo \'doctor: {"fault": "too many open files"}\'; read more']
LOST = ["sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"]


def examined(folder: Path, said: list[str], master_port: int, *commands: list[str]) -> Examined:
    """What is found with a probe for each command, where all listen on loopback."""
    (folder / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=lo\n")
    launching = launching_here(hostfile="hostfile", launcher="pdsh", save=str(folder), master_port=master_port)
    hosts = [Host(name=f"node{number}", slots=1) for number, _ in enumerate(commands, start=1)]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    asking = Examination(launching, hosts, commands, environment, 30, said.append)
    return asyncio.run(asking.run(with_imports=False))


def test_hosts_are_asked_whichever_answers_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examination, "SENDING_S", 0.02)
    taken, said = probe.Listener(0, TOKEN), list[str]()
    found = examined(tmp_path, said, taken.port, SLOW, LOST, local_command())
    taken.close()
    assert [host.failure for host in found.hosts] == [None, "Permission denied (publickey).", None]
    # The first host is the one of the hostfile, though another answered before it.
    assert found.meeting_fault == "address already in use"
    assert {(link.source, link.target) for link in found.links} == {("node1", "node3"), ("node3", "node1")}
    for link in found.links:
        assert (link.address, link.interface, link.fault) == ("127.0.0.1", "lo", None)
        assert link.bandwidth is not None and link.bandwidth > 0
    assert [facts.folder.sees_token for _, facts in found.reached] == [True, True]
    assert [abs(host.clock.offset_s) < 1 for host, _ in found.reached if host.clock is not None] == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == [".deepspeed_env"]
    assert "facts: 2 of 3 hosts, waiting for node1" in said


def test_one_host_is_not_asked_about_others_and_may_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = examined(tmp_path, [], 29500, local_command())
    assert found.links == () and [facts.folder.sees_token for _, facts in found.reached] == [None]
    assert [host.failure for host in examined(tmp_path, [], 29500, UNABLE).hosts] == ["too many open files"]
