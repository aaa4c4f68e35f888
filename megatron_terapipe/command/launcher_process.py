"""DeepSpeed's launcher as `terapipe train` runs it: without this, Ctrl-C prints a traceback before its ranks end.

    python -m megatron_terapipe.command.launcher_process WORDS OF DEEPSPEED'S COMMAND

The terminal sends Ctrl-C to all processes of a run at once, and the launcher of each host ends its ranks, for which
this process waits. Slurm, Kubernetes and `kill` may signal this process only: it passes SIGTERM and SIGINT on to the
ranks of this host. DeepSpeed's launchers would kill ranks that are still saving after 30 s.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from deepspeed_ext.plan.terminal import INTERRUPTED

ENDS_IN_S = 60.0
"""Seconds for the ranks to end: DeepSpeed's launcher kills them after 30."""

_TOGETHER_S = 2.0
"""Seconds for the ranks to end if they received Ctrl-C, too."""

_LOOK_S = 0.05
"""Seconds between two checks of the children."""


def main() -> int:
    """Run DeepSpeed's launcher, and return the exit code of the run: 130 for Ctrl-C."""
    return quietly(_launch)


def quietly(launch: Callable[[], object]) -> int:
    """Run a launch, and return its exit code once all of its processes have ended: 130 if Ctrl-C ends it."""
    signal.signal(signal.SIGTERM, _pass_on)
    try:
        launch()
    except KeyboardInterrupt:
        # A second Ctrl-C reaches the launchers of the hosts, too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not (all_end := _children_end(_TOGETHER_S)):
            _pass_on(signal.SIGINT, None)
            all_end = _children_end(ENDS_IN_S)
        ended = "has ended" if all_end else f"has not ended within {ENDS_IN_S:.0f} s: look for its processes"
        print(f"interrupted: the run {ended}", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def _pass_on(number: int, _: FrameType | None) -> None:
    """Send a signal to the ranks of this host; SIGTERM without ranks ends this process."""
    from deepspeed_ext.runtime.health.processes import launched_here

    launchers, ranks = launched_here()
    for process in ranks or launchers:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    if not ranks and number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _children_end(seconds: float) -> bool:
    """Return whether all children of this process have ended, as soon as they have, or after some seconds."""
    deadline = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if not pid:
                time.sleep(_LOOK_S)
        return False
    return True


def _launch() -> None:
    # Imported here: it takes seconds, in which Ctrl-C must not print a traceback either.
    from deepspeed.launcher import runner

    runner.main()


if __name__ == "__main__":
    sys.exit(main())
