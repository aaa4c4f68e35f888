"""Files that are read at given bytes, and the columns of numbers in them.

Nothing is mapped into memory. Where a mapped file is cut short, the next look at its end is a bus error, which ends the
process and says nothing; a read that comes back short is an error that names the file and the byte. And a read lets the
other threads go on while it waits for the disk, which a look at a mapped page does not.
"""

import os
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron_terapipe.errors import DataError

NUMBERS_AT_ONCE = 1 << 18
"""Numbers of a piece: it stays in the processor's cache while it is checked."""

_FENCE = 1 << 10
"""A search goes to one of every so many numbers first, and then reads the numbers up to the next."""


class ReadFile:
    """An open file, read at given bytes by any number of threads.

    It stays open: a file that is removed or replaced can be read until the last reader is gone.

    Attributes:
        path: its path.
        size: its bytes when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            DataError: it cannot be opened.
        """
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{path} cannot be opened ({error.strerror}): give a file that can be read") from None
        weakref.finalize(self, os.close, self._handle)
        self.size = os.fstat(self._handle).st_size

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes of the file, all that are asked for.

        Raises:
            DataError: the disk fails, or the file has become shorter.
        """
        found = self._read(start, num_bytes)
        while len(found) < num_bytes:  # The operating system may return large reads in parts.
            part = self._read(start + len(found), num_bytes - len(found))
            if not part:
                raise DataError(
                    f"{self.path} ends at byte {os.fstat(self._handle).st_size} now, and had {self.size} bytes when it "
                    f"was opened; bytes {start} to {start + num_bytes} are wanted: bring back the whole file, and go "
                    "on from the last checkpoint"
                )
            found += part
        return found

    def _read(self, start: int, num_bytes: int) -> bytes:
        try:
            return os.pread(self._handle, num_bytes, start)
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read at byte {start} ({error.strerror}): see to its disk, and go on from the "
                "last checkpoint"
            ) from None


class FileColumn:
    """Numbers that lie one after the other in a file, read when they are asked for, [length].

    It is used like an array; what it returns are numbers, and arrays in memory.
    """

    def __init__(self, file: ReadFile, dtype: DTypeLike, start: int, length: int) -> None:
        """Say where the numbers lie; nothing is read.

        Args:
            start: first byte of the first.
        """
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._file, self._start, self._length = file, start, length

    def __len__(self) -> int:
        """Return how many numbers there are."""
        return self._length

    def byte_of(self, index: int) -> int:
        """Return the byte of the file at which a number begins."""
        return self._start + index * self.dtype.itemsize

    def read(self, first: int, end: int) -> NDArray[Any]:
        """Return the numbers [first, end), read only, [end - first].

        Args:
            first: index of the first, at least 0.
            end: index after the last, at most the length.

        Raises:
            DataError: they cannot be read.
        """
        content = self._file.read(self.byte_of(first), (end - first) * self.dtype.itemsize)
        return np.frombuffer(content, self.dtype)

    def __getitem__(self, index: int | slice) -> Any:
        """Return one number, or an array of a run of them.

        Raises:
            IndexError: there is no such number.
            DataError: it cannot be read.
        """
        if isinstance(index, slice):
            first, end, step = index.indices(self._length)
            return self.read(first, max(first, end))[::step] if step > 0 else self.read(0, self._length)[index]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"number {index} of {self._length} in {self._file.path}")
        return self.read(position, position + 1)[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all numbers, for the functions of numpy.

        Args:
            dtype: their type, if it is to be another.
            copy: as numpy has it; they are always read anew.
        """
        return self.read(0, self._length).astype(dtype or self.dtype)

    def tolist(self) -> list[Any]:
        """Return all numbers."""
        numbers: list[Any] = self.read(0, self._length).tolist()
        return numbers

    def pieces(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield all numbers in pieces: the index of the first, and the numbers [`NUMBERS_AT_ONCE` or less]."""
        for first in range(0, self._length, NUMBERS_AT_ONCE):
            yield first, self.read(first, min(first + NUMBERS_AT_ONCE, self._length))

    @cached_property
    def _fences(self) -> NDArray[Any]:
        """Return every `_FENCE`th number."""
        return np.array([self[index] for index in range(0, self._length, _FENCE)], self.dtype)

    def searchsorted(self, value: int, side: Literal["left", "right"] = "left") -> int:
        """Return the index at which a value would keep rising numbers in order, as numpy's function does.

        Args:
            side: whether before or after the numbers that equal it.
        """
        fence = int(self._fences.searchsorted(value, side))
        first = max(0, fence - 1) * _FENCE
        return first + int(self.read(first, min(first + _FENCE, self._length)).searchsorted(value, side))


Numbers = NDArray[Any] | FileColumn
"""Numbers in memory, or in a file."""
