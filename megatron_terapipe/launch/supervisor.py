"""Runs a launch, and ends all of its processes on all hosts when the calling process ends.

    python supervisor.py HOST,HOST COMMAND...      runs the command until it ends, or until the standard input is closed
    python supervisor.py --end MARK                ends the processes of this host that have a mark

The standard input is closed when the process at its other end ends, also if it is killed. DeepSpeed's launcher cannot
end a launch so: it forwards no signal to a rank that hangs, and on a signal it kills every launcher of this user on
its hosts, of other runs too. So each process of a launch has a mark among its variables, by which it is found.

Only the standard library is used: this is a program of its own, which starts at once.
"""

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

VARIABLE = "PYTHON_LAUNCH_MARK"
"""Name of the mark. DeepSpeed's launcher sends variables with names that begin with PYTHON to other hosts."""

REACH_S = 10
"""Seconds in which another host must answer."""

END_S = 5.0
"""Seconds in which killed processes must be gone; one that waits for a disk may take longer."""

END_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that mean the same as a closed standard input."""

NOT_ENDED = 75
"""Exit code where processes may be left, on a host that was not reached or for longer than `END_S`."""


def main(words: Sequence[str]) -> int:
    """Run the command or the end of a launch, and return the exit code."""
    if words[0] == "--end":
        return 0 if end_marked(words[1]) else NOT_ENDED
    hosts, *command = words
    return supervise(command, [host for host in hosts.split(",") if host])


def supervise(command: Sequence[str], hosts: Sequence[str]) -> int:
    """Run a command until it ends or the standard input is closed, and return its exit code."""
    mark = uuid.uuid4().hex
    woken, wake = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    for each in (*END_SIGNALS, signal.SIGCHLD):
        signal.signal(each, lambda *_: None)
    process = subprocess.Popen(
        command, env=os.environ | {VARIABLE: mark}, stdin=subprocess.DEVNULL, start_new_session=True
    )
    wanted = True
    while wanted and process.poll() is None:
        ready, _, _ = select.select([sys.stdin, woken], [], [])
        wanted = sys.stdin not in ready and not END_SIGNALS.intersection(os.read(woken, 64))
    # Also after a good end: pdsh reports one where its ssh was killed.
    ended = end_marked(mark)
    process.wait()
    if not (end_on(hosts, mark) and ended):
        return NOT_ENDED
    # As in shells, if a signal ended it.
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def end_marked(mark: str) -> bool:
    """Kill the processes of this host that have a mark, and return whether all are gone."""
    deadline = time.monotonic() + END_S
    while left := _marked(mark):
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def end_on(hosts: Sequence[str], mark: str) -> bool:
    """End the marked processes of other hosts, and return whether all hosts did so."""
    if not hosts:
        return True
    # As DeepSpeed's launcher reaches them, which found Python and this package there.
    words = ["pdsh", "-S", "-t", str(REACH_S), "-u", str(REACH_S + int(END_S)), "-w", ",".join(hosts)]
    words += [sys.executable, "-I", str(Path(__file__).resolve()), "--end", mark]
    try:
        done = subprocess.run(words, env=os.environ | {"PDSH_RCMD_TYPE": "ssh"}, stdin=subprocess.DEVNULL, check=False)
    except OSError:
        return False
    return done.returncode == 0


def _marked(mark: str) -> list[int]:
    sign = f"{VARIABLE}={mark}".encode()
    found = []
    for variables in Path("/proc").glob("[0-9]*/environ"):
        # Variables of other users cannot be read, and some end while they are.
        with suppress(OSError):
            if sign in variables.read_bytes().split(b"\0"):
                found.append(int(variables.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
