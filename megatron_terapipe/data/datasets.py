"""The datasets of a run: samples for training, validation and test, out of the data that its flags name.

Samples have equal length, out of documents of any length, in Megatron's construction: `draw_order` draws the order of
documents and of samples, `GPTDataset` reads the samples in it, `BlendedDataset` mixes several datasets. The data that a
program of the user's own makes is checked as it is read (`OwnDataset`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.config.data import PARTS, DataConfig, Part
from megatron_terapipe.data.blend_order import BlendOrder
from megatron_terapipe.data.file_arrays import IndexCache, Numbers
from megatron_terapipe.data.indexed_dataset import IndexedDataset, data_file
from megatron_terapipe.errors import ConfigError, DataError


class SampleDataset(Protocol):
    """Samples of equal length by number."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return the token ids of one sample, [seq_length + 1]."""


class EpochOrder(NamedTuple):
    """Order of one epoch: of its documents, and of the samples that end in it."""

    documents: Numbers
    """Numbers of the documents, int32 [documents]."""
    starts: Numbers
    """Tokens of the epoch before each of them, int64 [documents]. Megatron stores the first token of each sample."""
    samples: Numbers
    """Samples of the stream of all epochs, int64 [samples]."""


def draw_order(lengths: NDArray[np.int32], documents: range, seq_length: int, epoch: int, seed: int) -> EpochOrder:
    """Draw the shuffles of an epoch.

    The first one comes in exactly Megatron's order for the same seed. Further epochs are shuffled one by one, where
    Megatron shuffles them together: so every epoch visits each token once, a longer run begins with the samples of a
    shorter one, and an epoch is drawn when it is needed.

    Args:
        lengths: tokens of each of the documents, int32 [documents].
    """
    tokens = int(lengths.sum(dtype=np.int64))
    # The first epoch takes the plain seed, because that is Megatron's order.
    random = np.random.RandomState([seed, epoch] if epoch else seed)
    order = np.arange(documents.start, documents.stop, dtype=np.int32)
    random.shuffle(order)
    ends = np.cumsum(lengths[order - documents.start], dtype=np.int64)
    # A sample belongs to the epoch in which it ends.
    samples = np.arange(*(max(0, (end * tokens - 1) // seq_length) for end in (epoch, epoch + 1)), dtype=np.int64)
    random.shuffle(samples)
    return EpochOrder(order, np.concatenate([np.zeros(1, np.int64), ends[:-1]]), samples)


_DOCUMENTS_AT_ONCE = 32
"""Entries of the order that are read at once."""
_STORED_FROM = 1 << 16
"""Documents and samples of an epoch from which its order is stored: a smaller one is drawn in a millisecond."""
_EPOCHS_KEPT = 4
"""Epochs in memory, or with open files: a sample may begin in one and end in the next."""


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
        """Check that there is text for a sample; orders are drawn when they are needed.

        Args:
            indexed: the token ids; a document is one of its sequences, as Megatron takes it.
            vocab_size: every id is below it, which is checked whenever a sample is read; None for any id.
            cache: stores the orders of large epochs; None: they are drawn.
        """
        self._tokens = checked_tokens(indexed, documents, seq_length=seq_length)
        self.seq_length = seq_length
        self._indexed, self._documents, self._seed = indexed, documents, seed
        self._num_samples, self._vocab_size = num_samples, vocab_size
        is_large = len(documents) + self._tokens // seq_length >= _STORED_FROM
        self._cache = cache if cache is not None and cache.keeps and is_large else None
        self._orders: dict[int, EpochOrder] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return self._num_samples

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        with self._lock:
            if epoch not in self._orders:
                self._orders[epoch] = self._drawn(epoch)
                if len(self._orders) > _EPOCHS_KEPT:
                    del self._orders[next(iter(self._orders))]
            return self._orders[epoch]

    def _drawn(self, epoch: int) -> EpochOrder:
        lengths = self._indexed.sequence_lengths[self._documents.start : self._documents.stop]

        def draw() -> EpochOrder:
            return draw_order(lengths, self._documents, self.seq_length, epoch, self._seed)

        if self._cache is None:
            return draw()
        description = {
            "kind": "order of documents and samples of an epoch, version 2",
            "lengths": hashlib.sha256(np.ascontiguousarray(lengths, "<i4").data).hexdigest(),
            "documents": [self._documents.start, self._documents.stop],
            "seq_length": self.seq_length,
            "epoch": epoch,
            "seed": self._seed,
        }
        return EpochOrder(**self._cache.get(description, EpochOrder._fields, lambda: draw()._asdict()))

    def prepare(self, sample: int) -> None:
        """Draw the order that a run from a sample on begins with, if that takes long."""
        if self._cache is not None:
            self.order(self.epoch_of(sample % self._num_samples))

    def epoch_of(self, sample: int) -> int:
        """Return the epoch in which a sample ends."""
        return (sample + 1) * self.seq_length // self._tokens

    def locate(self, stream_sample: int) -> tuple[int, int, int]:
        """Return where a sample of the stream begins: epoch, position in its documents, and token of that document."""
        epoch, token = divmod(stream_sample * self.seq_length, self._tokens)
        starts = self.order(epoch).starts
        position = int(starts.searchsorted(token, side="right")) - 1
        return epoch, position, token - int(starts[position])

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
        epoch = self.epoch_of(sample)
        first = max(0, (epoch * self._tokens - 1) // self.seq_length)
        samples = self.order(epoch).samples
        stream_sample = int(samples[sample - first])
        if not first <= stream_sample < first + len(samples):
            raise DataError(
                f"the order of the samples of {self._indexed.prefix} has changed since the start, and sample "
                f"{sample} is outside: remove the folder of --data-cache-path, and continue from the "
                "last checkpoint"
            )
        epoch, position, offset = self.locate(stream_sample)
        missing = self.seq_length + 1
        while missing:
            documents = self.order(epoch).documents[max(0, position) : position + _DOCUMENTS_AT_ONCE].tolist()
            for document in documents:
                ids = self._indexed.run(document, offset, missing)
                yield document, offset, ids
                missing -= len(ids)
                if not missing:
                    return
                offset = 0
            position += _DOCUMENTS_AT_ONCE
            if position >= len(self._documents):
                epoch, position = epoch + 1, 0

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


@dataclass(frozen=True, slots=True)
class UnreadSamples:
    """A number of samples, on a rank that reads none of them."""

    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        raise AssertionError(f"sample {sample} is read on a rank that reads no data")


class BlendedDataset:
    """Samples of several datasets in an order: each gives its share, to within a sample.

    Args:
        datasets: each has at least as many samples as its number occurs in the order.
    """

    def __init__(self, datasets: Sequence[SampleDataset], order: BlendOrder) -> None:
        self.datasets, self.order = datasets, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        dataset, number = self.order[sample]
        return self.datasets[dataset][number]

    def prepare(self, sample: int) -> None:
        """Draw the orders that a run from a sample on begins with, if that takes long."""
        for dataset, given in zip(self.datasets, self.order.given(sample % len(self.order)).tolist(), strict=True):
            prepare_samples(dataset, given)


def prepare_samples(dataset: Any, sample: int) -> None:
    """Draw the orders that a run from a sample of any dataset on begins with, if that takes long."""
    if hasattr(dataset, "prepare"):
        dataset.prepare(sample)


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
    samples is drawn only where samples are read, when they are.

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
        order = BlendOrder(weights, num_samples, self._cache)
        # A dataset of whole epochs has few enough samples to count them.
        counts = order.given(num_samples).tolist() if self._epochs(part) else [num_samples] * len(chosen)
        datasets = [self._dataset(part, *each, max(1, count)) for each, count in zip(chosen, counts, strict=True)]
        return BlendedDataset(datasets, order) if self._reads else UnreadSamples(num_samples)

    def _epochs(self, part: Part) -> int | None:
        return self._data.train_data_exact_num_epochs if part == "train" else None

    def _documents(self, part: Part, prefix: str, num_samples: int) -> range:
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


Sample = NDArray[np.int64] | dict[str, NDArray[Any]]
"""Token ids [seq_length + 1]; or `tokens`, `labels`, `loss_mask` and perhaps `position_ids`, each [seq_length]."""


class OwnDataset:
    """Samples of a dataset of the user's own, as arrays of numpy.

    Args:
        vocab_size: every id is below it.
        restarts: whether positions may restart within a sample, at its documents.
    """

    def __init__(self, samples: Any, name: str, *, seq_length: int, vocab_size: int, restarts: bool) -> None:
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
            raise ConfigError(f"the {name} is a {type(samples).__name__}: give it __len__, and __getitem__ of a number")
        if not len(samples):
            raise ConfigError(f"the {name} has no samples: give it one or more, or return None in its place")
        self._samples, self._name, self._restarts = samples, name, restarts
        self._seq_length, self._vocab_size = seq_length, vocab_size

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample: int, /) -> Sample:
        """Return one sample.

        Raises:
            DataError: if it has another length, an id outside of the vocabulary, or positions that do not count.
        """
        found = self._samples[sample]
        if not isinstance(found, Mapping):
            return self._ids(found, self._seq_length + 1, sample, "token ids (seq_length + 1)")
        missing = [name for name in ("tokens", "labels", "loss_mask") if name not in found]
        if missing:
            raise DataError(f"sample {sample} of the {self._name} has no {missing[0]!r}: add it, or return token ids")
        read: dict[str, NDArray[Any]] = {
            name: self._ids(found[name], self._seq_length, sample, name) for name in ("tokens", "labels")
        }
        mask = self._array(found["loss_mask"], self._seq_length, sample, "loss_mask").astype(np.float32)
        # Some libraries mark tokens that do not count by labels below 0.
        read["loss_mask"], read["labels"] = mask * (read["labels"] >= 0), read["labels"].clip(min=0)
        if "position_ids" in found:
            positions = self._array(found["position_ids"], self._seq_length, sample, "position_ids")
            self._check_positions(positions, sample)
            read["position_ids"] = positions
        return read

    def _array(self, values: Any, length: int, sample: int, what: str) -> NDArray[Any]:
        array = np.asarray(values)
        if array.shape != (length,):
            raise DataError(
                f"sample {sample} of the {self._name} has {what} of shape {array.shape}, and --seq-length "
                f"{self._seq_length} needs ({length},): return as many, or change --seq-length"
            )
        return array

    def _ids(self, values: Any, length: int, sample: int, what: str) -> NDArray[np.int64]:
        array = self._array(values, length, sample, what)
        if array.dtype.kind not in "iu":
            raise DataError(f"sample {sample} of the {self._name} has {what} of type {array.dtype}: return integers")
        ids = array.astype(np.int64)
        if ids.max() >= self._vocab_size or (what != "labels" and ids.min() < 0):
            wrong = ids.max() if ids.max() >= self._vocab_size else ids.min()
            raise DataError(
                f"sample {sample} of the {self._name} has the id {wrong}, and the vocabulary {self._vocab_size}: raise "
                "--vocab-size, or correct the sample"
            )
        return ids

    def _check_positions(self, positions: NDArray[Any], sample: int) -> None:
        starts, places = np.flatnonzero(positions == 0), np.arange(self._seq_length)
        begins = places if not len(starts) else starts[np.searchsorted(starts, places, "right") - 1]
        if positions[0] != 0 or not np.array_equal(positions, places - begins):
            raise DataError(
                f"sample {sample} of the {self._name} has position_ids that do not count from 0 in each document: make "
                "them so, or leave them out"
            )
        if len(starts) > 1 and not self._restarts:
            raise DataError(
                f"sample {sample} of the {self._name} has position_ids that restart at token {starts[1]}: add "
                "--reset-position-ids, or leave them out"
            )


def own_datasets(made: Any, program: str, *, seq_length: int, vocab_size: int, restarts: bool) -> DatasetSplits:
    """Return the data that `datasets` of a program has made, checked; the first sample of each part is read.

    Raises:
        ConfigError: if it is not three datasets, or one of them has no samples.
    """
    if not isinstance(made, tuple | list) or len(made) != len(PARTS):
        raise ConfigError(
            f"datasets of {program} returns a {type(made).__name__}: return three, for training, validation and test, "
            "with None for one that is left out"
        )
    if made[0] is None:
        raise ConfigError(
            f"datasets of {program} returns no training data: return it first, before validation and test"
        )
    words = ("training", "validation", "test")
    wrapped = [
        None
        if samples is None
        else OwnDataset(
            samples, f"{part} data of {program}", seq_length=seq_length, vocab_size=vocab_size, restarts=restarts
        )
        for part, samples in zip(words, made, strict=True)
    ]
    for samples in wrapped:
        if samples is not None:
            samples[0]
    return DatasetSplits(**dict(zip(PARTS, wrapped, strict=True)))
