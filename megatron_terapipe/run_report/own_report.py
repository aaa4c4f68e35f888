"""The report that a run writes while it trains and when it ends. Its errors never end the run."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.records import RunEnd

_TAIL_BYTES = 1 << 16
"""Bytes at the end of a metrics file that contain its last line."""

_MOST_OF_TIME = 0.01
"""Largest part of a run's time that its report may take."""

_FIRST_TAKES_S = 1.0
"""Assumed seconds of the first report, which imports the modules that draw it."""


class OwnReport:
    """The report of this run, and the last line of its metrics file, with the reason of its end.

    Several threads may end a run: the main one, and those that watch for dead and for hanging ranks. The first of them
    writes the end.
    """

    def __init__(self, logging: LoggingConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._logging, self._ended, self._lock = logging, False, threading.RLock()
        self._clock, self._takes_s, self._last_s = clock, _FIRST_TAKES_S, clock()

    def write(self) -> None:
        """Write the report, if `--report` is given; print an error in one line."""
        path = self._logging.report
        try:
            written = self.refresh()
        except Exception as error:  # An error of the report must not end the run.
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f" warning: --report {path} was not written ({reason})", flush=True)
        else:
            if written:
                print(f" wrote the report {path}", flush=True)

    def refresh(self) -> bool:
        """Write the report of the run up to now, and return whether `--report` is given."""
        metrics_file, path = self._logging.metrics_file, self._logging.report
        if path is None or metrics_file is None or not Path(metrics_file).is_file():
            return False
        with self._lock, _without_signals():
            _write_report(metrics_file, path)
        return True

    def refresh_if_due(self) -> None:
        """Write the report again if that takes less than a hundredth of the time since the last one."""
        began = self._clock()
        if self._takes_s > _MOST_OF_TIME * (began - self._last_s):
            return
        with suppress(Exception):  # Printed when the run ends.
            self.refresh()
        self._last_s = self._clock()
        self._takes_s = self._last_s - began

    def write_end(self, reason: str, failed: bool) -> None:
        """Append the reason of an early end to the metrics file, and write the report.

        Args:
            failed: whether it is a failure; its reason follows one that the run wrote itself, which may be no more
                than a lost connection.
        """
        with self._lock, _without_signals():
            if self._ended:
                return
            self._ended = True
            if self._logging.metrics_file is not None:
                with suppress(OSError):
                    _append_end(Path(self._logging.metrics_file), reason, failed)
            self.write()


@contextmanager
def _without_signals() -> Iterator[None]:
    """Ignore signals of a launcher or a user while a page is written; only the main thread can."""
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
    """Append the end of a run to its metrics file, on any rank; without such a file, do nothing."""
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
        # An incomplete line of a killed rank stays a line of its own.
        between = "" if tail.endswith(b"\n") or not tail else "\n"
        file.write(f"{between}{json.dumps(end.as_json())}\n".encode())


def _last_of(tail: bytes) -> dict[str, Any]:
    """Return the last complete line; {} if there is none."""
    for line in reversed(tail.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _write_report(metrics_file: str, path: str) -> None:
    # Imported here, because pydantic is slow to import.
    from deepspeed_ext.plan.text_files import write_text
    from megatron_terapipe.run_report.page import render_report
    from megatron_terapipe.run_report.report import read_report

    # A reader never finds a part of a page, also if this process is killed.
    part = Path(f"{path}.part")
    try:
        write_text(part, render_report(read_report([metrics_file])), make_folder=True)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
