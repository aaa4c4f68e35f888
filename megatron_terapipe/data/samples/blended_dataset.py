"""Several datasets as one, each with its share of the samples."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_terapipe.data.files.file_columns import Numbers
from megatron_terapipe.data.files.index_cache import Arrays, IndexCache

_SECONDS_UNTIL_PROGRESS = 2.0


class SampleDataset(Protocol):
    """Samples of equal length by number."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return the token ids of one sample, [seq_length + 1]."""


class BlendOrder(NamedTuple):
    """The order in which samples come from several datasets."""

    dataset_index: Numbers
    """Dataset of each sample, int16 [samples]."""
    dataset_sample_index: Numbers
    """Number of the sample in its dataset, int64 [samples]."""


class UnreadSamples:
    """A number of samples, on a rank that reads none of them."""

    def __init__(self, num_samples: int) -> None:
        """Remember how many."""
        self._num_samples = num_samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Fail: whoever asks is on a rank that was said to read nothing."""
        raise AssertionError(f"sample {sample} is read on a rank that reads no data")


class BlendedDataset:
    """Interleaves datasets so that at every moment each has given its share, to within a sample.

    Attributes:
        dataset_index: dataset of each sample, [samples].
        dataset_sample_index: number of the sample in its dataset, int64 [samples].
    """

    def __init__(self, datasets: Sequence[SampleDataset], order: BlendOrder) -> None:
        """Follow an order made by `interleave`.

        Args:
            datasets: each has at least as many samples as its number occurs in the order.
        """
        self.datasets = datasets
        self.dataset_index, self.dataset_sample_index = order

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset_index)

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return the token ids of one sample, int64 [seq_length + 1]."""
        dataset = self.datasets[int(self.dataset_index[sample])]
        return dataset[int(self.dataset_sample_index[sample])]


def interleave(weights: Sequence[float], num_samples: int, cache: IndexCache | None = None) -> BlendOrder:
    """Choose a dataset for each sample: the one that lags most behind its share, as Megatron does.

    The order does not depend on `num_samples`: a longer run begins alike.

    Args:
        weights: share of each dataset, positive, in any unit.
        num_samples: number of samples to choose.
        cache: keeps the order; None keeps nothing.

    Raises:
        DataError: the cache cannot be written.
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
    numbers = tqdm(
        range(num_samples),
        desc="blend",
        unit="sample",
        unit_scale=True,
        delay=_SECONDS_UNTIL_PROGRESS,
        disable=None if show_progress else True,  # None: silent when nobody watches
    )
    for sample in numbers:
        moment = float(sample or 1)
        chosen, largest = 0, first[1] * moment - given[0]
        for dataset, share in others:
            lag = share * moment - given[dataset]
            if lag > largest:
                chosen, largest = dataset, lag
        order[sample] = chosen
        given[chosen] += 1.0
    return order
