"""Damage of every kind to a file of a checkpoint, and the words that name it."""

import shutil
from collections.abc import Callable
from pathlib import Path

PAGE = 4096


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _zero(path: Path) -> None:
    """Zero a page, or the second half of a shorter file. No file format detects it in the middle of a matrix."""
    size = path.stat().st_size
    start = size // 2
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(min(PAGE, size - start)))


def _mix(path: Path) -> None:
    """Take the file of that name from another checkpoint, of the same sizes."""
    other = next(each for each in path.parent.parent.glob("global_step*") if each != path.parent)
    shutil.copy(other / path.name, path)


def _rename(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.old"))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "a bit flipped": _flip,
    "a page zeroed": _zero,
    "taken from another checkpoint": _mix,
    "renamed": _rename,
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b"") and None,
}
"""Functions that damage a file."""


def kinds_of_file(directory: Path) -> dict[str, Path]:
    """One file of each kind, the last of it."""
    found: dict[str, Path] = {}
    for path in sorted(directory.iterdir()):
        found[path.name.split("_")[0].removesuffix(".json")] = path
    return found
