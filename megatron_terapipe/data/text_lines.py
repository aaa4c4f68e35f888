"""Lines of a text file, compressed or not, in runs worth a task."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from megatron_terapipe.errors import DataError, not_installed

_RUN_BYTES = 1 << 17  # enough work per task that handing it over costs nothing beside it


@dataclass(frozen=True)
class Lines:
    """Consecutive lines of the input."""

    first: int
    """Number of the first, from 1."""
    lines: list[bytes]
    """UTF-8, with their line ends."""
    file_position: int
    """Bytes of the file read so far, as they lie on disk."""


def read_lines(path: Path) -> Iterator[Lines]:
    """Yield the file's lines in runs of about `_RUN_BYTES`.

    Args:
        path: plain, or compressed where its name ends in `.gz` or `.zst`.

    Raises:
        DataError: the file cannot be read, or what decompresses it is not installed.
    """
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            file = stack.enter_context(_decompressed(path, raw))
            first = 1
            while lines := file.readlines(_RUN_BYTES):
                yield Lines(first, lines, raw.tell())
                first += len(lines)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"cannot read --input {path} ({reason}): give a file of JSON lines, plain, .gz or .zst"
        ) from None


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        return cast("IO[bytes]", io.BufferedReader(_ZstandardFile(path, raw), _RUN_BYTES))
    return raw


class _ZstandardFile(io.RawIOBase):
    """Reader of a file of Zstandard frames; the package's own reader takes a truncated file for a whole one."""

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        """Begin at the first frame.

        Raises:
            DataError: the package is not installed.
        """
        try:
            import zstandard
        except ImportError:
            raise DataError(f"--input {path} needs {not_installed('zstandard')}, or decompress the file") from None
        self._raw = raw
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._in_frame = False
        self._compressed = self._decoded = b""

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer as far as the next bytes go.

        Raises:
            OSError: the file is damaged.
            EOFError: the last frame is cut short.
        """
        while not self._decoded:
            self._compressed = self._compressed or self._raw.read(_RUN_BYTES)
            if not self._compressed:
                if self._in_frame:
                    raise EOFError("it is cut short")
                return 0
            try:
                self._decoded = self._frame.decompress(self._compressed)
            except self._error as error:
                raise OSError(str(error)) from None
            self._compressed, self._in_frame = b"", True
            if self._frame.eof:
                self._compressed, self._in_frame = self._frame.unused_data, False
                self._frame = self._new_frame()
        size = min(len(buffer), len(self._decoded))
        buffer[:size], self._decoded = self._decoded[:size], self._decoded[size:]
        return size
