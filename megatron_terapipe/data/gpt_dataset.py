"""Samples of equal length out of documents of any length, in Megatron's construction.

The documents of one epoch, shuffled, are one long stream of tokens; epochs follow one another.
Sample s is the tokens [s * seq_length, (s + 1) * seq_length] of the stream, both ends included: the
last token of a sample is the first of the next, once as a label and once as an input. The samples
are then shuffled within their epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.config import DataConfig
from megatron_terapipe.data.blended_dataset import BlendedDataset, SampleDataset, interleave
from megatron_terapipe.data.indexed_dataset import IndexedDataset
from megatron_terapipe.errors import DataError


class GPTDataset:
    """Samples of `seq_length + 1` tokens from a range of documents.

    One epoch comes in exactly Megatron's order for the same seed. Further epochs are shuffled one
    by one, where Megatron shuffles them together: so every epoch visits each token once, and a
    longer run begins with the samples of a shorter one.

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
    ) -> None:
        """Draw the order of documents and of samples.

        Args:
            indexed: the token ids; a document is one of its sequences, as Megatron takes it.
            documents: which of them.
            seq_length: tokens the model sees per sample.
            num_samples: how many samples; as many epochs as they need.
            seed: of every shuffle, in [0, 2**32).

        Raises:
            DataError: the documents together are shorter than one sample.
        """
        lengths = indexed.sequence_lengths[documents.start : documents.stop]
        tokens = int(lengths.sum(dtype=np.int64))
        if tokens < seq_length + 1:
            raise DataError(
                f"documents [{documents.start}, {documents.stop}) of {indexed.prefix} hold "
                f"{tokens} tokens and one sample takes seq_length + 1 = {seq_length + 1}: shorten "
                "--seq-length, give this part of --split more documents, or add text"
            )
        self.seq_length = seq_length
        self._indexed = indexed
        orders, shuffles = [], []
        for epoch in range(-(-(num_samples * seq_length + 1) // tokens)):
            # The first epoch takes the plain seed, because that is Megatron's order.
            random = np.random.RandomState([seed, epoch] if epoch else seed)
            order = np.arange(documents.start, documents.stop, dtype=np.int32)
            random.shuffle(order)
            # A sample belongs to the epoch in which it ends.
            first, end = (max(0, (e * tokens - 1) // seq_length) for e in (epoch, epoch + 1))
            samples = np.arange(first, end)
            random.shuffle(samples)
            orders.append(order)
            shuffles.append(samples)
        self.document_index: NDArray[np.int32] = np.concatenate(orders)
        self.shuffle_index: NDArray[np.int64] = np.concatenate(shuffles)[:num_samples]
        # Where each document begins in the stream. Megatron stores where each sample begins; a
        # binary search when the sample is wanted needs no such index, no time and no cache for it.
        starts = np.cumsum(indexed.sequence_lengths[self.document_index], dtype=np.int64)
        self._document_starts = np.concatenate((np.zeros(1, np.int64), starts))

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
        position = np.searchsorted(self._document_starts, token, side="right") - 1
        return position, token - self._document_starts[position]

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


@dataclass(frozen=True, kw_only=True)
class DatasetSplits:
    """The three parts of the data; None where no sample was asked for."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


def split_ranges(shares: Sequence[float], num_documents: int) -> tuple[range, range, range]:
    """Divide documents into training, validation and test.

    Args:
        shares: of each part; they sum to 1.
        num_documents: how many to divide.

    Returns:
        Three ranges that follow one another and cover all documents.
    """
    # Rounded like Megatron, so that the same documents are held out.
    train, valid, test = shares
    ends = (train, train + valid, train + valid + test)
    first, second, third = (round(float(end) * num_documents) for end in ends)
    return range(first), range(first, second), range(second, third)


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
) -> DatasetSplits:
    """Build the training, validation and test samples.

    Args:
        data: the data section. Without weights each prefix has the share of its tokens; every prefix is split alike.
        seq_length: tokens the model sees per sample.
        num_samples: samples of training, validation and test; 0 builds none.
        seed: of every shuffle.

    Raises:
        DataError: a dataset is missing or damaged, or a part that is needed has too little text.
    """
    weighted = data.weighted_prefixes()
    indexed = [IndexedDataset(prefix) for _, prefix in weighted]
    ranges = [split_ranges(data.split_shares(), len(dataset)) for dataset in indexed]

    def part(number: int, name: str) -> SampleDataset | None:
        wanted = num_samples[number]
        if wanted == 0:
            return None
        documents = [of_prefix[number] for of_prefix in ranges]
        for dataset, chosen in zip(indexed, documents, strict=True):
            if not chosen:
                raise DataError(
                    f"--split {data.split} leaves no document of the {len(dataset)} in {dataset.prefix} "
                    f"for {name}, which needs {wanted} samples: raise its share, or ask for none"
                )
        weights = [
            weight or float(dataset.sequence_lengths[chosen.start : chosen.stop].sum(dtype=float))
            for (weight, _), dataset, chosen in zip(weighted, indexed, documents, strict=True)
        ]
        order = interleave(weights, wanted) if len(weights) > 1 else np.zeros(wanted, np.int16)
        counts = np.bincount(order, minlength=len(weights))
        datasets = [
            GPTDataset(dataset, chosen, seq_length=seq_length, num_samples=max(1, count), seed=seed)
            for dataset, chosen, count in zip(indexed, documents, counts.tolist(), strict=True)
        ]
        return BlendedDataset(datasets, order) if len(datasets) > 1 else datasets[0]

    return DatasetSplits(train=part(0, "training"), valid=part(1, "validation"), test=part(2, "testing"))
