"""A process ends with its exit code and after all that is to be done at its end, whatever its threads do."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from deepspeed_ext.runtime.health.processes import ProcessEnd

atexit.register(print, "the interpreter's own end")
end = ProcessEnd()
atexit.register(print, "what is to be done")
if sys.argv[1] == "left":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[2] == "raised":
    raise KeyError
end.code = 7
sys.exit(end.code)
"""


@pytest.mark.parametrize(("ending", "code"), [("returned", 7), ("raised", 1)])
@pytest.mark.parametrize("threads", ["none", "left"])
def test_threads_that_are_left_do_not_see_the_end_of_the_interpreter(threads: str, ending: str, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM, threads, ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = ["what is to be done"] + ["the interpreter's own end"] * (threads == "none")
    assert (done.returncode, done.stdout.splitlines()) == (code, lines)
    assert ("KeyError" in done.stderr) == (ending == "raised")
