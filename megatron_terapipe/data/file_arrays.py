"""Arrays in files: read at given bytes, or computed once and kept on disk.

Files are read, not mapped into memory. An access beyond the end of a truncated mapped file is a bus error, which ends
the process without a message; a short read is an error with the file and the byte. A read also releases the lock of
Python while it waits for the disk.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from errno import EMFILE
from functools import cache, cached_property
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from threading import Lock
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray
from tqdm import tqdm

from deepspeed_ext.plan.text_files import open_locked, permit_as_new
from megatron_terapipe.errors import DataError

NUMBERS_AT_ONCE = 1 << 18
"""Numbers of a piece: it stays in the processor's cache while it is checked."""

_MOST_OPEN = 1 << 15
_FENCE = 1 << 10
"""A search goes to one of every so many numbers first, and then reads the numbers up to the next."""


class _Handle:
    """An open file, until no thread reads it and it is not kept any more."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


class _OpenFiles:
    """The files that were read last: half of those that the process may have open at most."""

    def __init__(self) -> None:
        self.limit = getrlimit(RLIMIT_NOFILE)[0]
        """Files that the process may have open; -1 without a limit."""
        self._most = (min(self.limit, _MOST_OPEN) if self.limit >= 0 else _MOST_OPEN) // 2
        self._handles: OrderedDict[int, _Handle] = OrderedDict()
        self._lock = Lock()

    def find(self, key: int) -> _Handle | None:
        """Return the handle of a file that is open."""
        with self._lock:
            if key in self._handles:
                self._handles.move_to_end(key)
            return self._handles.get(key)

    def keep(self, key: int, handle: _Handle) -> None:
        """Keep a file open until others are read more often, or it is dropped."""
        with self._lock:
            self._handles[key] = handle
            while len(self._handles) > self._most:
                self._handles.popitem(last=False)

    def drop(self, key: int) -> None:
        """Close a file that nothing reads any more."""
        self._handles.pop(key, None)


@cache
def _open_files() -> _OpenFiles:
    return _OpenFiles()


class ReadFile:
    """A file, read at given bytes by any number of threads.

    While there are not too many it stays open: a file that is removed or replaced can be read until the last reader is
    gone. One that was closed must be the same when it is read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state: tuple[int, int] | None = None
        weakref.finalize(self, _open_files().drop, id(self))
        state = os.fstat(self._handle().number)
        self._state = state.st_size, state.st_mtime_ns
        self.size = state.st_size
        """Its bytes when it was opened."""

    def _handle(self) -> _Handle:
        files = _open_files()
        handle = files.find(id(self))
        if handle is None:
            try:
                handle = _Handle(self.path)
            except OSError as error:
                remedy = "give a file that can be read"
                if error.errno == EMFILE:
                    remedy = f"raise the limit of this process, `ulimit -n`, which is {files.limit}"
                raise DataError(f"{self.path} cannot be opened ({error.strerror}): {remedy}") from None
            state = os.fstat(handle.number)
            if self._state not in (None, (state.st_size, state.st_mtime_ns)):
                raise DataError(
                    f"{self.path} has been written since it was first opened: bring back the file that the run began "
                    "with, and continue from the last checkpoint"
                )
            files.keep(id(self), handle)
        return handle

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes of the file."""
        found = self._read(start, num_bytes)
        while len(found) < num_bytes:  # The operating system may return large reads in parts.
            part = self._read(start + len(found), num_bytes - len(found))
            if not part:
                now = os.fstat(self._handle().number).st_size
                raise DataError(
                    f"{self.path} ends at byte {now} now, and had {self.size} bytes when it "
                    f"was opened; bytes {start} to {start + num_bytes} are needed: bring back the whole file, and "
                    "continue from the last checkpoint"
                )
            found += part
        return found

    def _read(self, start: int, num_bytes: int) -> bytes:
        try:
            handle = self._handle()
            return os.pread(handle.number, num_bytes, start)
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read at byte {start} ({error.strerror}): check its disk, and continue from "
                "the last checkpoint"
            ) from None


class FileColumn:
    """Consecutive numbers of a file from byte `start` on, read when they are used, [length].

    It is used like an array; its items are numbers, and its slices arrays in memory.
    """

    def __init__(self, file: ReadFile, dtype: DTypeLike, start: int, length: int) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._file, self._start, self._length = file, start, length

    def __len__(self) -> int:
        return self._length

    def byte_of(self, index: int) -> int:
        """Return the byte of the file at which a number begins."""
        return self._start + index * self.dtype.itemsize

    def read(self, first: int, end: int) -> NDArray[Any]:
        """Return the numbers [first, end), read only, [end - first]; both are in [0, length]."""
        content = self._file.read(self.byte_of(first), (end - first) * self.dtype.itemsize)
        return np.frombuffer(content, self.dtype)

    def __getitem__(self, index: int | slice) -> Any:
        """Return one number, or an array of a run of them."""
        if isinstance(index, slice):
            assert index.step is None, "numbers are read in their order"
            first, end, _ = index.indices(self._length)
            return self.read(first, max(first, end))
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"number {index} of {self._length} in {self._file.path}")
        return self.read(position, position + 1)[0]

    def pieces(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield all numbers in pieces: the index of the first, and the numbers [`NUMBERS_AT_ONCE` or less]."""
        for first in range(0, self._length, NUMBERS_AT_ONCE):
            yield first, self.read(first, min(first + NUMBERS_AT_ONCE, self._length))

    @cached_property
    def _fences(self) -> NDArray[Any]:
        """Return every `_FENCE`th number."""
        return np.array([self[index] for index in range(0, self._length, _FENCE)], self.dtype)

    def searchsorted(self, value: int, side: Literal["left", "right"] = "left") -> int:
        """Return the index at which a value would keep rising numbers in order, as numpy's function does."""
        fence = int(self._fences.searchsorted(value, side))
        first = max(0, fence - 1) * _FENCE
        return first + int(self.read(first, min(first + _FENCE, self._length)).searchsorted(value, side))


