"""Samples of equal length out of documents of any length, in Megatron's construction.

The documents of one epoch, shuffled, are one long stream of tokens; epochs follow one another.
Sample s is the tokens [s * seq_length, (s + 1) * seq_length] of the stream, both ends included: the
last token of a sample is the first of the next, once as a label and once as an input. The samples
are then shuffled within their epoch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.data.index_cache import IndexCache
from megatron_terapipe.data.indexed_dataset import IndexedDataset
from megatron_terapipe.data.sample_order import SampleOrder
from megatron_terapipe.errors import DataError


class GPTDataset:
    """Samples of `seq_length + 1` tokens from a range of documents, in the order of a `SampleOrder`.

    Attributes:
        document_index: documents in the order of the stream, int32 [epochs * documents].
        shuffle_index: the stream's sample behind each sample, int64 [samples].
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        *,
        seq_length: int,
        num_samples: int,
        seed: int,
        cache: IndexCache | None = None,
    ) -> None:
        """Draw the order of documents and of samples.

        Args:
            indexed: the token ids; a document is one of its sequences, as Megatron takes it.
            documents: numbers of the documents.
            seq_length: tokens the model sees per sample.
            num_samples: number of samples; as many epochs as they need.
            seed: seed of every shuffle, in [0, 2**32).
            cache: keeps the order; None keeps nothing.

        Raises:
            DataError: the documents together are shorter than one sample, or the cache cannot be written.
        """
        tokens = checked_tokens(indexed, documents, seq_length=seq_length)
        lengths = indexed.sequence_lengths[documents.start : documents.stop]
        self.seq_length = seq_length
        self._indexed = indexed
        order = SampleOrder.draw(
            lengths,
            documents,
            seq_length=seq_length,
            epochs=-(-(num_samples * seq_length + 1) // tokens),
            seed=seed,
            cache=cache or IndexCache(None),
        )
        self.document_index = order.document_index
        self.shuffle_index = order.shuffle_index[:num_samples]
        self._stream_starts = order.stream_starts

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.shuffle_index)

    def locate(self, stream_sample: NDArray[Any] | int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return where samples of the stream begin.

        Args:
            stream_sample: numbers of samples before the shuffle, [...].

        Returns:
            Position in `document_index` and offset into that document, each [...].
        """
        token = np.asarray(stream_sample, np.int64) * self.seq_length
        position = np.searchsorted(self._stream_starts, token, side="right") - 1
        return position, token - self._stream_starts[position]

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return the token ids of one sample, int64 [seq_length + 1]."""
        position, offset = (int(part) for part in self.locate(int(self.shuffle_index[sample])))
        tokens = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        while filled < len(tokens):
            document = int(self.document_index[position])
            available = int(self._indexed.sequence_lengths[document]) - offset
            length = min(available, len(tokens) - filled)
            tokens[filled : filled + length] = self._indexed.get(document, offset, length)
            filled += length
            position, offset = position + 1, 0
        return tokens


def checked_tokens(indexed: IndexedDataset, documents: range, *, seq_length: int) -> int:
    """Return the number of tokens of the documents.

    Args:
        indexed: the dataset.
        documents: numbers of the documents.
        seq_length: tokens of a sample.

    Raises:
        DataError: if they are fewer than one sample takes.
    """
    tokens = int(indexed.sequence_lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens < seq_length + 1:
        raise DataError(
            f"documents [{documents.start}, {documents.stop}) of {indexed.prefix} hold "
            f"{tokens} tokens and one sample takes seq_length + 1 = {seq_length + 1}: shorten "
            "--seq-length, give this part of --split more documents, or add text"
        )
    return tokens


def samples_in_epochs(indexed: IndexedDataset, documents: range, *, seq_length: int, epochs: int) -> int:
    """Return the number of whole samples that some epochs of the documents hold.

    Args:
        indexed: the dataset.
        documents: numbers of the documents.
        seq_length: tokens of a sample.
        epochs: number of epochs.
    """
    tokens = int(indexed.sequence_lengths[documents.start : documents.stop].sum(dtype=np.int64))
    return max(0, (epochs * tokens - 1) // seq_length)
