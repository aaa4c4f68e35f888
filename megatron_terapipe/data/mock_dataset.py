"""Samples of random tokens, for runs that measure and do not learn."""

import numpy as np
from numpy.typing import NDArray


class MockDataset:
    """Samples of `seq_length + 1` tokens, each drawn evenly from the vocabulary.

    Sample `n` is the same in every run with the same seed, on every rank, in whatever order samples are read.
    """

    def __init__(self, *, seq_length: int, num_samples: int, vocab_size: int, seed: int) -> None:
        """Remember what to draw.

        Args:
            seq_length: tokens the model sees per sample.
            num_samples: number of samples.
            vocab_size: token ids are below it.
            seed: seed of the draws, at least 0.
        """
        self.seq_length = seq_length
        self._num_samples, self._vocab_size, self._seed = num_samples, vocab_size, seed

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        """Return the token ids of one sample, int64 [seq_length + 1]."""
        draw = np.random.default_rng((self._seed, sample))
        return draw.integers(self._vocab_size, size=self.seq_length + 1)
