"""A launch ends with whoever asked for it, whatever its processes do about it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_terapipe.search.machine import supervisor
from megatron_terapipe.search.machine.launcher import supervised
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
"""Ignores that it is told to end, and has a child in a session of its own that has stopped."""

ASKS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs started in the background ignore Ctrl-C
from megatron_terapipe.search.machine.launcher import supervised
with supervised([sys.executable, "-c", sys.argv[1], sys.argv[2]]) as process:
    process.wait()
"""


def persistent(folder: Path) -> tuple[list[str], Callable[[], int]]:
    """A command that does not end by itself, and what waits for its child and returns its number."""
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
    """Whether a process is there that is more than its exit code."""
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_all_of_a_launch_ends_with_whoever_asked_for_it(number: signal.Signals, tmp_path: Path) -> None:
    command, child = persistent(tmp_path)
    asking = subprocess.Popen([sys.executable, "-c", ASKS, *command[2:]], env=environment(), stderr=subprocess.DEVNULL)
    pid = child()
    os.kill(asking.pid, number)
    asking.wait(240)
    wait_for(lambda: not runs(pid))


def test_a_supervisor_that_is_told_to_end_ends_the_launch(tmp_path: Path) -> None:
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
def test_what_other_hosts_run_of_it_is_ended_there(
    reached: bool,
    warned: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pdsh").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit {0 if reached else 255}\n')
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with supervised(["sh", "-c", f"echo ${supervisor.VARIABLE} > {tmp_path}/mark; exit {code}"], ["a", "b"]) as process:
        process.wait()
    mark = (tmp_path / "mark").read_text().strip()
    asked = (tmp_path / "asked").read_text()
    assert "-w a,b " in asked
    assert asked.endswith(f"{supervisor.__file__} --end {mark}\n")
    assert ("processes of a run may be left here or on a, b" in capsys.readouterr().err) == warned
