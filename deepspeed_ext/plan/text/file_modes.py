"""Permissions of files that are written under a temporary name, which only their owner may read, and then renamed."""

import os
import secrets
from pathlib import Path


def permit_as_new(path: Path) -> None:
    """Give a file the permissions that a new file in its folder has: those that the user's umask leaves.

    The umask of a process cannot be read without setting it for all threads, so a new file tells.
    """
    probe = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        path.chmod(os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        probe.unlink()


def permit_to_run(path: Path) -> None:
    """Let all those run a file who may read it."""
    mode = path.stat().st_mode
    path.chmod(mode & 0o777 | (mode & 0o444) >> 2)
