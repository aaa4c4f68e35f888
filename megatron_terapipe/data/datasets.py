"""The datasets of a run: samples for training, validation and test, out of the data that its flags name.

Samples have equal length, out of documents of any length, in Megatron's construction: `draw_order` draws the order of
documents and of samples, `GPTDataset` reads the samples in it, `BlendedDataset` mixes several datasets.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_terapipe.config.data import PARTS, DataConfig, Part
from megatron_terapipe.data.file_arrays import Arrays, IndexCache, Numbers
from megatron_terapipe.data.indexed_dataset import IndexedDataset, data_file
from megatron_terapipe.errors import DataError

_SECONDS_UNTIL_PROGRESS = 2.0


def _with_progress(count: int, what: str, unit: str, *, shown: bool) -> Iterable[int]:
    """Return the numbers below `count`, with a bar on a terminal once they have taken a while."""
    disable = None if shown else True  # None: silent without a terminal
    return tqdm(range(count), desc=what, unit=unit, unit_scale=True, delay=_SECONDS_UNTIL_PROGRESS, disable=disable)


class SampleDataset(Protocol):
    """Samples of equal length by number."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return the token ids of one sample, [seq_length + 1]."""


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
    for epoch in _with_progress(epochs, "shuffle", "epoch", shown=show_progress):
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


class BlendOrder(NamedTuple):
    """The order in which samples come from several datasets."""

    dataset_index: Numbers
    """Dataset of each sample, int16 [samples]."""
    dataset_sample_index: Numbers
    """Number of the sample in its dataset, int64 [samples]."""


@dataclass(frozen=True, slots=True)
class UnreadSamples:
    """A number of samples, on a rank that reads none of them."""

    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        raise AssertionError(f"sample {sample} is read on a rank that reads no data")


class BlendedDataset:
    """Samples of several datasets in an order made by `interleave`: each gives its share, to within a sample.

    Args:
        datasets: each has at least as many samples as its number occurs in the order.
    """

    def __init__(self, datasets: Sequence[SampleDataset], order: BlendOrder) -> None:
        self.datasets = datasets
        self.dataset_index, self.dataset_sample_index = order

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        dataset = self.datasets[int(self.dataset_index[sample])]
        return dataset[int(self.dataset_sample_index[sample])]


def interleave(weights: Sequence[float], num_samples: int, cache: IndexCache | None = None) -> BlendOrder:
    """Choose a dataset for each sample: the one furthest below its share, as Megatron does.

    The order does not depend on `num_samples`: a longer run begins alike.

    Args:
        weights: share of each dataset, positive, in any unit.
        cache: stores the order; None: it is computed.
    """
    cache = cache or IndexCache(None)
    description = {"kind": "order of datasets, version 2", "weights": list(weights), "num_samples": num_samples}

    def compute() -> Arrays:
        chosen = _choose(weights, num_samples, show_progress=cache.keeps)
        return {"dataset_index": chosen, "dataset_sample_index": _counted(chosen, len(weights))}

    return BlendOrder(**cache.get(description, compute))


def _counted(dataset_index: NDArray[np.int16], num_datasets: int) -> NDArray[np.int64]:
    """Return for each sample how many came from its dataset before it."""
    counted = np.empty(len(dataset_index), np.int64)
    for number in range(num_datasets):
        chosen = dataset_index == number
        counted[chosen] = np.arange(np.count_nonzero(chosen))
    return counted


def _choose(weights: Sequence[float], num_samples: int, show_progress: bool) -> NDArray[np.int16]:
    # Each choice depends on those before it, and which of two equal lags is larger on the rounding of these very
    # operations: so it is a loop, at a third of a microsecond per sample and a few datasets.
    shares: list[float] = (np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)).tolist()
    first, *others = enumerate(shares)
    given = [0.0] * len(shares)
    order = np.empty(num_samples, np.int16)
    for sample in _with_progress(num_samples, "blend", "sample", shown=show_progress):
        moment = float(sample or 1)
        chosen, largest = 0, first[1] * moment - given[0]
        for dataset, share in others:
            lag = share * moment - given[dataset]
            if lag > largest:
                chosen, largest = dataset, lag
        order[sample] = chosen
        given[chosen] += 1.0
    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class MockDataset:
    """Samples of `seq_length + 1` tokens, each drawn evenly from the vocabulary.

    Sample `n` is the same in every run with the same seed, on every rank, in whatever order samples are read.
    """

    seq_length: int
    num_samples: int
    vocab_size: int
    seed: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        draw = np.random.default_rng((self.seed, sample))
        return draw.integers(self.vocab_size, size=self.seq_length + 1)


_PURPOSES: dict[Part, str] = {"train": "training", "valid": "validation", "test": "testing"}


