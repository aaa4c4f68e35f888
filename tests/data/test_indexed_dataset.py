"""Megatron's file format: round trips, exchange with megatron-core, and damaged files."""

import gc
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.data import file_arrays
from megatron_terapipe.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetWriter,
    data_file,
    index_file,
    token_dtype,
)
from megatron_terapipe.errors import DataError

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8], [65_000]]


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 65_100) -> Path:
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 300), max_size=9), max_size=9),
    vocab_size=st.sampled_from([301, 100_000]),
)
def test_written_documents_are_read(
    documents: list[list[int]], vocab_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dataset = IndexedDataset(write(tmp_path_factory.mktemp("d") / "d", documents, vocab_size))
    assert [dataset.run(number, 0, 99).tolist() for number in range(len(dataset))] == documents
    assert dataset.sequence_lengths[:].tolist() == [len(document) for document in documents]
    assert dataset.document_indices[:].tolist() == list(range(len(documents) + 1))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, np.uint16), (65_499, np.uint16), (65_500, np.int32)])
def test_ids_take_the_type_megatron_chooses(vocab_size: int, dtype: type, tmp_path: Path) -> None:
    assert token_dtype(vocab_size) is dtype
    assert IndexedDataset(write(tmp_path / "d", [[1]], vocab_size)).dtype == dtype


