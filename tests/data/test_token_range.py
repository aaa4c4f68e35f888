"""Data that another tokenizer wrote is found by its ids."""

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from megatron_terapipe.data import tokenizer_checks as module
from megatron_terapipe.data.file_arrays import IndexCache
from megatron_terapipe.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_terapipe.data.tokenizer import ByteTokenizer
from megatron_terapipe.data.tokenizer_checks import check_token_ids, token_range
from megatron_terapipe.errors import DataError


def write(prefix: Path, *documents: list[int], vocab_size: int = 50257) -> Path:
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for ids in documents:
            writer.add_document(ids)
    return prefix


def test_the_range_is_that_of_the_whole_file_whatever_the_pieces(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", [3, 1, 50256], [7] * 100, [2])
    for size in (1, 7, 1 << 24):
        with patch.object(module, "_TOKENS_AT_ONCE", size):
            assert token_range(str(prefix), IndexCache(None)) == (0, 50256)


def test_it_is_read_once_until_the_file_changes(tmp_path: Path) -> None:
    prefix, cache = write(tmp_path / "c", [1, 2]), IndexCache(tmp_path / "cache")
    assert token_range(str(prefix), cache) == (0, 2)
    with patch.object(module, "_range", side_effect=AssertionError("read again")):
        assert token_range(str(prefix), cache) == (0, 2)
    write(prefix, [1, 5])
    os.utime(f"{prefix}.bin", ns=(1, 1))
    assert token_range(str(prefix), cache) == (0, 5)


@pytest.mark.parametrize(("ids", "wrong"), [([1, 257, 50256], 257), ([5, -3], -3)])
def test_ids_that_the_tokenizer_does_not_have_are_one_line(tmp_path: Path, ids: list[int], wrong: int) -> None:
    fine, other = write(tmp_path / "fine", [0, 256]), write(tmp_path / "other", ids, vocab_size=1 << 20)
    assert IndexedDataset(other).dtype == np.int32
    check_token_ids([str(fine)], ByteTokenizer(), IndexCache(None))
    with pytest.raises(DataError) as raised:
        check_token_ids([str(fine), str(other)], ByteTokenizer(), IndexCache(None))
    assert str(raised.value) == (
        f"{other}.bin has the token id {wrong} at byte 4, and the vocabulary of --tokenizer-type byte has 257 ids from "
        "0: give the tokenizer that the data was preprocessed with"
    )


def test_a_file_put_in_the_place_of_another_is_read_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    prefix, cache = write(tmp_path / "c", [1, 2]), IndexCache(tmp_path / "cache")
    assert token_range(str(prefix), cache) == (0, 2)
    written = os.stat(f"{prefix}.bin").st_mtime_ns
    write(prefix, [1, 5])
    os.utime(f"{prefix}.bin", ns=(written, written))
    assert token_range(str(prefix), cache) == (0, 5)
