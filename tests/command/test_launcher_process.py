"""Ctrl-C under DeepSpeed's launcher is one line and 130, and comes after the end of all that it started."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron_terapipe.command.launcher_process import quietly
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


def test_ctrl_c_is_one_line_after_the_end_of_all(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, CHILD, str(tmp_path / "child")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell ignores Ctrl-C for what it starts in the background, and tests may be started so.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted: the run has ended\n"
    assert process.returncode == 130
    assert (tmp_path / "child").read_text() == "ended"


def test_other_ends_are_those_of_the_launcher() -> None:
    assert quietly(lambda: None) == 0
    with pytest.raises(SystemExit) as raised:
        quietly(lambda: sys.exit(75))
    assert raised.value.code == 75
