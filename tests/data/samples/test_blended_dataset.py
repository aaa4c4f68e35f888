"""Blends: each dataset's share at every moment, and Megatron's very order."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.data.datasets import BlendedDataset, interleave
from megatron_terapipe.data.file_arrays import FileColumn, IndexCache


@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    num_samples=st.integers(0, 300),
    more=st.integers(0, 50),
)
@settings(deadline=None)
def test_every_dataset_keeps_its_share_at_every_moment(weights: list[int], num_samples: int, more: int) -> None:
    order = interleave([float(weight) for weight in weights], num_samples).dataset_index
    assert len(order) == num_samples
    for number, weight in enumerate(weights):
        given_so_far = np.cumsum(order == number)
        due = weight / sum(weights) * np.arange(1, num_samples + 1)
        assert np.all(abs(given_so_far - due) <= max(1.0, len(weights) / 2))
    longer = interleave([float(weight) for weight in weights], num_samples + more).dataset_index
    assert longer[:num_samples].tolist() == order.tolist()


def test_a_blend_draws_each_dataset_in_its_own_order() -> None:
    letters = [[np.array([10 * dataset + sample]) for sample in range(4)] for dataset in range(2)]
    blend = BlendedDataset(letters, interleave([3.0, 1.0], 5))
    assert [int(blend[sample][0]) for sample in range(5)] == [0, 10, 1, 2, 3]


weights_in_any_unit = st.lists(
    st.one_of(
        st.integers(1, 9).map(lambda tenths: tenths / 10), st.floats(1e-3, 1e6), st.integers(1, 10**12).map(float)
    ),
    min_size=1,
    max_size=6,
)


@given(weights=weights_in_any_unit, num_samples=st.integers(1, 2000))
@settings(max_examples=100, deadline=None)
def test_the_order_is_megatrons_to_the_last_tie(weights: list[float], num_samples: int) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    normalize = pytest.importorskip("megatron.core.datasets.utils").normalize
    dataset_index = np.zeros(num_samples, np.int16)
    dataset_sample_index = np.zeros(num_samples, np.int64)
    helpers.build_blending_indices(
        dataset_index, dataset_sample_index, normalize(weights), len(weights), num_samples, False
    )
    ours = BlendedDataset([[]] * len(weights), interleave(weights, num_samples))
    assert ours.dataset_index.tolist() == dataset_index.tolist()
    assert ours.dataset_sample_index.tolist() == dataset_sample_index.tolist()


def test_a_kept_order_is_the_order(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    orders = [interleave([0.3, 0.7], 1000, each) for each in (None, cache, cache)]
    assert all(isinstance(each, FileColumn) for each in orders[2])
    for first, second, third in zip(*orders, strict=True):
        assert first.tolist() == second.tolist() == third.tolist()
    assert interleave([0.7, 0.3], 1000, cache).dataset_index.tolist() != orders[0].dataset_index.tolist()
    assert len(interleave([0.3, 0.7], 10, cache).dataset_index) == 10
