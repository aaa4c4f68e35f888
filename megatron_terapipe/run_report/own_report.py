"""The report that a run writes of itself, while it trains and when it ends, never at the cost of the run."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.training.records import RunEnd

_TAIL_BYTES = 1 << 16
"""Bytes at the end of a metrics file that surely hold its last line."""

_MOST_OF_TIME = 0.01
"""Part of a run's time that its report may take while it trains."""

_FIRST_TAKES_S = 1.0
"""Seconds that the first one takes, as far as anybody knows: it imports what draws it."""


class OwnReport:
    """The report of this run, and the line of its metrics file that says how it ended.

    A run may be ended by several threads: by the main one, by the one that watches for dead ranks, by the one that
    watches for ranks that hang. The first of them tells the end.
    """

    def __init__(self, logging: LoggingConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._logging, self._told, self._lock = logging, False, threading.RLock()
        self._clock, self._takes_s, self._last_s = clock, _FIRST_TAKES_S, clock()

    def write(self) -> None:
        """Write the report, if it was asked for; where that fails, say so in one line."""
        path = self._logging.report
        try:
            written = self.refresh()
        except Exception as error:  # The run is done, whatever is wrong with its report.
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f" warning: --report {path} was not written ({reason})", flush=True)
        else:
            if written:
                print(f" wrote the report {path}", flush=True)

    def refresh(self) -> bool:
        """Write the report as far as the run has come, and return whether one was asked for."""
        metrics_file, path = self._logging.metrics_file, self._logging.report
        if path is None or metrics_file is None or not Path(metrics_file).is_file():
            return False
        with self._lock, _undisturbed():
            _write_report(metrics_file, path)
        return True

    def refresh_if_due(self) -> None:
        """Write the report anew if that takes less than a hundredth of the time since the last one."""
        began = self._clock()
        if self._takes_s > _MOST_OF_TIME * (began - self._last_s):
            return
        with suppress(Exception):  # Told when the run ends.
            self.refresh()
        self._last_s = self._clock()
        self._takes_s = self._last_s - began

    def tell_end(self, reason: str, failed: bool) -> None:
        """Note how the run ends before its time, and write the report.

        Args:
            failed: whether something is wrong; such a reason takes the place of one that the run noted itself, which
                may have seen no more than a lost connection.
        """
        with self._lock, _undisturbed():
            if self._told:
                return
            self._told = True
            if self._logging.metrics_file is not None:
                with suppress(OSError):
                    _append_end(Path(self._logging.metrics_file), reason, failed)
            self.write()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no signal of a launcher or of a user end this process in the middle of a page; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _append_end(path: Path, reason: str, failed: bool) -> None:
    """Append the end of a run to its metrics file, on whatever rank it is seen; nothing where there is no such file."""
    if not path.is_file():
        return
    with path.open("ab+") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
        last = _last_of(tail)
        if last.get("event") == RunEnd.event and not failed:
            return
        end = RunEnd(iteration=last.get("iteration", 0), reason=reason, failed=failed)
        # A line that a killed rank left unfinished stays one of its own.
        between = "" if tail.endswith(b"\n") or not tail else "\n"
        file.write(f"{between}{json.dumps(end.as_json())}\n".encode())


def _last_of(tail: bytes) -> dict[str, Any]:
    """Return the last line that is whole; an empty one if none is."""
    for line in reversed(tail.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _write_report(metrics_file: str, path: str) -> None:
    # Imported where a report is written: it takes pydantic, and a while.
    from deepspeed_ext.plan.text_files import write_text
    from megatron_terapipe.run_report.page import render_report
    from megatron_terapipe.run_report.report import read_report

    # Whoever reads it meanwhile, or ends this process, finds a whole page or none.
    part = Path(f"{path}.part")
    try:
        write_text(part, render_report(read_report([metrics_file])), make_folder=True)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
