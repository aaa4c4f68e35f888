"""The probe: facts of this machine, answers to the doctor, and the removal of its files, ports and processes."""

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

from megatron_terapipe.doctor import probe
from megatron_terapipe.doctor.examination import Examination, HostProbe, ProbeLost, local_command
from megatron_terapipe.doctor.facts import Examined, Host, HostFacts, launching_here

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


def test_a_file_is_written_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undo = probe.Undo()
    found = probe.folder(undo, str(tmp_path / "new" / "checkpoints"), TOKEN)
    # A run would make it, so the directory above is tried.
    assert (found["path"], found["fault"]) == (str(tmp_path), None) and found["free_bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == [f"{probe.PREFIX}{TOKEN}"]
    assert probe.links(undo, [], str(tmp_path / f"{probe.PREFIX}{TOKEN}"), TOKEN)["sees_token"]
    assert not probe.links(undo, [], str(tmp_path / f"{probe.PREFIX}{TOKEN}"), "cd")["sees_token"]
    assert not probe.links(undo, [], str(tmp_path / "missing"), TOKEN)["sees_token"]
    (tmp_path / "file").write_text("")
    assert probe.folder(undo, str(tmp_path / "file" / "a"), "1")["fault"] == f"{tmp_path / 'file'} is a file"
    assert probe.folder(undo, "/proc/checkpoints", "2")["fault"]
    answered = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answered.wait())
    assert probe.folder(undo, str(tmp_path), "3", 0.1)["fault"] == "the disk does not answer in 0 s"
    answered.set()
    undo.end()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_a_port_of_the_same_doctor_is_reached() -> None:
    port = probe.Listener(0, TOKEN).port
    assert 0 < probe.reach("127.0.0.1", port, TOKEN) < probe.LIMIT_S
    with pytest.raises(OSError, match="in use"):
        probe.Listener(port, TOKEN)
    with pytest.raises(OSError, match="another program"):
        probe.reach("127.0.0.1", port, TOKEN[::-1])


def answer(task: Callable[[HostProbe], Coroutine[Any, Any, Any]], command: list[str] | None = None) -> Any:
    """Result of a task with a probe that runs where this project cannot be imported."""

    async def run() -> Any:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        started = HostProbe(command or local_command(), environment | {"PYTHONSAFEPATH": "1"}, 30)
        try:
            return await task(started)
        finally:
            await started.end()

    return asyncio.run(run())


def facts_question(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of the question for facts."""
    words: dict[str, Any] = {"python": sys.executable, "packages": ["torch", "no-such-package"], "ports": [0]}
    words |= dict.fromkeys(("project", "directory", "checkpoints"), str(folder))
    return words | {"token": TOKEN} | changes


def test_the_probe_needs_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = answer(lambda started: started.ask("facts", **facts_question(tmp_path)))
    facts = TypeAdapter(HostFacts).validate_python(found["facts"])
    assert list(facts.software.packages) == ["torch"]
    assert facts.software.digest is None
    assert facts.names.hostname == socket.gethostname()
    assert facts.resources.cores >= 1
    assert any("127.0.0.1" in each.addresses for each in facts.interfaces if each.name == "lo")
    assert found["listening"][0]["port"] > 0
    assert list(tmp_path.iterdir()) == []


def runs(process: Path) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


def test_a_busy_probe_removes_everything(tmp_path: Path) -> None:
    """It imports a torch that never ends, and its input is closed."""
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )

    async def task(started: HostProbe) -> int:
        found = await started.ask("facts", **facts_question(tmp_path))
        assert (tmp_path / f"{probe.PREFIX}{TOKEN}").exists()
        words = {"variables": {"PYTHONPATH": str(tmp_path)}, "directory": str(tmp_path), "seconds": 600}
        asking = asyncio.create_task(started.ask("imports", **words))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        await started.end()
        with suppress(ProbeLost):
            await asking
        return int(found["listening"][0]["port"])

    port = answer(task)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["pid", "torch.py"]
    with pytest.raises(ConnectionRefusedError):
        probe.reach("127.0.0.1", port, TOKEN)
    process = Path("/proc", (tmp_path / "pid").read_text())
    # It was killed; a busy host needs time to end it, and its new parent to collect it.
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
    assert answer(lambda started: started.ask("imports", **words))["error"] == error
    if seconds < 1:
        with pytest.raises(ProbeLost, match="no answer within 1 s"):
            answer(lambda started: started.ask("imports", limit_s=1, **(words | {"seconds": 600})))


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
        answer(lambda started: started.ask("facts"), command)


# Several probes of this machine stand in for hosts.

SLOW = ["sh", "-c", f"sleep 0.5; exec {shlex.join(local_command())}"]
UNABLE = [
    "sh",
    "-c",
    'read source; read question; echo \'doctor: {"fault": "too many files", "time": 0}\'; read x',
]
LOST = ["sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255"]


def examined(folder: Path, lines: list[str], master_port: int, *commands: list[str]) -> Examined:
    """Facts of a probe for each command, where all listen on loopback."""
    (folder / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=lo\n")
    launching = launching_here(hostfile="hostfile", launcher="pdsh", save=str(folder), master_port=master_port)
    hosts = [Host(name=f"node{number}", slots=1) for number, _ in enumerate(commands, start=1)]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    examination = Examination(launching, hosts, commands, environment, 30, lines.append)
    return asyncio.run(examination.run(with_imports=False))


def test_hosts_answer_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    found = examined(tmp_path, lines, probe.Listener(0, TOKEN).port, SLOW, LOST, local_command())
    assert [host.failure for host in found.hosts] == [None, "Permission denied (publickey).", None]
    # The first host is that of the hostfile, though another answered earlier.
    assert found.meeting_fault == "address already in use"
    assert {(link.source, link.target) for link in found.links} == {("node1", "node3"), ("node3", "node1")}
    for link in found.links:
        assert (link.address, link.fault) == ("127.0.0.1", None)
        assert link.round_trip_s is not None
    assert [facts.folder.sees_token for _, facts in found.reached] == [True, True]
    clocks = [host.clock for host, _ in found.reached if host.clock is not None]
    assert [abs(clock.offset_s) <= clock.uncertainty_s + 0.01 for clock in clocks] == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == [".deepspeed_env"]
    assert "facts: 2 of 3 hosts, waiting for node1" in lines


def test_one_host_has_no_links_and_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = examined(tmp_path, [], 29500, local_command())
    assert found.links == () and [facts.folder.sees_token for _, facts in found.reached] == [None]
    assert [host.failure for host in examined(tmp_path, [], 29500, UNABLE).hosts] == ["too many files"]
