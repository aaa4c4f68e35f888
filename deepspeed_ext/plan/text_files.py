"""Files that users name: text with errors in one line, JSON with values that fit into arrays, permissions.

Python's parser takes more than JSON: it reads NaN, it keeps the last of two equal keys, and it makes whole numbers and
half characters that no file and no array can hold. None of this reaches a reader of files.
"""

import ast
import fcntl
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from io import BytesIO, TextIOWrapper
from itertools import pairwise
from math import isfinite, isinf
from pathlib import Path
from select import POLLIN, poll
from time import monotonic
from typing import IO, TypeVar

from deepspeed_ext.plan.errors import PlanError, UserError

_Parsed = TypeVar("_Parsed")


def permit_as_new(path: Path) -> None:
    """Give a file the permissions that a new file in its folder has: those that the user's umask leaves.

    The umask of a process cannot be read without setting it for all threads, so a new file is created to read it.
    """
    import secrets  # It loads hashlib, which takes longer than all else here.

    probe = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        path.chmod(os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        probe.unlink()


def permit_to_run(path: Path) -> None:
    """Let all users that may read a file run it."""
    mode = path.stat().st_mode
    path.chmod(mode & 0o777 | (mode & 0o444) >> 2)


MOST_BYTES = 2**29
"""Bytes of a text file at most: a metrics file of a million iterations."""

_BLOCK = 2**20
"""Bytes that are read at a time."""

LONGEST_READ_S = 60.0
"""Time at most until a pipe ends, such as `<(command)`."""


def bounded_bytes(path: Path | str, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file, or raise an `OSError` or a `ValueError`.

    Args:
        most: bytes of the file at most. Devices and pipes have no size before they are read.
    """
    content, last = BytesIO(), monotonic() + LONGEST_READ_S
    with open(path, "rb", buffering=0, opener=lambda name, mode: os.open(name, mode | os.O_NONBLOCK)) as file:
        readable = poll()
        readable.register(file, POLLIN)
        while max(content.tell(), os.fstat(file.fileno()).st_size) <= most:
            if not readable.poll(1000 * max(0.0, last - monotonic())):
                raise ValueError(f"it has no end after {LONGEST_READ_S:g} s")
            part = file.read(_BLOCK)
            if part == b"":
                return content.getvalue()
            content.write(part or b"")
    raise ValueError(f"it has more than {most:,} bytes")


def bounded_text(path: Path | str, most: int = MOST_BYTES) -> str:
    """Return the text of a file; see `bounded_bytes`."""
    return TextIOWrapper(BytesIO(bounded_bytes(path, most)), encoding="utf-8-sig").read()


def open_locked(path: Path) -> IO[bytes] | None:
    """Open a file to append to, which no other process on any host may open so until it is closed; None if one has.

    The system closes the files of a process that is killed. A file system without locks excludes no process.
    """
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:
            return file
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # The process that had locked it has renamed or removed it meanwhile.


def read_text(path: Path | str, flag: str = "") -> str:
    """Return the text of a file, without the byte order mark that spreadsheets write."""
    try:
        return bounded_text(path)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read ({error.strerror}): give a file that can".lstrip()) from None
    except UnicodeDecodeError as error:
        place = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise UserError(f"{flag} {path} is not UTF-8 text ({place}): fix the file".lstrip()) from None
    except ValueError as error:  # A name that no file can have.
        raise UserError(f"{flag} {path} cannot be read ({error}): give a file that can".lstrip()) from None


def parse_file(path: Path | str, parse: Callable[[str], _Parsed]) -> _Parsed:
    """Parse the text of a file; a `PlanError` names the file."""
    text = read_text(path)
    try:
        return parse(text)
    except PlanError as error:
        raise type(error)(f"{path}: {error}") from None


def write_text(path: Path | str, text: str, flag: str = "", *, make_folder: bool = False) -> None:
    """Write a text file in UTF-8."""
    try:
        if make_folder:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # The latter is a name that no file can have.
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{flag} {path} cannot be written ({reason}): name another file".lstrip()) from None


MOST_LEVELS = 64
"""Levels of nesting at most: readers call themselves for each."""

WHOLE_NUMBERS = 2**63
"""Whole numbers are below this, and above its negative, as in arrays."""

_LEAST_VALUES = 100_000
"""Values that any text may have. A larger document may not have more values than characters."""


def parse_json(text: str, described: str, *, infinite: bool = False, unbounded: bool = False) -> object:
    """Parse JSON text.

    Args:
        infinite: whether numbers may be infinite, as Python writes and reads them.
        unbounded: whether whole numbers may have any size, as Hugging Face writes 10^30 where there is no limit.
    """
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{described} is not JSON ({error}): fix it") from None
    check_values(document, described, len(text), infinite=infinite, unbounded=unbounded)
    return document


def check_values(
    document: object, described: str, num_characters: int, *, infinite: bool = False, unbounded: bool = False
) -> None:
    """Check that a document holds finite numbers and text that can be written, and is not nested too deeply.

    Args:
        num_characters: characters of the text. Where it refers to its own parts, as YAML may, it can have many
            more values.
    """
    level, counted = [document], 0
    for _ in range(MOST_LEVELS):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list | tuple | set):
                below += value
            elif fault := _fault(value, infinite, unbounded):
                raise PlanError(f"{described} {fault}")
            counted += 1
            if counted > max(num_characters, _LEAST_VALUES):
                raise PlanError(f"{described} refers to its own parts again and again: write the values out")
        if not below:
            return
        level = below
    raise PlanError(f"{described} is nested more than {MOST_LEVELS} levels deep: make it flatter")


def _fault(value: object, infinite: bool, unbounded: bool) -> str | None:
    """Return the fault of a number or a text, and the remedy; None for a correct value."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"contains {value}, which is half a character: write the text again"
    elif isinstance(value, float) and not isfinite(value) and not (infinite and isinf(value)):
        return f"contains the number {value}, or one too large for a float: give a finite number"
    elif isinstance(value, int) and not unbounded and not -WHOLE_NUMBERS < value < WHOLE_NUMBERS:
        return f"contains a whole number of {len(str(abs(value)))} digits: give one below 2^63, or write it as 1e30"
    return None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {repeated!r} appears twice")
    return document


@cache
def _classes(path: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module, by name."""
    module = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {each.name: each for each in module.body if isinstance(each, ast.ClassDef)}


def field_texts(kind: type) -> dict[str, str]:
    """Return the string below each field of a dataclass, on one line, by the name of the field; of its bases, too."""
    return {
        field.target.id: " ".join(text.value.value.split())
        for each in filter(is_dataclass, reversed(kind.__mro__))
        for field, text in pairwise(_classes(str(sys.modules[each.__module__].__file__))[each.__name__].body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
