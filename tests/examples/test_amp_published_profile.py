"""Reading AMP's profiles."""

import re

import numpy as np
import pytest

from examples.amp import models
from examples.amp.deepspeed_costs import FOLDER, TENSOR_PARALLEL_SIZES, read_profile, unthrottled
from megatron_terapipe.errors import DataError


@pytest.fixture
def repository(tmp_path):
    """A checkout with one profile: layer i takes i + 1 ms, divided by the tensor-parallel size."""
    (tmp_path / FOLDER).mkdir(parents=True)
    for size in TENSOR_PARALLEL_SIZES:
        np.save(tmp_path / FOLDER / f"gpt2_G4_{size}.npy", np.arange(1, 31) / 1000 / size)
    return tmp_path


def test_times_by_layer_and_tensor_parallel_size(repository):
    profile = read_profile(repository, "gpt2_G4")
    assert len(profile) == 30
    assert dict(profile[3]) == {1: 0.004, 2: 0.002, 4: 0.001}


def test_a_missing_file_is_named(repository):
    (repository / FOLDER / "gpt2_G4_2.npy").unlink()
    with pytest.raises(DataError, match=r"gpt2_G4_2\.npy: there is no such file: give a checkout"):
        read_profile(repository, "gpt2_G4")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(29), "has shape (29,), and this model has 30 layers"),
        (np.ones((30, 1)), "has shape (30, 1)"),
        (np.ones(30, dtype=int), "holds int64, and times are floating-point numbers"),
        (np.where(np.arange(30) == 4, np.nan, 1.0), "entry 4 is nan"),
        (np.where(np.arange(30) == 7, -1.0, 1.0), "entry 7 is -1.0"),
        (np.where(np.arange(30) == 0, np.inf, 1.0), "entry 0 is inf"),
    ],
)
def test_what_is_no_profile_is_refused(repository, array, message):
    np.save(repository / FOLDER / "gpt2_G4_4.npy", array)
    with pytest.raises(DataError, match=re.escape(message)):
        read_profile(repository, "gpt2_G4")


def test_what_is_no_array_is_refused(repository):
    (repository / FOLDER / "gpt2_G4_1.npy").write_bytes(b"version https://git-lfs")
    with pytest.raises(DataError, match="not an array that numpy can read"):
        read_profile(repository, "gpt2_G4")


def test_blocks_that_are_alike_take_what_the_fastest_took() -> None:
    layers = models.gpt2().layers
    seconds = tuple({1: 1.0 + index, 2: 40.0 - index} for index in range(len(layers)))
    by_name = unthrottled(layers, seconds)
    assert {by_name[layer.name][1] for layer in layers[2:26]} == {3.0}
    assert {by_name[layer.name][2] for layer in layers[2:26]} == {40.0 - 25}
    # Others may compute another thing under the same sizes.
    assert all(by_name[layers[index].name] == seconds[index] for index in (0, 1, 26, 27, 28, 29))
