"""A parser under fuzzing, and the check of its result for an input."""

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepspeed_ext.plan.errors import MOST_CHARACTERS, UserError
from tests.faults.fuzzing.limits import LimitBroken, limited


@dataclass(frozen=True, kw_only=True)
class Target:
    """A parser."""

    name: str
    """Its name in the table."""
    read: Callable[[bytes, Path], object]
    """Reads bytes; files that it needs go into the folder, which is empty. It may raise only `UserError`."""
    seeds: tuple[bytes, ...]
    """Real inputs. All of them are read without an error."""
    found: tuple[bytes, ...] = ()
    """Inputs that once broke it."""
    words: tuple[bytes, ...] = ()
    """Words of its language, beside those of the seeds."""
    seconds: float = 5.0


def in_file(name: str, read: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    """Return a function that reads bytes as a file of this name."""

    def read_bytes(data: bytes, folder: Path) -> object:
        (folder / name).write_bytes(data)
        return read(str(folder / name))

    return read_bytes


def as_json(document: object) -> bytes:
    """Return a document as the bytes of a file."""
    return json.dumps(document).encode()


@dataclass(frozen=True)
class Fault:
    """A promise that a parser broke."""

    kind: str
    """Its effect, without details of the input: faults of one kind count as one."""
    detail: str
    """More of it, for people."""


def fault_of(target: Target, data: bytes, folder: Path) -> Fault | None:
    """Return the promise that a parser breaks on an input; None if it keeps all.

    Args:
        folder: a folder for its files, the only one where it may write; empty.
    """
    try:
        with limited(target.seconds, folder):
            target.read(data, folder)
    except UserError as error:
        return _fault_of_line(str(error))
    except LimitBroken as error:
        return Fault(f"{error.rule} ({_place(error)})", str(error))
    except (Exception, SystemExit) as error:
        return Fault(f"{type(error).__name__} ({_place(error)})", str(error)[:500])
    finally:
        _empty(folder)
    return None


def _fault_of_line(line: str) -> Fault | None:
    if not line.isprintable():
        return Fault("a message of several lines, or one that cannot be printed", repr(line))
    if len(line) > 2 * MOST_CHARACTERS:
        return Fault("a message without end", line)
    return None


def _place(error: BaseException) -> str:
    """Return where an error was raised, in our code if it went through it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tests/faults/" not in frame.filename and _is_ours(frame.filename)]
    last = (ours or list(frames))[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"


def _is_ours(filename: str) -> bool:
    return "megatron_terapipe" in filename or "deepspeed_ext" in filename


def _empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
