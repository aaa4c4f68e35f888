"""Files that outlive the power: written, synced, and known by size and hash."""

import os
from pathlib import Path
from types import TracebackType

from megatron_terapipe.checkpoint.manifest import FileFacts, new_hash

ASIDE = ".partial"
"""Ends the name of what is being written; what a run leaves that dies there."""


class DurableFile:
    """A new file to write to, which is on the disk when it is closed. Its hash is computed on the way.

    A write that fails is told at the end: torch's writer of archives cannot be interrupted between two of them.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: what is written at a time is large, and nothing is left to write when it is closed.
        self._file, self._hash, self._size = path.open("wb", buffering=0), new_hash(), 0
        self._fault: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes, and return their number."""
        rest = memoryview(data)
        try:
            while rest and self._fault is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._fault = error
        self._hash.update(data)
        self._size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: each write goes to the system at once."""

    def __enter__(self) -> "DurableFile":
        """Return the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, synced.

        Args:
            error: that ended the block, or None.

        Raises:
            OSError: if a write failed.
        """
        with self._file:
            if self._fault is not None:
                raise self._fault
            os.fsync(self._file.fileno())

    @property
    def facts(self) -> FileFacts:
        """Size and hash of what was written."""
        return FileFacts(self._size, self._hash.hexdigest())


def write_durably(path: Path, text: str) -> FileFacts:
    """Write a file and sync it; return its size and hash."""
    with DurableFile(path) as file:
        file.write(text.encode())
    return file.facts


def replace_durably(path: Path, text: str) -> None:
    """Give a file another content: at every moment it has the old one or the new one, whole."""
    aside = path.with_name(f"{path.name}{ASIDE}")
    write_durably(aside, text)
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder: a rename is on the disk only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
