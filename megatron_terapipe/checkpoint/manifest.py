"""The manifest of a checkpoint: the size and the hash of every other file in it, written last.

The hash is SHA-256, so that `sha256sum` can check a file, too. Where processors have instructions for it, as servers
since 2019 do, it is as fast as a disk.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_ext.plan.text.json_text import parse_json
from megatron_terapipe.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
_BLOCK = 1 << 20
"""Bytes that are read at a time."""


class FileFacts(NamedTuple):
    """What a file must be."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What each file of a checkpoint must be."""

    files: Mapping[str, FileFacts]
    """Facts by the name of the file."""

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read it from a checkpoint's directory.

        Raises:
            CheckpointError: if it is missing or damaged.
        """
        path = directory / MANIFEST_FILE
        try:
            found: Any = parse_json(path.read_text(encoding="utf-8"), MANIFEST_FILE)
            files = {name: FileFacts(int(size), str(sha256)) for name, (size, sha256) in found["files"].items()}
            intact = found["sha256"] == _hash_of(files)
        except FileNotFoundError:
            raise CheckpointError(damage(directory, f"lacks {MANIFEST_FILE}")) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            intact = False
        if not intact:
            raise CheckpointError(damage(directory, f"is damaged: {MANIFEST_FILE} is not what was saved"))
        return cls(files)

    def text(self) -> str:
        """The manifest as the file holds it, with a hash of its own."""
        return json.dumps({"files": self.files, "sha256": _hash_of(self.files)}, indent=1, sort_keys=True) + "\n"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(facts.size for facts in self.files.values())

    def check_sizes(self, directory: Path, names: Iterable[str] | None = None) -> None:
        """See that files are there and have their sizes, without reading them.

        Args:
            names: files to look at, where others may be missing; all, and that there are no others, if left out.

        Raises:
            CheckpointError: naming the first file that is missing, has another size or does not belong there.
        """
        sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
        looked_at = self.files if names is None else [name for name in names if name in self.files]
        for name in sorted(looked_at):
            if name not in sizes:
                raise CheckpointError(damage(directory, f"lacks {name}"))
            if sizes[name] != self.files[name].size:
                fault = f"is damaged: {name} has {sizes[name]} bytes, and {self.files[name].size} were saved"
                raise CheckpointError(damage(directory, fault))
        # Hidden files are those of file systems.
        foreign = sorted(name for name in sizes if name not in {*self.files, MANIFEST_FILE} and name[0] != ".")
        if names is None and foreign:
            raise CheckpointError(
                f"checkpoint {directory} holds {foreign[0]!r}, which was not saved with it: move it elsewhere"
            )

    def check_content(self, directory: Path, names: Iterable[str]) -> None:
        """Read files and see that each is what was saved.

        Raises:
            CheckpointError: naming the first file that is not.
        """
        for name in names:
            try:
                same = facts_of(directory / name) == self.files[name]
            except OSError as error:
                raise CheckpointError(damage(directory, f"is damaged: {name} cannot be read ({error})")) from None
            if not same:
                raise CheckpointError(damage(directory, f"is damaged: {name} is not what was saved"))


def damage(directory: Path, fault: str) -> str:
    """Return the line about a checkpoint that is not whole."""
    return (
        f"checkpoint {directory} {fault}: put the file back, or let {directory.parent / 'latest'} name another "
        "checkpoint, as --load-previous-if-damaged does"
    )


def facts_of(path: Path) -> FileFacts:
    """Return the size and the hash of a file."""
    found, size, block = new_hash(), 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            found.update(block[:read])
            size += read
    return FileFacts(size, found.hexdigest())


def new_hash() -> Any:
    """Return a hash of nothing yet."""
    return hashlib.sha256(usedforsecurity=False)


def _hash_of(files: Mapping[str, FileFacts]) -> str:
    found = new_hash()
    found.update(json.dumps(files, sort_keys=True, separators=(",", ":")).encode())
    return str(found.hexdigest())
