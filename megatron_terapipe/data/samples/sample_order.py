"""The order of documents in the stream of tokens, and the order in which its samples are taken."""

import hashlib
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_terapipe.data.files.file_columns import Numbers
from megatron_terapipe.data.files.index_cache import Arrays, IndexCache

_SECONDS_UNTIL_PROGRESS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The shuffles of some epochs.

    One epoch comes in exactly Megatron's order for the same seed. Further epochs are shuffled one
    by one, where Megatron shuffles them together: so every epoch visits each token once, and a
    longer run begins with the samples of a shorter one.
    """

    document_index: Numbers
    """Documents in the order of the stream, int32 [epochs * documents]."""

    shuffle_index: Numbers
    """The stream's sample behind each sample, int64 [samples of all epochs]."""

    stream_starts: Numbers
    """Tokens of the stream before each document, and before its end, int64 [epochs * documents + 1].

    Megatron stores where each sample begins; a binary search among these when the sample is wanted needs no such
    index, and documents are fewer than samples or about as many.
    """

    @classmethod
    def draw(
        cls,
        lengths: NDArray[np.int32],
        documents: range,
        *,
        seq_length: int,
        epochs: int,
        seed: int,
        cache: IndexCache,
    ) -> Self:
        """Draw the order, or take it from the cache.

        Args:
            lengths: tokens of each of the documents, int32 [documents].
            seq_length: tokens the model sees per sample.
            epochs: number of times that each document comes.
            seed: seed of every shuffle, in [0, 2**32).

        Raises:
            DataError: the cache cannot be written.
        """
        description = {
            "kind": "order of documents and samples, version 1",
            "lengths": hashlib.sha256(np.ascontiguousarray(lengths, "<i4").data).hexdigest() if cache.keeps else "",
            "documents": [documents.start, documents.stop],
            "seq_length": seq_length,
            "epochs": epochs,
            "seed": seed,
        }

        def compute() -> Arrays:
            return _shuffles(lengths, documents, seq_length, epochs, seed, show_progress=cache.keeps)

        return cls(**cache.get(description, compute))


def _shuffles(
    lengths: NDArray[np.int32], documents: range, seq_length: int, epochs: int, seed: int, show_progress: bool
) -> Arrays:
    tokens = int(lengths.sum(dtype=np.int64))
    document_index = np.empty((epochs, len(documents)), np.int32)
    shuffle_index = np.empty((epochs * tokens - 1) // seq_length, np.int64)
    numbers = tqdm(
        range(epochs),
        desc="shuffle",
        unit="epoch",
        delay=_SECONDS_UNTIL_PROGRESS,
        disable=None if show_progress else True,  # None: silent when nobody watches
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