@dataclass(frozen=True, kw_only=True)
class DatasetSplits:
    """The three parts of the data; None for a part without samples."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


def split_ranges(shares: Sequence[float], num_documents: int) -> tuple[range, range, range]:
    """Divide documents into consecutive ranges for training, validation and test.

    Args:
        shares: share of each part; they sum to 1.
    """
    # Rounded like Megatron, so that the same documents are held out.
    first, second, third = (round(float(end) * num_documents) for end in accumulate(shares))
    return range(first), range(first, second), range(second, third)


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    vocab_size: int | None = None,
    reads: bool = True,
) -> DatasetSplits:
    """Build the training, validation and test samples.

    Files are opened and their indices checked on every rank, which takes 10 ns a document. The order of documents and
    samples, which takes long, is drawn only where samples are read.

    Args:
        data: the data section. Without weights each prefix has the share of its tokens; every prefix is split alike.
        num_samples: samples of training, validation and test; 0 builds none.
        vocab_size: every token id must be below it, checked for each sample that is read; None for any id.
        reads: whether samples are read on this rank; otherwise only their number is computed.
    """
    builder = _Builder(data, seq_length, seed, vocab_size, reads)
    return DatasetSplits(**{part: builder.part(part, size) for part, size in zip(PARTS, num_samples, strict=True)})


def mock_datasets(*, seq_length: int, num_samples: tuple[int, int, int], vocab_size: int, seed: int) -> DatasetSplits:
    """Draw the training, validation and test samples at random, each part with a seed of its own; 0 builds none."""
    train, valid, test = (
        MockDataset(seq_length=seq_length, num_samples=size, vocab_size=vocab_size, seed=seed * 3 + part)
        if size
        else None
        for part, size in enumerate(num_samples)
    )
    return DatasetSplits(train=train, valid=valid, test=test)


class _Builder:
    """Opens each file once, whatever parts it has a share in."""

    def __init__(self, data: DataConfig, seq_length: int, seed: int, vocab_size: int | None, reads: bool) -> None:
        self._data, self._seq_length, self._seed, self._reads = data, seq_length, seed, reads
        self._vocab_size = vocab_size
        warm_up = data.mmap_warmup and reads
        self._indexed = {prefix: IndexedDataset(prefix, warm_up=warm_up) for prefix in data.prefixes}
        self._cache = index_cache(data)

    def part(self, part: Part, num_samples: int) -> SampleDataset | None:
        """Build the samples of one part; None for 0 samples."""
        weighted = self._data.weighted_prefixes(part)
        if num_samples == 0:
            return None
        if not weighted:
            raise DataError(f"--{part}-data-path is needed for {_PURPOSES[part]} of {num_samples} samples: give it")
        chosen = [(self._indexed[prefix], self._documents(part, prefix, num_samples)) for _, prefix in weighted]
        weights = [
            weight or float(indexed.sequence_lengths[documents.start : documents.stop].sum(dtype=float))
            for (weight, _), (indexed, documents) in zip(weighted, chosen, strict=True)
        ]
        if len(chosen) == 1:
            return self._dataset(part, *chosen[0], num_samples)
        if not (self._reads or self._epochs(part)):
            for each in chosen:
                checked_tokens(*each, seq_length=self._seq_length)
            return UnreadSamples(num_samples)
        order = interleave(weights, num_samples, self._cache)
        counts = np.bincount(order.dataset_index[:], minlength=len(weights)).tolist()
        datasets = [self._dataset(part, *each, max(1, count)) for each, count in zip(chosen, counts, strict=True)]
        return BlendedDataset(datasets, order) if self._reads else UnreadSamples(num_samples)

    def _epochs(self, part: Part) -> int | None:
        """Return the number of epochs of a part, if a flag sets it."""
        return self._data.train_data_exact_num_epochs if part == "train" else None

    def _documents(self, part: Part, prefix: str, num_samples: int) -> range:
        """Return which documents of a prefix belong to a part."""
        data, count = self._data, len(self._indexed[prefix])
        shares = data.split_shares()
        documents = range(count) if shares is None else split_ranges(shares, count)[PARTS.index(part)]
        if not documents:
            where = f"--{part}-data-path has" if shares is None else f"--split {data.split} leaves"
            raise DataError(
                f"{where} no document of the {count} in {prefix} for {_PURPOSES[part]}, which needs {num_samples} "
                "samples: " + ("name another" if shares is None else "raise its share, or request no samples")
            )
        return documents

    def _dataset(self, part: Part, indexed: IndexedDataset, documents: range, num_samples: int) -> SampleDataset:
        """Build the samples of one prefix: the given number, or all of the epochs that a flag sets."""
        epochs = self._epochs(part)
        if epochs is not None:
            available = samples_in_epochs(indexed, documents, seq_length=self._seq_length, epochs=epochs)
            if num_samples > available:
                raise DataError(
                    f"--train-data-exact-num-epochs {epochs} makes {available} samples of {indexed.prefix} and the run "
                    f"takes {num_samples}: raise it, or train fewer iterations"
                )
            num_samples = available
        if not self._reads:
            checked_tokens(indexed, documents, seq_length=self._seq_length)
            return UnreadSamples(num_samples)
        return GPTDataset(
            indexed,
            documents,
            seq_length=self._seq_length,
            num_samples=num_samples,
            seed=self._seed,
            vocab_size=self._vocab_size,
            cache=self._cache,
        )


def index_cache(data: DataConfig) -> IndexCache:
    """Return the cache of orders: in the folder of the flag, or in the folder of the data if that can be written."""
    path = data.data_cache_path
    if path is None:
        return IndexCache(Path(data.prefixes[0]).parent / "index_cache", required=False)
    return IndexCache(None if path == "none" else Path(path))
