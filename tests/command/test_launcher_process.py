"""Ctrl-C under DeepSpeed's launcher is one line and 130, and comes after the end of all that it started."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron_terapipe.checkpoint.directories import LATEST
from megatron_terapipe.command import launcher_process
from megatron_terapipe.command.launcher_process import quietly
from megatron_terapipe.training.end_of_run import LAUNCHER_REPORTS
from tests.architecture.sources import ROOT

# A child that takes its time to end, as the launcher of a host does.
CHILD = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).write_text("ended")
    sys.exit(1)
signal.signal(signal.SIGINT, end)
print("ready", flush=True)
signal.pause()
"""

LAUNCH = """
import subprocess, sys
from megatron_terapipe.command.launcher_process import quietly
sys.exit(quietly(lambda: subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]]).wait()))
"""


def _started(words: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        words,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell ignores Ctrl-C for what it starts in the background, and tests may be started so.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("save", "line"),
    [
        (None, "the run has ended"),
        ("saved", "resume with --load saved, from global_step7"),
    ],
)
def test_ctrl_c_is_one_line_after_the_end_of_all(
    save: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by `terapipe train`, it names the checkpoint: ranks may not have begun."""
    monkeypatch.chdir(tmp_path)
    if save is not None:
        monkeypatch.setenv(LAUNCHER_REPORTS, save)
    if save:
        (tmp_path / save / "global_step7").mkdir(parents=True)
        (tmp_path / save / LATEST).write_text("global_step7")
    process = _started([sys.executable, "-c", LAUNCH, CHILD, str(tmp_path / "child")])
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == f"interrupted: {line}\n"
    assert process.returncode == 130
    assert (tmp_path / "child").read_text() == "ended"


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--include=localhost:9", "No slot '9' specified on host 'localhost'"),
        ("--exclude=localhost", "localhost leaves no device"),
    ],
)
def test_an_error_of_the_launcher_is_one_line(
    flag: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    for name in ("subprocess", "parse_inclusion_exclusion"):
        monkeypatch.setattr(runner, name, getattr(runner, name))  # They are replaced.
    monkeypatch.setattr(sys, "argv", ["deepspeed", "--log_level=error", flag, "pretrain_gpt.py"])
    with pytest.raises(SystemExit) as raised:
        launcher_process._launch()
    assert raised.value.code == 2
    assert capsys.readouterr().err == f"error: DeepSpeed's launcher: {line}\n"


RANK = """
import signal, sys, time
def end(number, frame):
    time.sleep(0.5)
    print("saved after", number, flush=True)
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print("ready", flush=True)
while True:
    signal.pause()
"""
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).wait())"


@pytest.mark.parametrize(
    ("number", "rank_code", "code", "line"),
    [
        (signal.SIGTERM, 0, 0, ""),
        (signal.SIGTERM, 143, 143, ""),
        (signal.SIGINT, 130, 130, "interrupted: the run has ended\n"),
    ],
)
def test_a_signal_to_this_process_only_reaches_the_ranks(
    tmp_path: Path, number: signal.Signals, rank_code: int, code: int, line: str
) -> None:
    """It waits for what they save, and its exit code is theirs."""
    (tmp_path / "launch.py").write_text(LAUNCHER)
    run = "import subprocess, sys; from megatron_terapipe.command.launcher_process import quietly;"
    run += "sys.exit(quietly(lambda: sys.exit(subprocess.Popen([sys.executable, *sys.argv[1:]]).wait())))"
    words = [sys.executable, "-c", run, str(tmp_path / "launch.py"), RANK, str(rank_code)]
    with _started(words) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (code, f"saved after {number}\n", line)


def test_without_ranks_a_signal_ends_this_process() -> None:
    run = "import subprocess, sys, time; from megatron_terapipe.command.launcher_process import quietly;"
    # A child that has ended, as a launcher that was killed.
    run += "quietly(lambda: [subprocess.Popen([sys.executable, '-c', '']), time.sleep(1), print('ready', flush=True), "
    run += "time.sleep(600)])"
    with _started([sys.executable, "-c", run]) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(120) == -signal.SIGTERM


def test_other_ends_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert quietly(lambda: None) == 0
    with pytest.raises(SystemExit) as raised:
        quietly(lambda: sys.exit(75))
    assert raised.value.code == 75
