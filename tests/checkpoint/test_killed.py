"""Processes killed while they save or hold a directory: a whole checkpoint is found, no later run is locked out."""

import errno
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepspeed_ext.plan.text_files import open_locked
from megatron_terapipe.checkpoint.directories import LOCK, latest_checkpoint, only_run_in
from megatron_terapipe.errors import CheckpointError
from tests.checkpoint.killed_saves import found, kill_at_every_point, killed_at

HOLDER = """
import sys, time
from megatron_terapipe.checkpoint.directories import only_run_in
with only_run_in(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_run_locks_no_other_out(tmp_path: Path) -> None:
    save = tmp_path / "a" / "save"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(save)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError) as raised, only_run_in(save):
            pass
        holder.kill()
    assert f", process {holder.pid}, since 20" in str(raised.value)
    assert str(raised.value).endswith(f"name another --save; if its host has failed, remove {save / LOCK}")
    assert (save / LOCK).exists()
    with only_run_in(save):
        assert f"process {os.getpid()}," in (save / LOCK).read_text()
    assert list(save.iterdir()) == []


def test_the_lock_of_a_process_that_has_ended_is_waited_for(tmp_path: Path) -> None:
    """The system releases it with the last thread, shortly after the process counts as ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    held = open_locked(tmp_path / LOCK)
    assert held is not None
    held.write(f"host {socket.gethostname()}, process {ended.pid}, since 2026-11-28 22:00:00".encode())
    held.flush()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: (time.sleep(0.2), held.close()))
        with only_run_in(tmp_path, lambda process: process != ended.pid):
            assert held.closed


def test_a_directory_that_was_made_for_the_lock_does_not_stay(tmp_path: Path) -> None:
    with only_run_in(tmp_path / "save"):
        pass
    assert not (tmp_path / "save").exists()
    with only_run_in(tmp_path / "save"):
        (tmp_path / "save" / "latest").touch()
    assert [path.name for path in (tmp_path / "save").iterdir()] == ["latest"]


def test_a_disk_that_is_read_only_at_the_end_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched, only_run_in(tmp_path):
        patched.setattr(Path, "unlink", refuse)
        with pytest.raises(CheckpointError, match="in use by another run"), only_run_in(tmp_path):
            pass
    with only_run_in(tmp_path):  # The lock ended with its file.
        pass


def test_there_is_one_holder_at_a_time(tmp_path: Path) -> None:
    """Also while the file of the one before is removed."""
    inside: list[int] = []

    def hold(number: int) -> int:
        held = 0
        for _ in range(100_000):
            if held > 50:
                break
            try:
                with only_run_in(tmp_path):
                    inside.append(number)
                    assert inside == [number]
                    inside.remove(number)
                    held += 1
            except CheckpointError as error:
                assert "is in use by another run" in str(error)
        return held

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(hold, range(4))) > 200


def test_killed_while_saving_over_the_latest(tmp_path: Path) -> None:
    """The same iteration again: `latest` always has its checkpoint. Others: tests/faults/campaigns/saving.py."""
    points, iterations = kill_at_every_point(tmp_path, [2, 6], 6, 1)
    assert points > 15
    assert iterations == {6}


def test_killed_in_the_first_save(tmp_path: Path) -> None:
    point, killed, ends = 0, True, []
    while killed:
        folder = tmp_path / str(point)
        killed = killed_at(point, folder, 3, None)
        ends.append(latest_checkpoint(folder) is not None and found(folder).iteration)
        point += 1
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (0, 3)
