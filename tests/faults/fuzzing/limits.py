"""Limits of a parser: some seconds, some memory, and no file outside a folder."""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


class LimitBroken(BaseException):
    """A parser broke a limit. No `except Exception` of a parser hides it.

    Attributes:
        rule: the limit.
    """

    def __init__(self, rule: str, detail: str = "") -> None:
        super().__init__(f"{rule}: {detail}" if detail else rule)
        self.rule = rule


class _Guard:
    """Hook of the interpreter for writes and starts of processes. Hooks cannot be removed, so it can be idle."""

    _WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    _CHANGING = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
    _STARTING = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.kill")
    _CALLING = ("socket.connect", "socket.bind", "socket.getaddrinfo")

    def __init__(self) -> None:
        self.folder: str | None = None
        sys.addaudithook(self._see)

    def _see(self, event: str, details: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            path, _, flags = details
            if isinstance(flags, int) and flags & self._WRITING and isinstance(path, str | bytes):
                self._check_path(path)
        elif event in self._CHANGING:
            self._check_path(details[0])
        elif event in self._STARTING or event in self._CALLING:
            raise LimitBroken(f"does {event}", repr(details)[:300])

    def _check_path(self, path: Any) -> None:
        if isinstance(path, int) or self.folder is None:
            return
        absolute = os.path.realpath(os.fsdecode(path))
        if not f"{absolute}/".startswith(f"{self.folder}/") and absolute != os.devnull:
            raise LimitBroken("writes outside its folder", absolute)


_guard = _Guard()


@contextmanager
def limited(seconds: float, folder: Path) -> Iterator[None]:
    """Run the body under limits; only in the main thread.

    Args:
        seconds: time of the processor for the body, which does not depend on other programs.
    """

    def too_slow(_signal: int, _frame: FrameType | None) -> None:
        raise LimitBroken(f"takes more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, too_slow)
    _guard.folder = os.path.realpath(folder)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _guard.folder = None
        signal.signal(signal.SIGPROF, before)


def limit_memory(more: int) -> None:
    """Let this process grow by so many bytes, and no more: it then sees a MemoryError.

    Args:
        more: bytes above its current size.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
