"""Checks of a data file with the tokenizer of a run: the range of its token ids, and the tokenizer that wrote it.

Data of another tokenizer is mostly found by its largest id, which is computed once and cached.

`PREFIX.tokenizer.json` is the record of the tokenizer that wrote a dataset: under another vocabulary the same ids are
another text, and a model trains on it without an error. Tokenizers are compared by the text of the first ids, not by
their names: GPT-2's encoding is the same from its own two files and from a `tokenizer.json`, and a tokenizer with more
special tokens still fits. Datasets of Megatron have no record, and are read as they are.
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.data.file_arrays import FileColumn, IndexCache
from megatron_terapipe.data.indexed_dataset import IndexedDataset, data_file
from megatron_terapipe.data.tokenizer import NullTokenizer, Tokenizer
from megatron_terapipe.errors import DataError

_TOKENS_AT_ONCE = 1 << 24
_KEPT_FROM = 1 << 20
"""Bytes of a data file from which its range is kept: a smaller one is read in a millisecond."""
_READERS = 8
"""Threads that wait for the disk, as file systems of clusters serve many at once."""
_SILENT_S, _SPEAKS_EVERY_S = 5.0, 10.0
"""Seconds before the first line of progress, and between lines."""


def check_token_ids(prefixes: Iterable[str], tokenizer: Tokenizer, cache: IndexCache) -> None:
    """Check that the ids of data files are ids of the tokenizer."""
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
    """Return the smallest and the largest token id of a data file, or 0 where none is below or above it."""
    path = data_file(prefix).resolve()
    state = path.stat()
    if state.st_size < _KEPT_FROM:
        tokens = IndexedDataset(prefix).tokens[:]
        return int(tokens.min(initial=0)), int(tokens.max(initial=0))
    # A copy may keep the time of writing, but not that of the last change of the file.
    times = {"written_ns": state.st_mtime_ns, "changed_ns": state.st_ctime_ns}
    description = {"range of token ids of": str(path), "bytes": state.st_size, **times}
    read = cache.get(description, ("range",), lambda: {"range": _range(IndexedDataset(prefix).tokens, path.name)})
    return int(read["range"][0]), int(read["range"][1])


def _first_outside(tokens: FileColumn, vocab_size: int) -> tuple[int, int]:
    """Return the byte of the first id that is not in a vocabulary, and the id."""
    for first, piece in tokens.pieces():
        for index in np.flatnonzero((piece < 0) | (piece >= vocab_size))[:1].tolist():
            return tokens.byte_of(first + index), int(piece[index])
    raise DataError("the token ids change while they are read: end the process that writes the data, and start again")


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


_IDS_COMPARED = 4096


def record_file(prefix: str | Path) -> Path:
    """Return the file of the record, `PREFIX.tokenizer.json`."""
    return Path(f"{prefix}.tokenizer.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerRecord:
    """Facts of the tokenizer that wrote a dataset."""

    tokenizer: str
    vocab_size: int
    eod: int | None
    """Id that ends the documents; None if they have no end."""
    num_bytes: int
    """Size of the data file."""
    first_ids: str
    """Hash of its first ids; with the size it shows that the record is of this data."""
    first_text: str | None
    """Hash of the text of these ids; None if they have none."""
    sha256: str
    """Hash of the data file."""

    @classmethod
    def of(cls, prefix: str | Path, tokenizer: Tokenizer, sha256: str, *, ends: bool) -> Self:
        """Return the record of a dataset that was just written."""
        ids = _first_ids(prefix)
        eod = tokenizer.eod if ends else None
        return cls(
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eod=eod,
            num_bytes=data_file(prefix).stat().st_size,
            first_ids=_hash_of_ids(ids),
            first_text=_hash_of_text(ids, eod, tokenizer),
            sha256=sha256,
        )

    def write(self, prefix: str | Path) -> None:
        """Write the record into the folder of its dataset."""
        path = record_file(prefix)
        partial = Path(f"{path}.partial")
        write_text(partial, json.dumps(asdict(self), indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, prefix: str | Path) -> Self | None:
        """Read the record of a dataset; None if it has none."""
        path = record_file(prefix)
        if not path.is_file():
            return None
        found = read_json(str(path), "")
        if not isinstance(found, dict) or not _is_record(found):
            raise DataError(f"{path} is not a record of a tokenizer: remove it, or preprocess the texts again")
        return cls(**found)

    def matches(self, prefix: str | Path) -> bool:
        """Whether a dataset has this size and these first ids, and is not other data of its name."""
        return (self.num_bytes, self.first_ids) == (data_file(prefix).stat().st_size, _hash_of_ids(_first_ids(prefix)))

    def check(self, prefix: str | Path, tokenizer: Tokenizer, *, reads_ends: bool) -> None:
        """Check that the ids of the dataset have the same text under a tokenizer.

        `NullTokenizer` has no text, so texts are not compared where it wrote the data or reads it.
        """
        written = f"{data_file(prefix)} was tokenized with {self.tokenizer} of {self.vocab_size} ids"
        remedy = f"give the tokenizer of the data, or preprocess the texts again ({record_file(prefix)} has the record)"
        of_text = NullTokenizer.name not in (self.tokenizer, tokenizer.name)
        if of_text and self.first_text != _hash_of_text(_first_ids(prefix), self.eod, tokenizer):
            raise DataError(
                f"{written}, which are another text to --tokenizer-type {tokenizer.name} of {tokenizer.vocab_size} "
                f"ids: {remedy}"
            )
        if (of_text or reads_ends) and self.eod not in (None, tokenizer.eod):
            raise DataError(
                f"{written} and its documents end with {self.eod}, but with {tokenizer.eod} by --tokenizer-type "
                f"{tokenizer.name}: {remedy}"
            )


def check_tokenizer_records(
    prefixes: Iterable[str], tokenizer: Tokenizer, *, reads_ends: bool, verifies: bool = False
) -> None:
    """Check all datasets that have a record of their tokenizer; `verifies` also compares files with their hashes."""
    for prefix in prefixes:
        record, data = TokenizerRecord.read(prefix), data_file(prefix)
        if verifies and record is None:
            print(f"warning: {data} was not verified: preprocess has written no hash of it", file=sys.stderr)
        elif verifies and record is not None and record.sha256 != _hash_of_file(data):
            raise DataError(
                f"{data} is damaged: its SHA-256 is not the one in {record_file(prefix)}: put both files back, or "
                "preprocess the texts again"
            )
        if record is not None and record.matches(prefix):
            record.check(prefix, tokenizer, reads_ends=reads_ends)
        elif record is not None:
            line = f"{record_file(prefix)} is not of this {data}, so the tokenizer was not checked: remove it"
            print(f"warning: {line}", file=sys.stderr)


def _is_record(found: dict[str, Any]) -> bool:
    types = {"vocab_size": int, "num_bytes": int, "eod": int | None, "first_text": str | None}
    return found.keys() == {each.name for each in fields(TokenizerRecord)} and all(
        isinstance(value, types.get(name, str)) and not isinstance(value, bool) for name, value in found.items()
    )


def _first_ids(prefix: str | Path) -> NDArray[np.int64]:
    tokens = IndexedDataset(prefix).tokens
    return np.asarray(tokens[: min(_IDS_COMPARED, len(tokens))], dtype="<i8")


def _hash_of_ids(ids: NDArray[np.int64]) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of_text(ids: NDArray[np.int64], eod: int | None, tokenizer: Tokenizer) -> str | None:
    """Return the hash of the text of ids under a tokenizer; None if they have none.

    Ends of documents have no text. Blanks and replacement characters do not count: packages differ in both.
    """
    try:
        text = tokenizer.decode([token for token in ids.tolist() if token != eod])
    except DataError:
        return None
    letters = "".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split())
    return hashlib.sha256(letters.encode("utf-8", errors="replace")).hexdigest()
