"""A launch ends with its calling process, whatever its processes do; its ports are free, and each another one."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ext.runtime.cuda_environment import VARIABLES
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.launch import launcher, supervisor
from megatron_terapipe.launch.launcher import LISTENING_PORTS, free_port, free_ports, supervised
from tests.end_to_end.launching import environment

PERSISTENT = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    Path(sys.argv[1]).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""
"""Ignores SIGTERM, and has a stopped child in another session."""

CALLER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs started in the background ignore Ctrl-C
from megatron_terapipe.launch.launcher import supervised
with supervised([sys.executable, "-c", sys.argv[1], sys.argv[2]]) as process:
    process.wait()
"""


def persistent(folder: Path) -> tuple[list[str], Callable[[], int]]:
    """A command that does not end by itself, and a function that waits for its child and returns its number."""
    path = folder / "child"

    def child() -> int:
        wait_for(lambda: path.exists() and bool(path.read_text()))
        return int(path.read_text())

    return [sys.executable, "-c", PERSISTENT, str(path)], child


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240  # several interpreters start
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_all_of_a_launch_ends_with_the_block(tmp_path: Path) -> None:
    command, child = persistent(tmp_path)
    with supervised(command) as process:
        pid = child()
        assert runs(pid)
    assert process.returncode == 128 + signal.SIGKILL
    assert not runs(pid)


def test_all_of_a_launch_ends_with_its_caller(tmp_path: Path) -> None:
    callers = []
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        (tmp_path / number.name).mkdir()
        command, child = persistent(tmp_path / number.name)
        words = [sys.executable, "-c", CALLER, *command[2:]]
        callers.append((number, subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL), child))
    for number, caller, child in callers:
        pid = child()
        os.kill(caller.pid, number)
        caller.wait(240)
        wait_for(lambda pid=pid: not runs(pid))


def test_a_terminated_supervisor_ends_the_launch(tmp_path: Path) -> None:
    command, child = persistent(tmp_path)
    with supervised(command) as process:
        pid = child()
        process.terminate()
        process.wait()
        assert not runs(pid)


@pytest.mark.parametrize(("program", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_a_launch_that_ends_by_itself_has_its_exit_code(program: str, code: int) -> None:
    with supervised(["sh", "-c", program]) as process:
        assert process.wait() == code


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize(("reached", "warned"), [(True, False), (False, True)])
def test_processes_on_other_hosts_are_ended(
    reached: bool,
    warned: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pdsh").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\nexit {0 if reached else 255}\n')
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with supervised(["sh", "-c", f"echo ${supervisor.VARIABLE} > {tmp_path}/mark; exit {code}"], ["a", "b"]) as process:
        process.wait()
    mark = (tmp_path / "mark").read_text().strip()
    words = (tmp_path / "words").read_text()
    assert "-w a,b " in words
    assert words.endswith(f"{supervisor.__file__} --end {mark}\n")
    assert ("processes of a run may be left here or on a, b" in capsys.readouterr().err) == warned


def test_deepspeed_passes_the_mark_on_and_no_variable_of_cuda() -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    assert supervisor.VARIABLE.startswith(tuple(runner.EXPORT_ENVS))
    assert not any(each.name.startswith(tuple(runner.EXPORT_ENVS)) for each in VARIABLES)


def test_of_many_ports_none_is_given_twice_and_each_is_free() -> None:
    found = free_ports(100)
    assert len(set(found)) == 100
    assert set(found) <= set(LISTENING_PORTS)
    with socket.create_server(("", free_port())):
        pass


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launcher, "LISTENING_PORTS", [port] * (os.getpid() % launcher._STRIPES + 1))
        with pytest.raises(ConfigError, match=r"0 of 1 ports tried in .* are free, and 1 are needed: end some of"):
            free_port()
