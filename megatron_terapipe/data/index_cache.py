"""Arrays that follow from a description, kept on disk for the next run and the other ranks of this one."""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.file_modes import permit_as_new
from megatron_terapipe.errors import DataError

Arrays = Mapping[str, NDArray[Any]]


class IndexCache:
    """A directory of arrays, each under the hash of all that decides it.

    Files get their names only when they are whole, and the list of an entry's arrays comes last: so an entry is there
    or not, whenever a process died. Of the processes of a host that want the same entry one computes it and the
    others wait; where the file system has no locks, each computes it, and all write the same.
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

    def get(self, description: Mapping[str, object], compute: Callable[[], Arrays]) -> Arrays:
        """Return the arrays [...] that a description stands for, read only, mapped from disk if they are kept.

        Args:
            description: all that decides the arrays, of types that JSON has.
            compute: makes them.

        Raises:
            DataError: the directory cannot be written, and must be.
        """
        if self._folder is None:
            return compute()
        key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
        found = _load(self._folder, key, description)
        if found is not None:
            return found
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
            if not self._required:
                return compute()
            raise DataError(
                f"--data-cache-path {self._folder} cannot be written ({error.strerror}): name another, or leave it out"
            ) from None
        # None, if somebody clears the directory just now.
        return computed if found is None else found


def _load(folder: Path, key: str, description: Mapping[str, object]) -> Arrays | None:
    """Return an entry; None if it is not there, or not whole."""
    try:
        entry = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        if entry["description"] != description:
            return None
        arrays = {name: _mapped(_file(folder, key, name)) for name in entry["arrays"]}
        whole = all([array.dtype.str, *array.shape] == entry["arrays"][name] for name, array in arrays.items())
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return arrays if whole else None


def _mapped(path: Path) -> NDArray[Any]:
    """Return an array [...] that is read where it lies. One of objects, which would be a pickle, is a ValueError."""
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _store(folder: Path, key: str, description: Mapping[str, object], arrays: Arrays) -> None:
    for name, array in arrays.items():
        with _appearing(_file(folder, key, name)) as partial, partial.open("wb") as file:
            np.save(file, array, allow_pickle=False)
    entry = {
        "description": description,
        "arrays": {name: [array.dtype.str, *array.shape] for name, array in arrays.items()},
    }
    with _appearing(folder / f"{key}.json") as partial:
        partial.write_text(json.dumps(entry), encoding="utf-8")


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
    """Hold what only one process at a time holds; its end, however it ends, lets go."""
    with path.open("ab") as file:
        with suppress(OSError):  # A file system without locks: the work is done more than once, and right.
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
