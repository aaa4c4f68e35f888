"""The end of a run: its exit code, the rank that reports its error, the remedies, and the start after it.

    end                                                      reported by                        exit code
    normal                                                   -                                  0
    user error before the process group                      first rank of each host            2
    user error that all ranks raise (`AGREED`)               rank 0                             2
    other user error, once there is a process group          rank of each host that ends first  2
    no place to meet                                         rank of each host that ends first  2
    a rank that does not come to it                          the same                           `STALLED`
    another rank is lost                                     its watch (`rank_watch.py`)        `LOST`
    Ctrl-C                                                   first rank of each host, or        130
                                                             `terapipe train` on this host

Before the process group exists, all ranks of a host read the same flags and files, and have the same error. The
name of a file that is too long is an error of the user, wherever it is found. Other exceptions are failures of the
program, and pass.

Imported before torch, so that the death of a launcher is detected also while torch loads. `torchrun --max-restarts N`
starts the same command again when a rank has died. Its `--load` may then be older than its own checkpoints in `--save`,
so a restarted run loads the latter (`after_restart`).
"""

import errno
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from ctypes import CDLL
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import BAD_INPUT, INTERRUPTED
from deepspeed_ext.runtime.health.processes import STALLED
from deepspeed_ext.runtime.health.rank_watch import LOST, RankWatch, watch_rank
from deepspeed_ext.runtime.launch import AbsentRankError, LaunchEnvironment, MeetingError, number
from megatron_terapipe.checkpoint.directories import latest_checkpoint, names_model_folder
from megatron_terapipe.config import CheckpointConfig, Config
from megatron_terapipe.errors import (
    AgreedCheckpointError,
    AgreedDataError,
    CheckpointError,
    ConfigError,
    LayersError,
    NumbersError,
    SearchError,
)

LAUNCHER_REPORTS = "TERAPIPE_SAVE"
"""Variable with the directory of `--save`, perhaps empty, where `terapipe train` reports Ctrl-C itself."""


_IMPATIENT_S = 5.0
"""Seconds after Ctrl-C in which another one is ignored."""


class LostRank(Exception):
    """The end of this rank because another one has died, which has been printed."""


AGREED = (AgreedCheckpointError, AgreedDataError, LayersError, NumbersError, SearchError)
"""Errors that every rank of all hosts raises at the same time."""


