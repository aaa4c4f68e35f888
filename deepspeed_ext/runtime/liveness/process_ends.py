"""Waits for the end of processes that are no children of this one."""

import os
import select
import time
from collections.abc import Hashable
from typing import Generic, TypeVar

import psutil

from deepspeed_ext.runtime.liveness.ancestors import birth_of

Name = TypeVar("Name", bound=Hashable)

_LOOK_S = 0.25
"""Seconds between two looks at processes where the system does not report their ends."""


class ProcessEnds(Generic[Name]):
    """Processes, and which of them have ended. For one thread.

    Linux reports an end at once, by a file descriptor of the process. Elsewhere the processes are looked at.

    Args:
        wake: file descriptor that ends a wait when there is something to read.
    """

    def __init__(self, wake: int) -> None:
        self._wake, self._poll = wake, select.poll()
        self._poll.register(wake, select.POLLIN)
        self._by_descriptor: dict[int, Name] = {}
        self._looked_at: dict[Name, psutil.Process] = {}
        self._ended: set[Name] = set()
        self._num_reported = 0

    def add(self, name: Name, pid: int, *, born: float | None = None) -> None:
        """Wait for the end of a process, too.

        Args:
            born: time at which it started, so that it is told from a later process of that number.
        """
        try:
            process = psutil.Process(pid)
            descriptor = _descriptor_of(pid)
            if born is not None and birth_of(process) != born:
                raise psutil.NoSuchProcess(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            self._ended.add(name)
            return
        if descriptor is None:
            self._looked_at[name] = process
            return
        self._by_descriptor[descriptor] = name
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> set[Name]:
        """Return the names of all that have ended so far, as soon as there is a new one, or after some seconds."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic()) if len(self._ended) == self._num_reported else 0.0
            ready = self._poll.poll(1000 * (min(left, _LOOK_S) if self._looked_at else left))
            for descriptor, _ in ready:
                if descriptor != self._wake:
                    self._ended.add(self._by_descriptor.pop(descriptor))
                    self._poll.unregister(descriptor)
                    os.close(descriptor)
            for name in [name for name, process in self._looked_at.items() if _has_ended(process)]:
                self._ended.add(name)
                del self._looked_at[name]
            if ready or len(self._ended) > self._num_reported or time.monotonic() >= deadline:
                self._num_reported = len(self._ended)
                return set(self._ended)

    def close(self) -> None:
        """Wait for nothing any more."""
        for descriptor in self._by_descriptor:
            os.close(descriptor)
        self._by_descriptor.clear()


def _descriptor_of(pid: int) -> int | None:
    """Return a descriptor that can be read once a process has ended; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
