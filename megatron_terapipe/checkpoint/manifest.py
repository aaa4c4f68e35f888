"""The manifest of a checkpoint: the size and the hash of every other file in it, written last. Needs no torch.

And the writing of these files: written and synced, with size and hash computed at the same time.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from deepspeed_ext.plan.text_files import bounded_text, parse_json
from megatron_terapipe.checkpoint.model_files import MODEL_FILES
from megatron_terapipe.errors import CheckpointError

MANIFEST_FILE = "manifest.json"


class FileFacts(NamedTuple):
    """Size and hash of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Facts of each file of a checkpoint."""

    files: Mapping[str, FileFacts]

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read it from a checkpoint's directory."""
        path = directory / MANIFEST_FILE
        try:
            found: Any = parse_json(bounded_text(path), MANIFEST_FILE)
            files = {name: FileFacts(int(size), str(sha256)) for name, (size, sha256) in found["files"].items()}
            intact = found["sha256"] == _hash_of(files)
        except FileNotFoundError:
            raise CheckpointError(damage(directory, f"lacks {MANIFEST_FILE}")) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            intact = False
        if not intact:
            raise CheckpointError(damage(directory, f"is damaged: {MANIFEST_FILE} has changed since it was saved"))
        return cls(files)

    def text(self) -> str:
        """Return the content of the file, with a hash of its own."""
        return json.dumps({"files": self.files, "sha256": _hash_of(self.files)}, indent=1, sort_keys=True) + "\n"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(facts.size for facts in self.files.values())

    def check_sizes(self, directory: Path, names: Iterable[str] | None = None) -> None:
        """Check that files exist and have their sizes, without reading them.

        Args:
            names: files to check, if others may be missing; None checks all, and that there are no others.
        """
        paths = (*directory.iterdir(), *(directory / MODEL_FILES).glob("*"))
        sizes = {str(path.relative_to(directory)): path.stat().st_size for path in paths if path.is_file()}
        checked = self.files if names is None else [name for name in names if name in self.files]
        for name in sorted(checked):
            if name not in sizes:
                raise CheckpointError(damage(directory, f"lacks {name}"))
            if sizes[name] != self.files[name].size:
                fault = f"is damaged: {name} has {sizes[name]} bytes, and {self.files[name].size} were saved"
                raise CheckpointError(damage(directory, fault))
        # Hidden files are those of file systems.
        shown = (name for name in sizes if Path(name).name[0] != ".")
        foreign = sorted(name for name in shown if name not in {*self.files, MANIFEST_FILE})
        if names is None and foreign:
            raise CheckpointError(
                f"checkpoint {directory} holds {foreign[0]!r}, which was not saved with it: move it elsewhere"
            )

    def check_content(self, directory: Path, names: Iterable[str]) -> None:
        """Read files and check their sizes and hashes."""
        for name in names:
            try:
                same = facts_of(directory / name) == self.files.get(name)
            except OSError as error:
                raise CheckpointError(damage(directory, f"is damaged: {name} cannot be read ({error})")) from None
            if not same:
                fault = (
                    f"is damaged: {name} has changed since it was saved, or {MANIFEST_FILE} is of another checkpoint"
                )
                raise CheckpointError(damage(directory, fault))


def damage(directory: Path, fault: str) -> str:
    """Return the line about a checkpoint that is not whole."""
    return (
        f"checkpoint {directory} {fault}: put the file back, or let {directory.parent / 'latest'} name another "
        "checkpoint, as --load-previous-if-damaged does"
    )


def facts_of(path: Path) -> FileFacts:
    """Return the size and the hash of a file."""
    with path.open("rb", buffering=0) as file:
        found = hashlib.file_digest(file, new_hash)
        return FileFacts(file.tell(), found.hexdigest())


def new_hash() -> Any:
    """Return a new hash."""
    return hashlib.sha256(usedforsecurity=False)


def _hash_of(files: Mapping[str, FileFacts]) -> str:
    found = new_hash()
    found.update(json.dumps(files, sort_keys=True, separators=(",", ":")).encode())
    return str(found.hexdigest())


ASIDE = ".partial"
"""Ends the name of a file or directory that is not complete."""


class DurableFile:
    """A new file to write to, which is on the disk when it is closed. Its hash is computed while writing.

    An error of a write is raised at the end: the archive writer of torch cannot be interrupted.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: writes are large, and closing then writes no more bytes.
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
        """Do nothing: writes are unbuffered."""

    def __enter__(self) -> "DurableFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it, synced."""
        with self._file:
            if self._fault is not None:
                raise self._fault
            os.fsync(self._file.fileno())

    @property
    def facts(self) -> FileFacts:
        """Size and hash of the written bytes."""
        return FileFacts(self._size, self._hash.hexdigest())


def write_durably(path: Path, content: str | bytes) -> FileFacts:
    """Write a file and sync it; return its size and hash."""
    with DurableFile(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return file.facts


def replace_durably(path: Path, text: str) -> None:
    """Give a file another content: at every moment it has either the whole old or the whole new one."""
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
