"""Programs of others that write files in one folder only.

Landlock is a part of Linux by which a process gives up rights for itself and for all processes that it starts; it needs
no privileges. A PATH of harmless programs is not such a bound: redirections are made by the shell itself.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed_ext.plan.errors import UserError

# System calls, and bits of linux/landlock.h.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_WRITES = _WRITE_FILE | _TRUNCATE | sum(1 << bit for bit in range(4, 14))
"""Writing, truncating, removing, making, and moving between folders."""
_CONNECTS = 1 << 0 | 1 << 1
_SIGNALS = 1 << 1
_NO_NEW_PRIVILEGES = 38
_OLDEST = 3
"""Version with a right for truncation, of Linux 6.2."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scope", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 or below: none."""
    if sys.platform != "linux":
        return 0
    return int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION))


def run_confined(
    command: Sequence[str], folder: Path, *, directory: Path, environment: Mapping[str, str], seconds: float
) -> str:
    """Run a program that can write beneath the folder only, and return its output.

    It can open no TCP connection and send no signal to processes outside, where the kernel has rights for these.

    Raises:
        UserError: this kernel has no such bound.
        subprocess.TimeoutExpired: the program took longer; it and the processes that it started have ended.
    """
    version = landlock_version()
    if version < _OLDEST:
        raise UserError("scripts are run with Landlock, which this kernel lacks: use Linux 6.2 or later")
    library = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *values: object) -> int:
        result = int(library.syscall(number, *values))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    # A kernel refuses fields that it does not know.
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = call(
        _CREATE_RULESET, ctypes.byref(_Ruleset(_WRITES, _CONNECTS, _SIGNALS)), ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    for path, rights in ((folder, _WRITES), (Path(os.devnull), _WRITE_FILE | _TRUNCATE)):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(_PathBeneath(rights, opened)), ctypes.c_uint32(0))
        os.close(opened)

    def confine() -> None:
        if library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        call(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0))

    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=confine,
    ) as process:
        os.close(ruleset)
        try:
            return process.communicate(timeout=seconds)[0]
        finally:
            # Processes in the background may hold the pipe.
            _kill_group(process.pid)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