Numbers = NDArray[Any] | FileColumn
"""Numbers in memory, or in a file."""


_SECONDS_UNTIL_PROGRESS, _SECONDS_BETWEEN_LINES = 2.0, 30.0


def with_progress(blocks: range, *, shown: bool) -> Iterable[int]:
    """Return blocks of a blend, with progress once they have taken a while: a bar, or without a terminal some lines."""
    reported: Iterable[int] = tqdm(
        blocks,
        desc="blend",
        unit="block",
        delay=_SECONDS_UNTIL_PROGRESS,
        mininterval=0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES,
        disable=not shown,
        file=sys.stderr,
    )
    return reported


Arrays = Mapping[str, NDArray[Any]]
"""Results by name: arrays of one dimension."""

_SILENT_S, _PATIENCE_S, _LOOK_EVERY_S = 5.0, 300.0, 0.05
"""Seconds of waiting for another process until a message, until this process computes as well, and between checks."""


class IndexCache:
    """A directory of arrays, each under the hash of all that decides it.

    Files get their names only when they are whole, and the list of an entry's arrays, with a checksum of each, comes
    last: so an entry is there or not, whenever a process died, and damaged ones are computed again. Of the processes of
    a host one computes an entry and the others wait; without locks, or where one is kept too long, each computes it.

    Args:
        folder: folder of the files, created if missing; None: arrays are computed each time.
        required: whether it is an error if the folder cannot be written; otherwise every process computes.
    """

    def __init__(self, folder: Path | None, *, required: bool = True) -> None:
        self._folder, self._required = folder, required

    @property
    def keeps(self) -> bool:
        """Whether anything is kept: then one process per host computes, and may show its progress."""
        return self._folder is not None

    def get(
        self, description: Mapping[str, object], names: Collection[str], compute: Callable[[], Arrays]
    ) -> Mapping[str, Numbers]:
        """Return the arrays [length] of a description, as columns of files if they are stored.

        Args:
            names: names of the arrays that `compute` returns.
        """
        if self._folder is None:
            return compute()
        key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
        found = _load(self._folder, key, description, names)
        if found is not None:
            return found
        computed: Arrays | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _lock(self._folder / ".lock"):
                # Another process may have been faster.
                found = _load(self._folder, key, description, names)
                if found is None:
                    computed = compute()
                    _store(self._folder, key, description, computed)
                    found = _load(self._folder, key, description, names)
        except OSError as error:
            if self._required:
                raise DataError(
                    f"--data-cache-path {self._folder} cannot be written ({error.strerror}): name another, or leave it "
                    "out"
                ) from None
        if found is not None:
            return found
        # The directory cannot be written, or another process clears it at this moment.
        return compute() if computed is None else computed


def _load(
    folder: Path, key: str, description: Mapping[str, object], names: Collection[str]
) -> Mapping[str, Numbers] | None:
    """Return an entry; None if it is missing or damaged."""
    try:
        entry = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        if entry["description"] != description:
            return None
        return {name: _column(_file(folder, key, name), **entry["arrays"][name]) for name in names}
    except (DataError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _column(path: Path, *, dtype: str, length: int, crc32: int) -> FileColumn:
    """Return the numbers of a file, all of which are read once."""
    if length < 0 or np.dtype(dtype).kind not in "if":
        raise ValueError(length, dtype)
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
        with _replacing(_file(folder, key, name)) as partial, partial.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    stored = {
        name: {
            "dtype": array.dtype.str,
            "length": len(array),
            "crc32": zlib.crc32(np.ascontiguousarray(array).data),
        }
        for name, array in arrays.items()
    }
    with _replacing(folder / f"{key}.json") as partial:
        partial.write_text(json.dumps({"description": description, "arrays": stored}), encoding="utf-8")


def _file(folder: Path, key: str, name: str) -> Path:
    return folder / f"{key}-{name}.npy"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` at the end."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".partial")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        # Only its owner may read a temporary file, but a team may share the cache: the umask decides.
        permit_as_new(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock, or continue without it where there are no locks or a stopped process holds it."""
    began, spoke = time.monotonic(), False
    while (file := open_locked(path)) is None and time.monotonic() - began < _PATIENCE_S:
        if not spoke and time.monotonic() - began > _SILENT_S:
            spoke = True
            print(f"waiting for another process that fills {path.parent}", file=sys.stderr, flush=True)
        time.sleep(_LOOK_EVERY_S)
    with file or nullcontext():
        yield