class EndOfRun:
    """Reports the error that ends a run, and has its exit code; entered around the whole run."""

    def __init__(self) -> None:
        self.code = 0
        """Exit code, once the run has ended."""
        self.launch = _launch()
        """Place of this rank, which decides whether it reports."""
        self.remedy: Callable[[], str] = lambda: "the run had not begun: give the same command again"
        """Called for the remedy of a run that is interrupted."""
        self._interrupted_at = -math.inf
        self._unprinted = threading.Lock()
        self.in_process_group = False
        """Whether any rank may be the first, or the only one, with an error."""
        self.rank_watch: RankWatch | None = None
        """The watch of this rank, once it is watched; it ends before the error is printed."""
        self.after_report = ExitStack()
        """Called after the error has been printed; not called where another rank is lost."""
        self.lost: Callable[[str], object] = lambda reason: None
        """Called with the reason where another rank is lost."""

    def watch(self, launch: LaunchEnvironment, config: Config) -> RankWatch:
        """Return the watch of this rank, started by the first call. Call it before torch is imported."""
        if self.rank_watch is None:
            # Read when torch is imported. Torch's store would print a stack when the rank with the store has died.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            if torch := sys.modules.get("torch"):  # Programs of the user's own import it first: it reads again.
                with suppress(OSError, AttributeError):
                    CDLL(str(Path(str(torch.__file__)).parent / "lib" / "libc10.so"))._ZN3c1011initLoggingEv()
            self.rank_watch = watch_rank(
                launch,
                timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes),
                remedy=partial(remedy, config.checkpoint.save),
                interrupted=self.print_interrupted,
            ).__enter__()
        return self.rank_watch

    def __enter__(self) -> Self:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        main = threading.current_thread() is threading.main_thread()
        ours = main and [*before.values()] == [signal.default_int_handler, signal.SIG_DFL]
        self._before = before if ours else {}
        if self._before:
            signal.signal(signal.SIGINT, self._interrupt)
            signal.signal(signal.SIGTERM, self._terminate)
        return self

    def _interrupt(self, number: int, frame: FrameType | None) -> Any:
        """Raise `KeyboardInterrupt`; not again within seconds, during the cleanup that it begins."""
        last, self._interrupted_at = self._interrupted_at, time.monotonic()
        if self._interrupted_at - last > _IMPATIENT_S:
            self.print_interrupted()
            signal.default_int_handler(number, frame)

    def print_interrupted(self) -> None:
        """Print the line for Ctrl-C, once: one rank of each host, unless `terapipe train` prints it.

        At once, because launchers kill ranks that take long to end.
        """
        prints = self.launch.local_rank == 0 and LAUNCHER_REPORTS not in os.environ
        if self._unprinted.acquire(blocking=False) and prints:
            # Not by `print`, which the signal may have interrupted.
            os.write(2, f"interrupted: {self.remedy()}\n".encode(errors="backslashreplace"))

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """End this process; not after Ctrl-C, when a launcher sends SIGTERM before the end is reported."""
        if self._interrupted_at == -math.inf:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Report the error, if this rank is the one to do so; return whether it is handled."""
        if self.rank_watch is not None:
            self.rank_watch.__exit__(kind, error, trace)
        match error:
            case LostRank():
                self.after_report.pop_all()
                self.lost(str(error))
                self.code = LOST
            case UserError() | OSError(errno=errno.ENAMETOOLONG):
                line = (
                    f"{error.filename} is longer than the name of a file may be"
                    if isinstance(error, OSError)
                    else error
                )
                if isinstance(error, AGREED):
                    reports = self.launch.rank == 0
                elif self.rank_watch is not None and (self.in_process_group or isinstance(error, MeetingError)):
                    reports = self.rank_watch.ends_first
                else:
                    reports = self.launch.local_rank == 0
                code = STALLED if isinstance(error, AbsentRankError) else BAD_INPUT
                self._end(code, f"error: {line}" if reports else "")
            case KeyboardInterrupt():
                self.print_interrupted()
                self.code = INTERRUPTED
        self.after_report.close()
        for each, handler in self._before.items():
            signal.signal(each, handler)
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


def remedy(save: str | None) -> str:
    """Return the remedy of a run that died, for its error."""
    try:
        found = None if save is None else latest_checkpoint(save)
    except CheckpointError:
        return f"check the checkpoints in {save}, and resume with --load {save}"
    if found is None:
        return "no checkpoint was saved, so start again"
    return f"resume with --load {save}, from {found.name}"


def keep_traceback(error: BaseException, directory: Path, rank: int) -> None:
    """Write the traceback of an error into the directory of the ledgers."""
    directory.mkdir(parents=True, exist_ok=True)
    text = "".join(traceback.format_exception(error))
    (directory / f"traceback_rank{rank}.txt").write_text(text, encoding="utf-8")


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable with which torchrun makes a new store for every start. A shared store has addresses of the last start."""


def after_restart(config: CheckpointConfig, environment: Mapping[str, str] = os.environ) -> CheckpointConfig:
    """Return the section of a run, changed if the launcher has started the run again."""
    restarts, restart, hosts = (
        least if (found := number(environment, name)) is None else found
        for name, least in (
            ("TORCHELASTIC_MAX_RESTARTS", 0),
            ("TORCHELASTIC_RESTART_COUNT", 0),
            ("GROUP_WORLD_SIZE", 1),
        )
    )
    if restarts == 0:
        return config
    if config.save is None:
        raise ConfigError(f"--max-restarts {restarts} has no checkpoints to resume from: add --save, or drop it")
    if hosts > 1 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise ConfigError(
            f"--max-restarts {restarts} on {hosts} hosts: ranks that are started again would find old addresses of "
            f"each other: start torchrun with --rdzv-backend c10d and the variable {OWN_STORE}=1"
        )
    saved = latest_checkpoint(config.save)
    if saved is None or (config.load is not None and names_model_folder(config.load)) or _resumes(config, saved):
        return config
    # On several hosts a launcher may not count a start that a failure on another host caused.
    if restart == 0 or hosts > 1:
        raise ConfigError(
            f"--save {config.save} has {saved.name} of another run, from which a restart of this run would resume: add "
            f"--load {config.save}, or save in an empty directory"
        )
    return replace(config, load=config.save, load_tag=None, ckpt_step=None, finetune=False, no_load_optim=False)


def _resumes(config: CheckpointConfig, saved: Path) -> bool:
    """Whether the flags resume the run from its own newest checkpoint."""
    if config.load is None or config.save is None or Path(config.load).resolve() != Path(config.save).resolve():
        return False
    return not config.weights_only and config.tag in (None, saved.name)
