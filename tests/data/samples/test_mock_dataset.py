"""Samples of random tokens: the same everywhere, inside the vocabulary."""

import numpy as np

from megatron_terapipe.data.datasets import MockDataset, mock_datasets


def test_samples_are_the_same_on_every_rank_and_in_any_order() -> None:
    first, second = (MockDataset(seq_length=16, num_samples=5, vocab_size=11, seed=3) for _ in range(2))
    assert len(first) == 5
    backwards = [second[sample] for sample in reversed(range(5))][::-1]
    assert all(np.array_equal(first[sample], backwards[sample]) for sample in range(5))
    assert first[0].shape == (17,)
    assert not np.array_equal(first[0], first[1])


def test_tokens_are_drawn_from_the_whole_vocabulary() -> None:
    tokens = MockDataset(seq_length=999, num_samples=1, vocab_size=7, seed=0)[0]
    assert set(tokens.tolist()) == set(range(7))


def test_parts_differ_and_what_is_not_asked_for_is_not_there() -> None:
    splits = mock_datasets(seq_length=8, num_samples=(4, 2, 0), vocab_size=100, seed=1)
    assert (len(splits.train or ()), len(splits.valid or ()), splits.test) == (4, 2, None)
    assert splits.train is not None
    assert splits.valid is not None
    assert not np.array_equal(splits.train[0], splits.valid[0])
