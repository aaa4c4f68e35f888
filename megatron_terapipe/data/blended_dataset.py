"""Several datasets as one, each with its share of the samples."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class SampleDataset(Protocol):
    """Samples of equal length by number."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return the token ids of one sample, [seq_length + 1]."""


class BlendedDataset:
    """Interleaves datasets so that at every moment each has given its share, to within a sample.

    Attributes:
        dataset_index: which dataset each sample comes from, [samples].
        dataset_sample_index: which of that dataset's samples it is, int64 [samples].
    """

    def __init__(self, datasets: Sequence[SampleDataset], dataset_index: NDArray[Any]) -> None:
        """Follow an order made by `interleave`.

        Args:
            datasets: each has at least as many samples as its number occurs in the order.
            dataset_index: number of the dataset of each sample, [samples].
        """
        self.datasets = datasets
        self.dataset_index = dataset_index
        self.dataset_sample_index = np.empty(len(dataset_index), np.int64)
        for number in range(len(datasets)):
            chosen = dataset_index == number
            self.dataset_sample_index[chosen] = np.arange(np.count_nonzero(chosen))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset_index)

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return the token ids of one sample, int64 [seq_length + 1]."""
        dataset = self.datasets[int(self.dataset_index[sample])]
        return dataset[int(self.dataset_sample_index[sample])]


def interleave(weights: Sequence[float], num_samples: int) -> NDArray[np.int16]:
    """Choose a dataset for each sample, in proportion to the weights, evenly spread.

    The k-th sample of a dataset with share w is due at (k + 1/2) / w, and samples come in the order
    in which they are due. The order does not depend on `num_samples`: a longer run begins alike.

    Args:
        weights: share of each dataset, positive, in any unit.
        num_samples: how many to choose.

    Returns:
        Number of the dataset of each sample, [num_samples].
    """
    # Megatron takes the dataset that lags most, one sample at a time. One sort gives the same kind
    # of order for 10**8 samples in seconds where a loop in Python would need minutes.
    shares = np.asarray(weights, np.float64) / sum(weights)
    counts = [int(np.ceil(share * num_samples)) + 1 for share in shares]
    due = [(np.arange(count) + 0.5) / share for count, share in zip(counts, shares, strict=True)]
    order = np.argsort(np.concatenate(due), kind="stable")[:num_samples]
    owners: NDArray[np.int16] = np.repeat(np.arange(len(shares), dtype=np.int16), counts)
    return owners[order]