def test_run_ends_with_the_sequence(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", DOCUMENTS))
    assert dataset.run(2, 1, 2).tolist() == [6, 7]
    assert dataset.run(2, 3, 9).tolist() == [8]
    assert dataset.run(0, 1, 3).tolist() == DOCUMENTS[0][1:]


def by_megatron(prefix: Path, dtype: type, *documents: tuple[list[int], list[int]]) -> IndexedDataset:
    """Write documents, each of sequences of the given lengths, with megatron-core."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = theirs.IndexedDatasetBuilder(str(data_file(prefix)), dtype=dtype)
    for document in documents:
        builder.add_document(*document)
    builder.finalize(str(index_file(prefix)))
    return IndexedDataset(prefix)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_write_the_bytes_megatron_writes_and_read_its_files(tmp_path: Path, dtype: type) -> None:
    prefix = tmp_path / "theirs"
    dataset = by_megatron(prefix, dtype, *((document, [len(document)]) for document in DOCUMENTS))
    assert [dataset.run(number, 0, 99).tolist() for number in range(len(dataset))] == DOCUMENTS
    ours = write(tmp_path / "ours", DOCUMENTS, 65_100 if dtype is np.uint16 else 65_500)
    assert data_file(ours).read_bytes() == data_file(prefix).read_bytes()
    assert index_file(ours).read_bytes() == index_file(prefix).read_bytes()


def test_megatron_documents_of_several_sequences_are_read(tmp_path: Path) -> None:
    dataset = by_megatron(tmp_path / "theirs", np.uint16, ([1, 2, 3], [2, 1]), ([4], [1]))
    assert [dataset.run(number, 0, 99).tolist() for number in range(3)] == [[1, 2], [3], [4]]
    assert dataset.document_indices[:].tolist() == [0, 2, 3]


def test_an_interrupted_writer_leaves_the_older_dataset(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(tmp_path / "d", 300) as writer:
        writer.add_document([1])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    prefix = write(tmp_path / "d", DOCUMENTS)
    with pytest.raises(OverflowError), IndexedDatasetWriter(prefix, 300) as writer:
        writer.add_document([1 << 16])
    assert IndexedDataset(prefix).run(2, 0, 99).tolist() == DOCUMENTS[2]


def test_two_writers_of_one_name_do_not_mix_and_files_appear_when_complete(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", 300) as writer:
        writer.add_document([1, 2])
        assert not data_file(tmp_path / "d").exists() and not index_file(tmp_path / "d").exists()
        with pytest.raises(DataError, match=r"d\.bin\.partial is written by another process: wait for its end"):
            IndexedDatasetWriter(tmp_path / "d", 300).__enter__()
        writer.add_document([3])
    assert IndexedDataset(tmp_path / "d").run(1, 0, 99).tolist() == [3]


KILLED = """
import os, sys
from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter
with IndexedDatasetWriter(sys.argv[1], 300) as writer:
    for _ in range(100_000):
        writer.add_document([9])
    os.kill(os.getpid(), 9)
"""


def test_a_writer_that_is_killed_leaves_no_dataset_and_blocks_no_later_one(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "d")], check=False).returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["d.bin.partial"]
    assert IndexedDataset(write(tmp_path / "d", DOCUMENTS)).run(0, 0, 99).tolist() == DOCUMENTS[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


@pytest.mark.parametrize(("limit", "name"), [(9000, "d.bin.partial"), (20020, "d.idx.partial")])
def test_a_full_disk_is_one_line_and_leaves_the_older_dataset(tmp_path: Path, limit: int, name: str) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(DataError, match=rf"{name} cannot be written \(File too large\): make room"):
            write(prefix, [[1] * 10] * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert IndexedDataset(prefix).run(2, 0, 99).tolist() == DOCUMENTS[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def keep(count: int):
    return lambda content: content[:count]


def replace(offset: int, value: bytes):
    return lambda content: content[:offset] + value + content[offset + len(value) :]


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (index_file, keep(20), "truncated: 20 bytes, and its header has 34"),
        (index_file, keep(-1), "truncated: 121 bytes, and 4 sequences and 5 .* take 122"),
        (index_file, lambda content: content + b"?", "overlong: 123 bytes"),
        (index_file, replace(0, b"TNTIDX"), r"not an index of Megatron's: it begins with b'TNTIDX"),
        (index_file, replace(9, struct.pack("<Q", 2)), "format version 2, and only 1"),
        (index_file, replace(17, b"\x63"), "token type code 99"),
        (index_file, replace(34, struct.pack("<i", -3)), "damaged at byte 34: sequence 0 has -3 tokens"),
        (
            index_file,
            replace(38, struct.pack("<i", 2)),
            r"damaged at byte 66: sequence 2 begins .* 8 .* ends at byte 10",
        ),
        (index_file, replace(58, struct.pack("<q", -6)), r"damaged at byte 58: sequence 1 begins at byte -6 .*d\.bin"),
        (index_file, replace(74, struct.pack("<q", 1 << 40)), "damaged at byte 74: sequence 3 begins at byte 1099"),
        (index_file, replace(90, struct.pack("<q", 3)), "damaged at byte 98: document bound 2 is 2, less than"),
        (index_file, replace(90, struct.pack("<q", -1)), "damaged at byte 90: document bound 1 is -1, less than"),
        (index_file, replace(114, struct.pack("<q", 3)), "bounds do not run from 0 to its 4"),
        (data_file, keep(-2), r"truncated: 16 bytes, and .*d\.idx describes 18"),
        (data_file, lambda content: content + b"??", "not of its index: 20 bytes"),
    ],
)
def test_damage_is_named_with_the_file_and_the_remedy(tmp_path: Path, file, damage, message: str) -> None:
    path = file(write(tmp_path / "d", DOCUMENTS))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as error:
        IndexedDataset(tmp_path / "d")
    assert str(path) in str(error.value)
    assert "write the dataset again" in str(error.value)


def test_an_index_is_checked_to_its_end_whatever_the_pieces(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[number] * (number % 3) for number in range(100)])
    content = index_file(prefix).read_bytes()
    with patch.object(file_arrays, "NUMBERS_AT_ONCE", 7):
        assert len(IndexedDataset(prefix)) == 100
        for field, byte in (("sequence", 34 + 4 * 100 + 8 * 63), ("document bound", 34 + 12 * 100 + 8 * 63)):
            index_file(prefix).write_bytes(replace(byte, struct.pack("<q", 5))(content))
            with pytest.raises(DataError, match=rf"damaged at byte {byte}: {field} 63 "):
                IndexedDataset(prefix)


def test_a_missing_file_is_named_and_a_part_of_a_name_suggests_a_dataset_of_its_folder(
    tmp_path: Path,
) -> None:
    whole = write(tmp_path / "corpus_text_document", DOCUMENTS)
    for typed in (tmp_path / "corpus", data_file(whole), index_file(whole)):
        with pytest.raises(DataError, match=rf"not found: did you mean {whole}\?$"):
            IndexedDataset(typed)
    with pytest.raises(DataError, match=r"not found: --data-path takes the path"):
        IndexedDataset(tmp_path / "other")
    for file in (index_file, data_file):
        prefix = write(tmp_path / "d", DOCUMENTS)
        file(prefix).unlink()
        with pytest.raises(DataError, match=rf"at {prefix}: {file(prefix)} not found: both files"):
            IndexedDataset(prefix)


def test_a_file_cut_short_while_it_is_read_is_named(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", DOCUMENTS))
    os.truncate(data_file(tmp_path / "d"), 4)
    assert dataset.run(0, 0, 2).tolist() == [1, 2]
    with pytest.raises(DataError) as error:
        dataset.run(2, 1, 9)
    assert str(error.value) == (
        f"{data_file(tmp_path / 'd')} ends at byte 4 now, and had 18 bytes when it was opened; bytes 10 to 16 are "
        "needed: bring back the whole file, and continue from the last checkpoint"
    )
    os.truncate(index_file(tmp_path / "d"), 60)
    with pytest.raises(DataError, match=r"d\.idx ends at byte 60 now, and had 122 bytes when it was opened"):
        dataset.run(2, 1, 9)


def test_an_index_rewritten_while_it_is_read_is_named(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "d", DOCUMENTS))
    with index_file(tmp_path / "d").open("r+b") as file:
        file.write(bytes(122))
    with pytest.raises(DataError, match=r"d\.idx has changed since it was opened: sequence 2 takes tokens 0 to 0 of 9"):
        dataset.run(2, 1, 9)


def test_a_file_that_is_removed_can_be_read_to_the_end(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    dataset = IndexedDataset(prefix)
    for file in (data_file, index_file):
        file(prefix).unlink()
    assert [dataset.run(number, 0, 99).tolist() for number in range(4)] == DOCUMENTS


def test_files_are_closed_with_their_last_reader(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", DOCUMENTS)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    datasets = [IndexedDataset(prefix) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == before + 6
    datasets.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_text_to_datasets_needs_no_torch() -> None:
    program = "import sys, megatron_terapipe.data.preprocess; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
