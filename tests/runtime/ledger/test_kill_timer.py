"""A process of which no thread runs is killed by the kernel."""

import signal
import subprocess
import sys

import pytest

STOPPED = """
import os, signal, sys, time
from deepspeed_ext.runtime.health.stall_watch import KillTimer

timer = KillTimer()
timer.set(1.0)
timer.set(600.0)  # A busy host may not come back to this process for a while, but hardly between two lines.
time.sleep(1.1)
if sys.argv[1] == "end":
    timer.set(1.0)
    timer.end()
    time.sleep(1.1)
    sys.exit(0)
child = os.fork()
if child == 0:
    timer.set(0.2)  # that of the parent is none of the child's
    time.sleep(0.4)
    os._exit(0)
assert os.waitpid(child, 0) == (child, 0)
timer.set(0.2)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a timer of Linux")
@pytest.mark.parametrize(("ending", "code"), [("stop", -signal.SIGKILL), ("end", 0)])
def test_it_is_killed_only_if_nobody_sets_the_timer_anew(ending: str, code: int) -> None:
    process = subprocess.run([sys.executable, "-c", STOPPED, ending], timeout=60, check=False)
    assert process.returncode == code
