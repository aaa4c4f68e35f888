"""DeepSpeed's launcher as `terapipe train` runs it: without this, Ctrl-C prints a traceback before its ranks end.

    python -m megatron_terapipe.command.launcher_process WORDS OF DEEPSPEED'S COMMAND

The terminal sends Ctrl-C to all processes of a run at once, and the launcher of each host ends its ranks, for which
this process waits. Slurm, Kubernetes and `kill` may signal this process only: it passes SIGTERM and SIGINT on to the
ranks of this host. DeepSpeed's launchers would kill ranks that are still saving after 30 s.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

from deepspeed_ext.plan.terminal import BAD_INPUT, INTERRUPTED
from deepspeed_ext.runtime.cuda_environment import expect_cpu

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
        _end_without_ranks()
        if not (all_end := _children_end(_TOGETHER_S)):
            _pass_on(signal.SIGINT, None)
            all_end = _children_end(ENDS_IN_S)
        ended = _remedy() if all_end else f"the run has not ended within {ENDS_IN_S:.0f} s: look for its processes"
        print(f"interrupted: {ended}", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def _pass_on(number: int, _: FrameType | None) -> None:
    """Send a signal to the ranks of this host; SIGTERM without ranks ends this process."""
    from deepspeed_ext.runtime.health.processes import launched_here

    launchers, ranks = launched_here()
    _kill(ranks or launchers, number)
    if not ranks and number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _end_without_ranks() -> None:
    """End the launcher of this host if it has no ranks yet: while it loads torch, it ignores Ctrl-C (`_start`)."""
    from deepspeed_ext.runtime.health.processes import launched_here

    launchers, ranks = launched_here()
    _kill(() if ranks else launchers, signal.SIGTERM)


def _kill(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _remedy() -> str:
    from megatron_terapipe.training.end_of_run import LAUNCHER_REPORTS, remedy

    save = os.environ.get(LAUNCHER_REPORTS)
    return "the run has ended" if save is None else remedy(save or None)


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
    expect_cpu()
    try:
        # Imported here: it takes seconds, in which Ctrl-C must not print a traceback either.
        from deepspeed.launcher import runner

        parse = runner.parse_inclusion_exclusion

        def devices(pool: Any, included: str, excluded: str) -> Any:
            found = parse(pool, included, excluded)
            if not any(found.values()):
                raise ValueError(f"{included or excluded} leaves no device")
            return found

        vars(runner)["parse_inclusion_exclusion"] = devices
        vars(runner)["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": _start})
        runner.main()
    except Exception as error:  # Whatever it finds, it ends with a traceback of its own.
        why = str(error).partition("\n")[0] or type(error).__name__
        print(f"error: DeepSpeed's launcher: {why}", file=sys.stderr, flush=True)
        sys.exit(BAD_INPUT)


def _start(command: Sequence[str], **settings: Any) -> "subprocess.Popen[bytes]":
    """Start a program of DeepSpeed's command; its launcher of this host handles Ctrl-C once torch is loaded."""
    if "deepspeed.launcher.launch" in command:
        from deepspeed.accelerator import get_accelerator

        settings["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
        if get_accelerator().device_name() == "cpu":
            settings["env"] = {"DS_ACCELERATOR": "cpu"} | dict(settings.get("env") or os.environ)
    return subprocess.Popen(command, **settings)


if __name__ == "__main__":
    sys.exit(main())
