"""The probe: what it reads on this machine, and what it leaves behind, which is nothing."""

import asyncio
import os
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

from megatron_terapipe.doctor import agent as links
from megatron_terapipe.doctor.examination import Probe, ProbeLost, Refused, local_command
from megatron_terapipe.doctor.facts import Device, HostFacts
from megatron_terapipe.doctor.probe import (
    devices,
    digest_of,
    folder,
    interfaces,
    sees_token,
    token_path,
    variables,
    write_token,
)

TOKEN = "0f" * links.TOKEN_BYTES
OTHER = "f0" * links.TOKEN_BYTES

DRIVER = """#!/bin/sh
case "$1" in
*gpu=*) echo 'GPU-a, NVIDIA H100 80GB HBM3, 81559, 81000, 570.86.15'
        echo 'GPU-b, NVIDIA H100 80GB HBM3, 81559, 1000, 570.86.15' ;;
*apps=*) echo 'GPU-b, /usr/bin/python3, 4711' ;;
esac
"""


def program(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program first on the PATH."""
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_devices_are_those_that_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", DRIVER, monkeypatch)
    first, second = devices()
    free = {"memory_bytes": 81559 * 2**20, "free_bytes": 81000 * 2**20, "processes": ()}
    assert first == Device(name="NVIDIA H100 80GB HBM3", driver="570.86.15", **free)  # type: ignore[arg-type]
    assert second.processes == ("python3 (4711)",)


def test_a_driver_that_fails_lists_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "nvidia-smi", "#!/bin/sh\necho 'Failed to initialize NVML'; exit 9\n", monkeypatch)
    assert devices() == ()


def test_variables_hold_no_passwords() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HF_TOKEN": "secret",
    }
    assert variables(environment) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


def test_loopback_is_an_interface() -> None:
    (loopback,) = [each for each in interfaces() if each.name == "lo"]
    assert "127.0.0.1" in loopback.addresses


def test_the_digest_follows_the_sources(tmp_path: Path) -> None:
    assert digest_of(tmp_path) is None
    (tmp_path / "deepspeed_ext").mkdir()
    (tmp_path / "deepspeed_ext" / "a.py").write_text("1")
    one = digest_of(tmp_path)
    (tmp_path / "deepspeed_ext" / "a.py").write_text("2")
    assert one is not None and digest_of(tmp_path) not in (None, one)


def test_a_directory_that_a_run_would_make_is_judged_by_the_one_above(tmp_path: Path) -> None:
    found = folder(str(tmp_path / "new" / "checkpoints"), 10)
    assert (found.path, found.fault) == (str(tmp_path), None)
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_and_a_directory_that_takes_no_files_are_faults(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert folder(str(tmp_path / "file" / "checkpoints"), 10).fault == f"{tmp_path / 'file'} is a file"
    assert folder("/proc/checkpoints", 10).fault


def test_a_disk_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: answered.wait())
    assert folder(str(tmp_path), 0.1).fault == "the disk does not answer in 0 s"
    answered.set()


def test_a_token_is_seen_where_it_was_written(tmp_path: Path) -> None:
    write_token(token_path(str(tmp_path), "ab"), "ab")
    assert sees_token(str(tmp_path), "ab")
    assert not sees_token(str(tmp_path), "cd")
    assert not sees_token(str(tmp_path / "elsewhere"), "ab")


def test_bytes_come_through_a_port() -> None:
    listener = links.Listener(0, TOKEN)
    with links.connect("127.0.0.1", listener.port, TOKEN) as connection:
        assert 0 < links.round_trip_s(connection) < links.LIMIT_S
    with links.connect("127.0.0.1", listener.port, TOKEN) as connection:
        assert links.bandwidth(connection, 0.01) > 0
    with pytest.raises(OSError, match="in use"):
        links.Listener(listener.port, TOKEN)
    listener.close()


def test_another_program_behind_a_port_is_no_host() -> None:
    listener = links.Listener(0, OTHER)
    with pytest.raises(links.WrongHost, match="another program answers"):
        links.connect("127.0.0.1", listener.port, TOKEN)
    listener.close()


def runs(process: Path) -> bool:
    """Whether a process is there that is more than its exit code."""
    try:
        return "\nState:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


def asked(task: Callable[[Probe], Coroutine[Any, Any, Any]], command: list[str] | None = None) -> Any:
    """What a task gets from a probe that runs where this project cannot be imported."""

    async def run() -> Any:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        probe = await Probe.start("here", command or local_command(), environment | {"PYTHONSAFEPATH": "1"}, 30)
        try:
            return await task(probe)
        finally:
            await probe.end()

    return asyncio.run(run())


def test_the_probe_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"python": sys.executable, "packages": ["torch", "no-such-package"], "project": str(tmp_path)}
    words |= {"directory": str(tmp_path), "checkpoints": str(tmp_path)}
    found = asked(lambda probe: probe.ask("facts", **words, hosts=["localhost", "no-such-host.invalid"]))
    facts = TypeAdapter(HostFacts).validate_python(found)
    assert list(facts.software.packages) == ["torch"]
    assert facts.software.digest is None
    assert facts.names.hostname == socket.gethostname()
    assert facts.names.others["localhost"]
    assert facts.names.others["no-such-host.invalid"] == ()
    assert facts.resources.cores >= 1


def test_nothing_is_left_of_a_probe_that_is_busy(tmp_path: Path) -> None:
    """It imports a torch that takes for ever, and its input is closed."""
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )

    async def task(probe: Probe) -> int:
        port = int(await probe.ask("listen", port=0, token=TOKEN))
        await probe.ask("write", directory=str(tmp_path), token="ab")
        assert sees_token(str(tmp_path), "ab")
        words = {"variables": {"PYTHONPATH": str(tmp_path)}, "directory": str(tmp_path), "seconds": 600}
        asking = asyncio.create_task(probe.ask("imports", **words))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        await probe.end()
        with suppress(ProbeLost):
            await asking
        return port

    port = asked(task)
    assert not sees_token(str(tmp_path), "ab")
    with pytest.raises(ConnectionRefusedError):
        links.connect("127.0.0.1", port, TOKEN)
    process = Path("/proc", (tmp_path / "pid").read_text())
    # It was killed; a busy host takes its time to end it, and whoever inherits it to look.
    deadline = time.monotonic() + 60
    while runs(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("torch", "error"),
    [("raise ImportError('libcudart.so.12: cannot open')", "ImportError: libcudart.so.12: cannot open"), ("", "")],
)
def test_imports_that_fail_say_why(torch: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch or "import os; os._exit(7)")
    words = {"variables": {"PYTHONPATH": str(tmp_path)}, "directory": str(tmp_path), "seconds": 20}
    assert asked(lambda probe: probe.ask("imports", **words))["error"] == (error or "exit code 7")


def test_what_a_host_cannot_do_is_refused() -> None:
    with pytest.raises(Refused, match="no such file"):
        asked(lambda probe: probe.ask("write", directory="/no/such/folder", token="ab"))


def test_a_probe_that_is_slow_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    words = {"variables": {"PYTHONPATH": str(tmp_path)}, "directory": str(tmp_path)}
    with pytest.raises(ProbeLost, match="no answer within 1 s"):
        asked(lambda probe: probe.ask("imports", limit_s=1, **words, seconds=600))
    told = asked(lambda probe: probe.ask("imports", **words, seconds=0.5))
    assert told["error"] == "no answer within 0 s"


def test_a_command_that_fails_says_why() -> None:
    command = ["sh", "-c", "echo greetings; echo 'Permission denied (publickey).' >&2; exit 255"]
    with pytest.raises(ProbeLost, match=r"Permission denied \(publickey\)"):
        asked(lambda probe: probe.ask("clock"), command)
    with pytest.raises(ProbeLost, match="exit code 3"):
        asked(lambda probe: probe.ask("clock"), ["sh", "-c", "exit 3"])
    with pytest.raises(ProbeLost, match="No such file"):
        asked(lambda probe: probe.ask("clock"), ["no-such-program"])
