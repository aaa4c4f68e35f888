"""Megatron's indexed dataset: token ids in `PREFIX.bin`, where they lie in `PREFIX.idx`.

The index, little endian throughout, S sequences, D documents:

    magic 9 bytes | version uint64 = 1 | dtype code uint8 | S uint64 | D + 1 uint64
    | lengths int32 [S] | byte offsets int64 [S] | document bounds int64 [D + 1]
"""

import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

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
_REMEDY = "write the dataset again with megatron_terapipe.data.preprocess"


def data_file(prefix: str | Path) -> Path:
    """Return the file of the token ids, `PREFIX.bin`."""
    return Path(f"{prefix}.bin")


def index_file(prefix: str | Path) -> Path:
    """Return the file that says where each sequence lies, `PREFIX.idx`."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the type of the ids on disk, chosen as Megatron does."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDatasetWriter:
    """Writes a dataset document by document; it appears under its name only when complete.

    Example:
        >>> with IndexedDatasetWriter("corpus_text_document", vocab_size=50257) as writer:
        ...     writer.add_document([15496, 995, 50256])

    An exception inside the block removes what was written, and leaves an older dataset of that
    name as it was.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        """Choose the names and the type of the ids; nothing is opened before `__enter__`.

        Args:
            prefix: path of the two files without `.bin` and `.idx`.
            vocab_size: every id is below it.
        """
        self._files = {data_file(prefix): Path(f"{prefix}.bin.partial")}
        self._files[index_file(prefix)] = Path(f"{prefix}.idx.partial")
        self._data_file, self._index_file = self._files
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._lengths = array("i")
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def __enter__(self) -> Self:
        """Open the data file under its temporary name."""
        self._data = self._files[self._data_file].open("wb")
        return self

    def add_document(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Append one document as one sequence.

        Args:
            ids: token ids, [length].

        Raises:
            OverflowError: an id does not fit the type chosen for the vocabulary.
        """
        tokens = np.asarray(ids, dtype=self._dtype)
        self._data.write(tokens.tobytes())
        self._lengths.append(tokens.size)
        self.num_tokens += tokens.size

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give both files their names, or remove them after an exception."""
        self._data.close()
        if kind is not None:
            for partial in self._files.values():
                partial.unlink(missing_ok=True)
            return
        self._write_index(self._files[self._index_file])
        # Without an index there is no dataset, so at no moment does a whole pair of files mix
        # the ids of this run with the index of an older one.
        self._index_file.unlink(missing_ok=True)
        for final, partial in self._files.items():
            partial.replace(final)

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


class IndexedDataset:
    """Reads a dataset through memory maps: opening costs no read of the ids.

    Attributes:
        prefix: path of the two files without `.bin` and `.idx`.
        sequence_lengths: tokens of each sequence, int32 [sequences].
        document_indices: first sequence of each document, then the number of sequences,
            int64 [documents + 1].
    """

    def __init__(self, prefix: str | Path, *, warm_up: bool = False) -> None:
        """Open the pair of files and check that they are whole and belong together.

        Args:
            prefix: path of the two files without `.bin` and `.idx`.
            warm_up: whether to read the ids once, so that the operating system has them in memory.

        Raises:
            DataError: a file is missing, truncated, or not of this format.
        """
        self.prefix = str(prefix)
        missing = [path for path in (data_file(prefix), index_file(prefix)) if not path.is_file()]
        if missing:
            raise DataError(
                f"no indexed dataset at {prefix}: {' and '.join(map(str, missing))} not found "
                f"(looked for {data_file(prefix)} and {index_file(prefix)}): --data-path takes the "
                "path without .bin and .idx, for example corpus_text_document"
            )
        dtype = self._open_index(index_file(prefix))
        self._open_data(data_file(prefix), dtype)
        if warm_up:
            _read_through(data_file(prefix))

    def _open_index(self, path: Path) -> np.dtype[np.number[Any]]:
        size = path.stat().st_size
        if size < _HEADER.size:
            raise DataError(f"{path} is truncated: {size} bytes, and its header alone has {_HEADER.size}: {_REMEDY}")
        with path.open("rb") as file:
            magic, version, code, sequences, documents = _HEADER.unpack(file.read(_HEADER.size))
        if magic != _MAGIC:
            raise DataError(f"{path} is no index of Megatron's: it begins with {magic!r}, not {_MAGIC!r}: {_REMEDY}")
        if version != _VERSION:
            raise DataError(f"{path} has format version {version}, and only {_VERSION} is known: {_REMEDY}")
        if code not in _DTYPES:
            raise DataError(f"{path} has token type code {code}, not one of {sorted(_DTYPES)}: {_REMEDY}")
        expected = _HEADER.size + 12 * sequences + 8 * documents
        if size != expected:
            raise DataError(
                f"{path} is {'truncated' if size < expected else 'overlong'}: {size} bytes, and "
                f"{sequences} sequences and {documents} document bounds take {expected}: {_REMEDY}"
            )

        def column(dtype: str, start: int, count: int) -> NDArray[Any]:
            return np.memmap(path, dtype, "r", start, (count,)) if count else np.empty(0, dtype)

        self.sequence_lengths: NDArray[np.int32] = column("<i4", _HEADER.size, sequences)
        self._offsets: NDArray[np.int64] = column("<i8", _HEADER.size + 4 * sequences, sequences)
        self.document_indices: NDArray[np.int64] = column("<i8", _HEADER.size + 12 * sequences, documents)
        if not documents or self.document_indices[0] != 0 or self.document_indices[-1] != sequences:
            raise DataError(
                f"{path} is damaged: its document bounds do not run from 0 to its {sequences} sequences: {_REMEDY}"
            )
        return np.dtype(_DTYPES[code]).newbyteorder("<")

    def _open_data(self, path: Path, dtype: np.dtype[np.number[Any]]) -> None:
        size = path.stat().st_size
        expected = 0
        if len(self):
            expected = int(self._offsets[-1]) + int(self.sequence_lengths[-1]) * dtype.itemsize
        if size != expected:
            raise DataError(
                f"{path} is {'truncated' if size < expected else 'not of its index'}: "
                f"{size} bytes, and {index_file(self.prefix)} describes {expected}: {_REMEDY}"
            )
        self._tokens: NDArray[Any] = np.memmap(path, dtype, "r") if size else np.empty(0, dtype)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    @property
    def tokens(self) -> NDArray[Any]:
        """All ids of the file, of the type on disk, [tokens]; read only, mapped from disk."""
        return self._tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the ids on disk."""
        return self._tokens.dtype

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return a run of one sequence's ids, as a view of the file.

        Args:
            sequence: number of the sequence.
            offset: first token of the run.
            length: tokens of the run; None for all that follow `offset`.

        Returns:
            Token ids of the type on disk, [length]; read only.

        Raises:
            IndexError: the run is not inside the sequence.
        """
        available = int(self.sequence_lengths[sequence]) - offset
        if length is None:
            length = available
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(
                f"tokens [{offset}, {offset + length}) are not inside sequence {sequence} of "
                f"{self.sequence_lengths[sequence]} tokens"
            )
        start = int(self._offsets[sequence]) // self._tokens.itemsize + offset
        return self._tokens[start : start + length]


def _read_through(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(_READ_BYTES):
            pass
