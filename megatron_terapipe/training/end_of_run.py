"""The end of a run: its exit code, and the rank that reports its error.

    end                                                      reported by                        exit code
    normal                                                   -                                  0
    user error before the process group                      first rank of each host            2
    user error that all ranks raise (`AGREED`)               rank 0                             2
    user error of one rank, once there is a process group    that rank                          2
    another rank is lost                                     its watch (`rank_watch.py`)        `LOST`
    Ctrl-C                                                   first rank of each host            130

Before the process group exists, all ranks of a host read the same flags and files, and have the same error. Other
exceptions are failures of the program, and pass.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import BAD_INPUT, INTERRUPTED
from deepspeed_ext.runtime.health.rank_watch import LOST
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.errors import AgreedCheckpointError, NumbersError, SearchError
from megatron_terapipe.training.recovery import LostRank, remedy

AGREED = (AgreedCheckpointError, NumbersError, SearchError)
"""Errors that every rank of all hosts raises at the same time."""


class EndOfRun:
    """Reports the error that ends a run, and has its exit code; entered around the whole run."""

    def __init__(self) -> None:
        self.code = 0
        """Exit code, once the run has ended."""
        self.launch = _launch()
        """Place of this rank, which decides whether it reports."""
        self.save: str | None = None
        """Directory of the checkpoints, for the remedy of a run that is interrupted."""
        self.in_process_group = False
        """Whether this rank may be the only one with an error."""
        self.after_report = ExitStack()
        """Called after the error has been printed; not called where another rank is lost."""
        self.lost: Callable[[str], object] = lambda reason: None
        """Called with the reason where another rank is lost."""

    def __enter__(self) -> Self:
        """Begin the run."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Report the error, if this rank is the one to do so; return whether it is handled."""
        first_of_host = self.launch.local_rank == 0
        match error:
            case LostRank():
                self.after_report.pop_all()
                self.lost(str(error))
                self.code = LOST
            case UserError():
                reports = self.launch.rank == 0 if isinstance(error, AGREED) else first_of_host or self.in_process_group
                self._end(BAD_INPUT, f"error: {error}" if reports else "")
            case KeyboardInterrupt():
                self._end(INTERRUPTED, f"interrupted: {remedy(self.save)}" if first_of_host else "")
        self.after_report.close()
        return self.code != 0

    def _end(self, code: int, line: str) -> None:
        self.code = code
        if line:
            print(line, file=sys.stderr, flush=True)


def _launch() -> LaunchEnvironment:
    """Return the place of this rank; the place of a single rank if its variables are wrong, which is reported later."""
    try:
        return LaunchEnvironment.read()
    except UserError:
        return LaunchEnvironment.first_of(1)
