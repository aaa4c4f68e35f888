"""Samples of equal length out of documents of any length, in Megatron's construction.

`draw_order` draws the order of documents and of samples; `GPTDataset` reads the samples in it.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_terapipe.data.file_arrays import Arrays, IndexCache
from megatron_terapipe.data.indexed_dataset import IndexedDataset, data_file
from megatron_terapipe.errors import DataError

_SECONDS_UNTIL_PROGRESS = 2.0


def draw_order(
    lengths: NDArray[np.int32], documents: range, seq_length: int, epochs: int, seed: int, *, show_progress: bool
) -> Arrays:
    """Draw the shuffles of some epochs: the arrays of a `GPTDataset`, by their names there.

    One epoch comes in exactly Megatron's order for the same seed. Further epochs are shuffled one by one, where
    Megatron shuffles them together: so every epoch visits each token once, and a longer run begins with the samples of
    a shorter one.

    Args:
        lengths: tokens of each of the documents, int32 [documents].
    """
    tokens = int(lengths.sum(dtype=np.int64))
    document_index = np.empty((epochs, len(documents)), np.int32)
    shuffle_index = np.empty((epochs * tokens - 1) // seq_length, np.int64)
    numbers = tqdm(
        range(epochs),
        desc="shuffle",
        unit="epoch",
        delay=_SECONDS_UNTIL_PROGRESS,
        disable=None if show_progress else True,  # None: silent without a terminal
    )
    for epoch in numbers:
        # The first epoch takes the plain seed, because that is Megatron's order.
        random = np.random.RandomState([seed, epoch] if epoch else seed)
        document_index[epoch] = np.arange(documents.start, documents.stop)
        random.shuffle(document_index[epoch])
        # A sample belongs to the epoch in which it ends.
        first, end = (max(0, (e * tokens - 1) // seq_length) for e in (epoch, epoch + 1))
        shuffle_index[first:end] = np.arange(first, end)
        random.shuffle(shuffle_index[first:end])
    stream_starts = np.zeros(document_index.size + 1, np.int64)
    np.cumsum(lengths[document_index.reshape(-1) - documents.start], dtype=np.int64, out=stream_starts[1:])
    return {
        "document_index": document_index.reshape(-1),
        "shuffle_index": shuffle_index,
        "stream_starts": stream_starts,
    }


_DOCUMENTS_AT_ONCE = 32
"""Entries of the order that are read at once."""


class GPTDataset:
    """Samples of `seq_length + 1` tokens from a range of documents, in the order of `draw_order`."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        *,
        seq_length: int,
        num_samples: int,
        seed: int,
        vocab_size: int | None = None,
        cache: IndexCache | None = None,
    ) -> None:
        """Draw the order of documents and of samples, of as many epochs as the samples need.

        Args:
            indexed: the token ids; a document is one of its sequences, as Megatron takes it.
            vocab_size: every id is below it, which is checked whenever a sample is read; None for any id.
            cache: stores the order; None: it is computed.
        """
        tokens = checked_tokens(indexed, documents, seq_length=seq_length)
        lengths = indexed.sequence_lengths[documents.start : documents.stop]
        epochs, cache = -(-(num_samples * seq_length + 1) // tokens), cache or IndexCache(None)
        self.seq_length = seq_length
        self._indexed, self._num_samples, self._vocab_size = indexed, num_samples, vocab_size
        description = {
            "kind": "order of documents and samples, version 1",
            "lengths": hashlib.sha256(np.ascontiguousarray(lengths, "<i4").data).hexdigest() if cache.keeps else "",
            "documents": [documents.start, documents.stop],
            "seq_length": seq_length,
            "epochs": epochs,
            "seed": seed,
        }
        order = cache.get(
            description,
            lambda: draw_order(lengths, documents, seq_length, epochs, seed, show_progress=cache.keeps),
        )
        self.document_index = order["document_index"]
        """Documents in the order of the stream, int32 [epochs * documents]."""
        self.shuffle_index = order["shuffle_index"]
        """The sample of the stream for each sample, and those left of the last epoch, int64 [samples or more]."""
        self._stream_starts = order["stream_starts"]
        """Tokens of the stream before each document, and before its end, int64 [epochs * documents + 1].

        Megatron stores the first token of each sample; a binary search here needs no such index.
        """

    def __len__(self) -> int:
        return self._num_samples

    def locate(self, stream_sample: int) -> tuple[int, int]:
        """Return where a sample of the stream begins: a position in `document_index`, and a token of that document."""
        token = stream_sample * self.seq_length
        position = int(self._stream_starts.searchsorted(token, side="right")) - 1
        return position, token - int(self._stream_starts[position])

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return the token ids of one sample, int64 [seq_length + 1]."""
        tokens = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        for _, _, ids in self._runs(sample):
            tokens[filled : filled + len(ids)] = ids
            filled += len(ids)
        # Negative ids are large ones as uint64.
        if self._vocab_size is not None and int(tokens.view(np.uint64).max()) >= self._vocab_size:
            raise self._wrong_id(sample)
        return tokens

    def _runs(self, sample: int) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """Yield the parts of a sample: document, first token in it, ids [tokens of the part]."""
        if not 0 <= sample < self._num_samples:
            raise IndexError(f"sample {sample} of {self._num_samples}")
        position, offset = self.locate(int(self.shuffle_index[sample]))
        missing = self.seq_length + 1
        while missing:
            documents = self.document_index[max(0, position) : position + _DOCUMENTS_AT_ONCE].tolist()
            if not documents:
                raise DataError(
                    f"the order of the samples of {self._indexed.prefix} has changed since the start, and sample "
                    f"{sample} is outside: remove the folder of --data-cache-path, and continue from the "
                    "last checkpoint"
                )
            for document in documents:
                ids = self._indexed.run(document, offset, missing)
                yield document, offset, ids
                missing -= len(ids)
                if not missing:
                    return
                offset = 0
            position += _DOCUMENTS_AT_ONCE

    def _wrong_id(self, sample: int) -> DataError:
        for document, offset, ids in self._runs(sample):
            for number in np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[:1].tolist():
                token = self._indexed.first_token(document) + offset + number
                return DataError(
                    f"{data_file(self._indexed.prefix)} has the token id {ids[number]} at byte "
                    f"{self._indexed.tokens.byte_of(token)} (document {document}), and the vocabulary has "
                    f"{self._vocab_size} ids from 0: bring back the file that the run began with, and continue from "
                    "the last checkpoint"
                )
        return DataError(f"{data_file(self._indexed.prefix)} changes while it is read: end the process that writes it")


def checked_tokens(indexed: IndexedDataset, documents: range, *, seq_length: int) -> int:
    """Return the number of tokens of the documents; refuse fewer than one sample takes."""
    tokens = int(indexed.sequence_lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens < seq_length + 1:
        raise DataError(
            f"documents [{documents.start}, {documents.stop}) of {indexed.prefix} hold "
            f"{tokens} tokens and one sample takes seq_length + 1 = {seq_length + 1}: shorten "
            "--seq-length, give this part of --split more documents, or add text"
        )
    return tokens


def samples_in_epochs(indexed: IndexedDataset, documents: range, *, seq_length: int, epochs: int) -> int:
    """Return the number of whole samples that some epochs of the documents hold."""
    tokens = int(indexed.sequence_lengths[documents.start : documents.stop].sum(dtype=np.int64))
    return max(0, (epochs * tokens - 1) // seq_length)
