"""Whether files can be written to a directory, and whether other hosts see them."""

import os
import tempfile
import threading
from pathlib import Path

from megatron_terapipe.doctor.facts import Folder

PREFIX = ".terapipe-doctor-"


def folder(path: str, limit_s: float) -> Folder:
    """Return what can be done in a directory, or in the nearest one above it that exists: a run makes the others.

    Args:
        limit_s: seconds in which its disk must answer: a file server that is gone lets its users wait for ever.
    """
    found: list[Folder] = []
    looking = threading.Thread(target=lambda: found.append(_tried(path)), daemon=True)
    looking.start()
    looking.join(limit_s)
    return found[0] if found else Folder(path=path, fault=f"the disk does not answer in {limit_s:.0f} s", free_bytes=0)


def _tried(path: str) -> Folder:
    existing = Path(path)
    while not existing.is_dir() and existing != existing.parent:
        if existing.exists():
            return Folder(path=str(existing), fault=f"{existing} is a file", free_bytes=0)
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=PREFIX) as file:
            file.write(b"terapipe doctor\n" * 256)
            file.flush()
            os.fsync(file.fileno())
        fault = None
    except OSError as error:
        fault = error.strerror or str(error)
    room = os.statvfs(existing)
    return Folder(path=str(existing), fault=fault, free_bytes=room.f_frsize * room.f_bavail)


def token_path(directory: str, token: str) -> Path:
    """Return the path of a file that other hosts look for."""
    return Path(directory, PREFIX + token)


def write_token(path: Path, token: str) -> None:
    """Write a file that other hosts look for.

    Raises:
        OSError: if it cannot be written.
    """
    with path.open("x") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())


def sees_token(directory: str, token: str) -> bool:
    """Whether the file of another host is here."""
    try:
        os.listdir(directory)  # A network file system looks again, not into what it remembers.
        return token_path(directory, token).read_text() == token
    except OSError:
        return False
