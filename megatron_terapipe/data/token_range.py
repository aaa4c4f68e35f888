"""The range of the token ids in a data file, held against the tokenizer before anything is trained.

Data that another tokenizer wrote is mostly found by its largest id. It is read once, and kept for the next start.
"""

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_terapipe.data.files.file_columns import FileColumn
from megatron_terapipe.data.files.index_cache import IndexCache
from megatron_terapipe.data.files.indexed_dataset import IndexedDataset, data_file
from megatron_terapipe.data.tokenizer import Tokenizer
from megatron_terapipe.errors import DataError

_TOKENS_AT_ONCE = 1 << 24
_READERS = 8
"""Threads that wait for the disk, as file systems of clusters serve many at once."""
_SILENT_S, _SPEAKS_EVERY_S = 5.0, 10.0
"""Seconds before the first line of progress, and between lines."""


def check_token_ids(prefixes: Iterable[str], tokenizer: Tokenizer, cache: IndexCache) -> None:
    """Check that the ids of data files are ids of the tokenizer.

    Args:
        cache: keeps the range of each file until the file changes.

    Raises:
        DataError: a file has an id that the tokenizer does not have, or the cache cannot be written.
    """
    for prefix in prefixes:
        smallest, largest = token_range(prefix, cache)
        if smallest < 0 or largest >= tokenizer.vocab_size:
            number, token = _first_outside(IndexedDataset(prefix).tokens, tokenizer.vocab_size)
            raise DataError(
                f"{data_file(prefix)} has the token id {token} at byte {number}, and the vocabulary of "
                f"--tokenizer-type {tokenizer.name} has {tokenizer.vocab_size} ids from 0: give the tokenizer that the "
                "data was preprocessed with"
            )


def token_range(prefix: str, cache: IndexCache) -> tuple[int, int]:
    """Return the smallest and the largest token id of a data file, or 0 where none is below or above it.

    Args:
        cache: keeps the answer, under the size of the file and the times at which it was written and changed.
    """
    path = data_file(prefix).resolve()
    state = path.stat()
    # A copy may keep the time of writing; nobody can set that of the last change.
    times = {"written_ns": state.st_mtime_ns, "changed_ns": state.st_ctime_ns}
    description = {"range of token ids of": str(path), "bytes": state.st_size, **times}
    found = cache.get(description, lambda: {"range": _range(IndexedDataset(prefix).tokens, path.name)})["range"]
    return int(found[0]), int(found[1])


def _first_outside(tokens: FileColumn, vocab_size: int) -> tuple[int, int]:
    """Return the byte of the first id that is not in a vocabulary, and the id."""
    for first, piece in tokens.pieces():
        for index in np.flatnonzero((piece < 0) | (piece >= vocab_size))[:1].tolist():
            return tokens.byte_of(first + index), int(piece[index])
    raise DataError("the token ids change while they are read: end what writes the data, and start again")


def _range(tokens: FileColumn, name: str) -> NDArray[np.int64]:
    """Return the smallest and the largest of ids [tokens], read in pieces, several at a time: [2]."""

    def of_piece(start: int) -> tuple[int, int, int]:
        piece = tokens[start : start + _TOKENS_AT_ONCE]
        return int(piece.min()), int(piece.max()), piece.nbytes

    found = np.zeros(2, np.int64)
    progress = tqdm(
        total=len(tokens) * tokens.dtype.itemsize,
        desc=f"checking the token ids of {name}",
        unit="B",
        unit_scale=True,
        delay=_SILENT_S,
        mininterval=_SPEAKS_EVERY_S,
        file=sys.stderr,
    )
    with progress, ThreadPoolExecutor(_READERS) as readers:
        for smallest, largest, num_bytes in readers.map(of_piece, range(0, len(tokens), _TOKENS_AT_ONCE)):
            found[:] = min(found[0], smallest), max(found[1], largest)
            progress.update(num_bytes)
    return found
