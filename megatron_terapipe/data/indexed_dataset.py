"""Megatron's indexed dataset: token ids in `PREFIX.bin`, and the index of sequences and documents in `PREFIX.idx`.

The index, little endian throughout, S sequences, D documents:

    magic 9 bytes | version uint64 = 1 | dtype code uint8 | S uint64 | D + 1 uint64
    | lengths int32 [S] | byte offsets int64 [S] | document bounds int64 [D + 1]
"""

import glob
import hashlib
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.text_files import open_locked
from megatron_terapipe.data.file_arrays import FileColumn, ReadFile
from megatron_terapipe.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, type[np.number[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_READ_BYTES = 1 << 24
_LONGEST = 2**31 - 1
_REMEDY = "write the dataset again with megatron_terapipe.data.preprocess"


def data_file(prefix: str | Path) -> Path:
    """Return the file of the token ids, `PREFIX.bin`."""
    return Path(f"{prefix}.bin")


def index_file(prefix: str | Path) -> Path:
    """Return the file of the index, `PREFIX.idx`."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the type of the ids on disk, chosen as Megatron does."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDatasetWriter:
    """Writes a dataset document by document; it appears under its name only when complete.

    Example:
        >>> with IndexedDatasetWriter("corpus_text_document", vocab_size=50257) as writer:
        ...     writer.add_document([15496, 995, 50256])

    An exception inside the block removes the partial files, and leaves an older dataset of that name unchanged.

    Args:
        vocab_size: every id is below it; decides the type of the ids.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self._files = {data_file(prefix): Path(f"{prefix}.bin.partial")}
        self._files[index_file(prefix)] = Path(f"{prefix}.idx.partial")
        self._data_file, self._index_file = self._files
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._lengths = array("i")
        self.num_tokens = 0
        self.hash = hashlib.sha256(usedforsecurity=False)
        """Of the data file."""

    @property
    def num_documents(self) -> int:
        """Number of documents added."""
        return len(self._lengths)

    def __enter__(self) -> Self:
        with _disk_errors(path := self._files[self._data_file]):
            data = open_locked(path)
        if data is None:
            raise DataError(f"{path} is written by another process: wait for its end, or name another --output-prefix")
        data.truncate(0)
        self._data = data
        return self

    def add_document(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Append one document of token ids [length] as one sequence."""
        tokens = np.asarray(ids, dtype=self._dtype)
        if tokens.size > _LONGEST:
            raise DataError(
                f"document {self.num_documents} has {tokens.size} tokens, and the format takes {_LONGEST}: split it"
            )
        content = tokens.tobytes()
        with _disk_errors(self._files[self._data_file]):
            self._data.write(content)
        self.hash.update(content)
        self._lengths.append(tokens.size)
        self.num_tokens += tokens.size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException:
            self._remove()
            raise
        if kind is not None:
            self._remove()
        self._close()

    def _finish(self) -> None:
        """Give both files their names."""
        partial = self._files[self._data_file]
        with _disk_errors(partial):
            self._data.flush()
            os.fsync(self._data.fileno())
        partial = self._files[self._index_file]
        with _disk_errors(partial):
            self._write_index(partial)
        # Without an index there is no dataset, so at no moment does a whole pair of files mix
        # the ids of this run with the index of an older one.
        with _disk_errors(self._index_file):
            self._index_file.unlink(missing_ok=True)
            for final, partial in self._files.items():
                partial.replace(final)

    def _close(self) -> None:
        with suppress(OSError):  # The error of the write is on its way.
            self._data.close()

    def _remove(self) -> None:
        self._close()
        for partial in self._files.values():
            partial.unlink(missing_ok=True)

    def _write_index(self, path: Path) -> None:
        lengths = np.array(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        offsets = np.concatenate((np.zeros(1, "<i8"), ends[:-1]))[: len(lengths)]
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        codes = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
        with path.open("wb") as index:
            code = codes[self._dtype.newbyteorder("=")]
            index.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(documents)))
            for values in (lengths, offsets, documents):
                index.write(values.tobytes())
            # Whole on the disk before it has its name: the machine may lose power.
            index.flush()
            os.fsync(index.fileno())


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Let errors of the disk name the file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror}): make room, or name another --output-prefix"
        ) from None


def _suggestion(prefix: Path) -> str:
    """Return the remedy for a prefix without a dataset: a similar name in its folder, if there is one."""
    without_suffix = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
    similar = sorted(prefix.parent.glob(f"{glob.escape(prefix.name)}_*_document.idx"))
    for each in (without_suffix, *(path.with_suffix("") for path in similar)):
        if index_file(each).is_file() and data_file(each).is_file():
            return f"did you mean {each}?"
    return "--data-path takes the path without .bin and .idx, for example corpus_text_document"


class IndexedDataset:
    """Reads a dataset run by run: opening reads and checks its index, and costs no read of the ids."""

    def __init__(self, prefix: str | Path, *, warm_up: bool = False) -> None:
        """Open the pair of files and check that they are whole and belong together.

        Args:
            warm_up: read the ids once, so that the operating system has them in memory.
        """
        self.prefix = str(prefix)
        missing = [path for path in (data_file(prefix), index_file(prefix)) if not path.is_file()]
        if missing:
            remedy = "both files belong together, so copy it, too" if len(missing) == 1 else _suggestion(Path(prefix))
            raise DataError(f"no indexed dataset at {prefix}: {' and '.join(map(str, missing))} not found: {remedy}")
        data = ReadFile(data_file(prefix))
        self.dtype = self._open_index(ReadFile(index_file(prefix)))
        self._check_index(index_file(prefix), data)
        self.tokens = FileColumn(data, self.dtype, 0, data.size // self.dtype.itemsize)
        """All ids of the file, of the type on disk, [tokens]."""
        if warm_up:
            with data_file(prefix).open("rb", buffering=0) as file:
                while file.read(_READ_BYTES):
                    pass

    def _open_index(self, index: ReadFile) -> np.dtype[np.number[Any]]:
        """Find the columns of the index, and return the type of the ids."""
        path, size = index.path, index.size
        if size < _HEADER.size:
            raise DataError(f"{path} is truncated: {size} bytes, and its header has {_HEADER.size}: {_REMEDY}")
        magic, version, code, sequences, bounds = _HEADER.unpack(index.read(0, _HEADER.size))
        if magic != _MAGIC:
            raise DataError(
                f"{path} is not an index of Megatron's: it begins with {magic!r}, not {_MAGIC!r}: {_REMEDY}"
            )
        if version != _VERSION:
            raise DataError(f"{path} has format version {version}, and only {_VERSION} is known: {_REMEDY}")
        if code not in _DTYPES:
            raise DataError(f"{path} has token type code {code}, not one of {sorted(_DTYPES)}: {_REMEDY}")
        expected = _HEADER.size + 12 * sequences + 8 * bounds
        if size != expected:
            raise DataError(
                f"{path} is {'truncated' if size < expected else 'overlong'}: {size} bytes, and "
                f"{sequences} sequences and {bounds} document bounds take {expected}: {_REMEDY}"
            )
        self.sequence_lengths = FileColumn(index, "<i4", _HEADER.size, sequences)
        """Tokens of each sequence, int32 [sequences]."""
        self._offsets = FileColumn(index, "<i8", _HEADER.size + 4 * sequences, sequences)
        self.document_indices = FileColumn(index, "<i8", _HEADER.size + 12 * sequences, bounds)
        """First sequence of each document, then the number of sequences, int64 [documents + 1]."""
        return np.dtype(_DTYPES[code]).newbyteorder("<")

    def _check_index(self, path: Path, data: ReadFile) -> None:
        """Check every number of the index: sequences follow one another and fill the data; documents cover them."""
        end = 0  # of the sequences before, in bytes
        for first, lengths in self.sequence_lengths.pieces():
            for wrong in np.flatnonzero(lengths < 0)[:1].tolist():
                number = first + wrong
                raise DataError(
                    f"{path} is damaged at byte {self.sequence_lengths.byte_of(number)}: sequence {number} has "
                    f"{lengths[wrong]} tokens: {_REMEDY}"
                )
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            begins = ends - lengths * np.int64(self.dtype.itemsize)
            offsets = self._offsets.read(first, first + len(lengths))
            for wrong in np.flatnonzero(offsets != begins)[:1].tolist():
                number = first + wrong
                raise DataError(
                    f"{path} is damaged at byte {self._offsets.byte_of(number)}: sequence {number} begins at byte "
                    f"{offsets[wrong]} of {data.path}, and the one before it ends at byte {begins[wrong]}: {_REMEDY}"
                )
            end = int(ends[-1])
        if data.size != end:
            raise DataError(
                f"{data.path} is {'truncated' if data.size < end else 'not of its index'}: "
                f"{data.size} bytes, and {path} describes {end}: {_REMEDY}"
            )
        bounds, sequences = self.document_indices, len(self)
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != sequences:
            raise DataError(
                f"{path} is damaged: its document bounds do not run from 0 to its {sequences} sequences: {_REMEDY}"
            )
        before = 0
        for first, piece in bounds.pieces():
            for wrong in np.flatnonzero(np.diff(piece, prepend=before) < 0)[:1].tolist():
                raise DataError(
                    f"{path} is damaged at byte {bounds.byte_of(first + wrong)}: document bound {first + wrong} is "
                    f"{piece[wrong]}, less than the one before it: {_REMEDY}"
                )
            before = int(piece[-1])

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def run(self, sequence: int, offset: int, most: int) -> NDArray[Any]:
        """Return the ids of a sequence from `offset` on, [most or less], of the type on disk; read only."""
        # A sequence ends where the next begins, so that one read finds both.
        offsets = self._offsets.read(sequence, min(sequence + 2, len(self))) // self.dtype.itemsize
        first, end = int(offsets[0]), int(offsets[1]) if len(offsets) > 1 else len(self.tokens)
        if not 0 <= first <= first + offset <= end <= len(self.tokens):
            raise DataError(
                f"{index_file(self.prefix)} has changed since it was opened: sequence {sequence} takes tokens {first} "
                f"to {end} of {len(self.tokens)}, and token {offset} of it is needed: bring back the dataset that "
                "the run began with, and continue from the last checkpoint"
            )
        return self.tokens.read(first + offset, min(first + offset + most, end))

    def first_token(self, sequence: int) -> int:
        """Return where in `tokens` a sequence begins."""
        return int(self._offsets[sequence]) // self.dtype.itemsize
