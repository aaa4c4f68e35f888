"""A process of which no thread runs is killed by the kernel."""

import signal
import subprocess
import sys

import pytest

STOPPED = """
import os, signal, sys, time
from deepspeed_ext.runtime.ledger.kill_timer import KillTimer

timer = KillTimer()
for _ in range(8):
    timer.set(0.4)
    time.sleep(0.1)
if sys.argv[1] == "end":
    timer.end()
    time.sleep(0.6)
    sys.exit(0)
if os.fork() == 0:
    timer.set(0.4)  # that of the parent is none of the child's
    time.sleep(0.6)
    os._exit(0)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a timer of Linux")
@pytest.mark.parametrize(("ending", "code"), [("stop", -signal.SIGKILL), ("end", 0)])
def test_it_is_killed_only_if_nobody_sets_the_timer_anew(ending: str, code: int) -> None:
    process = subprocess.run([sys.executable, "-c", STOPPED, ending], timeout=60, check=False)
    assert process.returncode == code
