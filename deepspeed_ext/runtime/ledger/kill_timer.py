"""A timer of the kernel that kills this process unless it is set anew in time.

A process that was stopped, or whose threads cannot run, ends by no signal that it would have to take, and its launcher
may not know. The kernel's timer needs none of its threads.
"""

import ctypes
import os
import signal
import sys

_CLOCK_MONOTONIC = 1
_SIGEV_SIGNAL = 0


class _Event(ctypes.Structure):
    """Linux's `struct sigevent`."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    )


class _Time(ctypes.Structure):
    """The C library's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    """The C library's `struct itimerspec`."""

    _fields_ = (("interval", _Time), ("value", _Time))


class KillTimer:
    """The timer of this process. It is off until it is set; without Linux always."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._timer: ctypes.c_void_p | None = None
        if not sys.platform.startswith("linux"):
            return
        self._library = ctypes.CDLL(None)
        timer = ctypes.c_void_p()
        event = _Event(None, signal.SIGKILL, _SIGEV_SIGNAL)
        try:
            if self._library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
                self._timer = timer
        except AttributeError:
            pass  # A C library without it: the launcher kills what does not end.

    def set(self, seconds: float) -> None:
        """Kill the process after this time, and no sooner."""
        # A child process that was forked has no timer.
        if self._timer is not None and os.getpid() == self._process:
            whole = int(seconds)
            setting = _Setting(_Time(0, 0), _Time(whole, int((seconds - whole) * 1e9)))
            self._library.timer_settime(self._timer, 0, ctypes.byref(setting), None)

    def end(self) -> None:
        """Remove the timer."""
        timer, self._timer = self._timer, None
        if timer is not None and os.getpid() == self._process:
            self._library.timer_delete(timer)
