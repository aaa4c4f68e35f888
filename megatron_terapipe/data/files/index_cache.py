"""Arrays that follow from a description, kept on disk for the next run and the other ranks of this one."""

import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.text.file_modes import permit_as_new
from megatron_terapipe.data.files.file_columns import FileColumn, Numbers, ReadFile
from megatron_terapipe.errors import DataError

Arrays = Mapping[str, NDArray[Any]]
"""What is computed, by name: arrays of one dimension."""

_SILENT_S, _PATIENCE_S, _LOOK_EVERY_S = 5.0, 300.0, 0.05
"""Seconds of waiting for another process before a line says so; until its work is done here, too; between looks."""


class IndexCache:
    """A directory of arrays, each under the hash of all that decides it.

    Files get their names only when they are whole, and the list of an entry's arrays, with a checksum of each, comes
    last: so an entry is there or not, whenever a process died, and what a disk has damaged since is computed again. Of
    the processes of a host that want the same entry one computes it and the others wait; where the file system has no
    locks, or another process keeps its lock too long, each computes it, and all write the same.
    """

    def __init__(self, folder: Path | None, *, required: bool = True) -> None:
        """Name the directory, which need not be there.

        Args:
            folder: folder of the files; None keeps nothing.
            required: whether it is an error if the directory cannot be written; otherwise every process computes.
        """
        self._folder, self._required = folder, required

    @property
    def keeps(self) -> bool:
        """Whether anything is kept: then one process per host computes, and may show its progress."""
        return self._folder is not None

    def get(self, description: Mapping[str, object], compute: Callable[[], Arrays]) -> Mapping[str, Numbers]:
        """Return the arrays [length] that a description stands for, left on disk if they are kept.

        Args:
            description: all that decides the arrays, of types that JSON has.

        Raises:
            DataError: the directory cannot be written, and must be.
        """
        if self._folder is None:
            return compute()
        key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
        found = _load(self._folder, key, description)
        if found is not None:
            return found
        computed: Arrays | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _lock(self._folder / ".lock"):
                # Another process may have been faster.
                found = _load(self._folder, key, description)
                if found is None:
                    computed = compute()
                    _store(self._folder, key, description, computed)
                    found = _load(self._folder, key, description)
        except OSError as error:
            if self._required:
                raise DataError(
                    f"--data-cache-path {self._folder} cannot be written ({error.strerror}): name another, or leave it "
                    "out"
                ) from None
        if found is not None:
            return found
        # The directory cannot be written, or somebody clears it just now.
        return compute() if computed is None else computed


def _load(folder: Path, key: str, description: Mapping[str, object]) -> Mapping[str, Numbers] | None:
    """Return an entry; None if it is not there, or not what was stored."""
    try:
        entry = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        if entry["description"] != description:
            return None
        return {name: _column(_file(folder, key, name), **stored) for name, stored in entry["arrays"].items()}
    except (DataError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _column(path: Path, *, dtype: str, length: int, crc32: int) -> FileColumn:
    """Return the numbers of a file, all of which are read once.

    Raises:
        ValueError: they are not those that were stored.
    """
    if length < 0:
        raise ValueError(length)
    file = ReadFile(path)
    itemsize = np.dtype(dtype).itemsize
    column = FileColumn(file, dtype, file.size - length * itemsize, length)
    found = 0
    for _, piece in column.pieces():
        found = zlib.crc32(piece.data, found)
    if found != crc32:
        raise ValueError(path)
    return column


def _store(folder: Path, key: str, description: Mapping[str, object], arrays: Arrays) -> None:
    for name, array in arrays.items():
        with _appearing(_file(folder, key, name)) as partial, partial.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    stored = {
        name: {
            "dtype": array.dtype.str,
            "length": len(array),
            "crc32": zlib.crc32(np.ascontiguousarray(array).data),
        }
        for name, array in arrays.items()
    }
    with _appearing(folder / f"{key}.json") as partial:
        partial.write_text(json.dumps({"description": description, "arrays": stored}), encoding="utf-8")


def _file(folder: Path, key: str, name: str) -> Path:
    return folder / f"{key}-{name}.npy"


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Yield a file of this process alone that takes the place of `path` at the end."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        # A temporary file is its owner's alone, but the cache may be a team's: the umask decides.
        permit_as_new(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold what only one process at a time holds; its end, however it ends, lets go.

    A process that is stopped holds on to it, so patience ends; and a file system may have no locks. Either way the work
    is then done more than once, and right.
    """
    with path.open("ab") as file:
        began, spoke = time.monotonic(), False
        with suppress(OSError):
            while time.monotonic() - began < _PATIENCE_S:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not spoke and time.monotonic() - began > _SILENT_S:
                        spoke = True
                        print(f"waiting for another process that fills {path.parent}", file=sys.stderr, flush=True)
                    time.sleep(_LOOK_EVERY_S)
        yield
