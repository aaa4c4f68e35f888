"""The data that a program of the user's own makes: its samples, checked as they are read."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.data.datasets import DatasetSplits
from megatron_terapipe.errors import ConfigError, DataError

PARTS = ("training", "validation", "test")

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
    wrapped = [
        samples
        if samples is None
        else OwnDataset(
            samples, f"{part} data of {program}", seq_length=seq_length, vocab_size=vocab_size, restarts=restarts
        )
        for part, samples in zip(PARTS, made, strict=True)
    ]
    for samples in wrapped:
        if samples is not None:
            samples[0]
    train, valid, test = wrapped
    return DatasetSplits(train=train, valid=valid, test=test)
