"""Samples: their tokens and order, compared with the stream of tokens and with Megatron."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_terapipe.data.datasets import GPTDataset
from megatron_terapipe.data.file_arrays import IndexCache
from megatron_terapipe.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_terapipe.errors import DataError

DatasetOf = Callable[..., IndexedDataset]

lengths = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda each: sum(each) > 8)
fixture_is_a_function = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def dataset_of(tmp_path_factory: pytest.TempPathFactory) -> DatasetOf:
    """Return a function from document lengths to a dataset whose tokens are 0, 1, 2, ..."""

    def build(*lengths: int) -> IndexedDataset:
        prefix = tmp_path_factory.mktemp("dataset") / "numbers"
        first = 0
        with IndexedDatasetWriter(prefix, vocab_size=1 << 20) as writer:
            for length in lengths:
                writer.add_document(range(first, first + length))
                first += length
        return IndexedDataset(prefix)

    return build


@given(
    lengths=lengths,
    seq_length=st.integers(1, 8),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 9),
)
@fixture_is_a_function
def test_samples_are_the_stream_of_documents_and_each_epoch_visits_each_token_once(
    dataset_of: DatasetOf, lengths: list[int], seq_length: int, epochs: int, seed: int
) -> None:
    indexed, tokens = dataset_of(*lengths), sum(lengths)
    num_samples = (epochs * tokens - 1) // seq_length
    documents = range(len(lengths))
    dataset = GPTDataset(indexed, documents, seq_length=seq_length, num_samples=num_samples, seed=seed)
    assert len(dataset) == num_samples
    assert sorted(dataset.shuffle_index[:num_samples]) == list(range(num_samples))

    orders = dataset.document_index.reshape(-1, len(lengths))
    assert all(sorted(order) == list(documents) for order in orders)
    stream = np.concatenate([indexed.run(document, 0, 10**6) for document in dataset.document_index])
    for epoch in stream.reshape(-1, tokens):
        assert sorted(epoch) == list(range(tokens))

    for sample, stream_sample in enumerate(dataset.shuffle_index[:num_samples]):
        start = stream_sample * seq_length
        assert dataset[sample].tolist() == stream[start : start + seq_length + 1].tolist()
        assert dataset[sample].dtype == np.int64


@given(lengths=lengths, seed=st.integers(0, 9), short=st.integers(1, 20), longer=st.integers(0, 20))
@fixture_is_a_function
def test_a_longer_run_begins_with_the_samples_of_a_shorter(
    dataset_of: DatasetOf, lengths: list[int], seed: int, short: int, longer: int
) -> None:
    indexed, documents = dataset_of(*lengths), range(len(lengths))
    few, many = (
        GPTDataset(indexed, documents, seq_length=5, num_samples=count, seed=seed) for count in (short, short + longer)
    )
    assert [few[sample].tolist() for sample in range(short)] == [many[sample].tolist() for sample in range(short)]


def test_the_seed_decides_the_order(dataset_of: DatasetOf) -> None:
    indexed = dataset_of(*[7] * 50)

    def order(seed: int) -> list[int]:
        dataset = GPTDataset(indexed, range(50), seq_length=7, num_samples=49, seed=seed)
        return [int(dataset[sample][0]) for sample in range(49)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != sorted(order(1))


def test_other_data_seed_or_length_has_another_cached_order(dataset_of: DatasetOf, tmp_path: Path) -> None:
    one, other = dataset_of(5, 6, 7, 8), dataset_of(8, 7, 6, 5)
    cache = IndexCache(tmp_path)
    for indexed, documents, seq_length, seed in [
        (one, range(4), 4, 1),
        (other, range(4), 4, 1),
        (one, range(1, 3), 4, 1),
        (one, range(2, 4), 4, 1),
        (one, range(4), 3, 1),
        (one, range(4), 4, 2),
    ]:
        before = len(list(tmp_path.glob("*.json")))
        kept, drawn = (
            GPTDataset(indexed, documents, seq_length=seq_length, num_samples=9, seed=seed, cache=each)
            for each in (cache, None)
        )
        assert [kept[sample].tolist() for sample in range(9)] == [drawn[sample].tolist() for sample in range(9)]
        assert len(list(tmp_path.glob("*.json"))) == before + 1


def test_only_the_documents_of_the_range_are_read(dataset_of: DatasetOf) -> None:
    dataset = GPTDataset(dataset_of(9, 9, 9), range(1, 2), seq_length=4, num_samples=7, seed=0)
    seen = {int(token) for sample in range(7) for token in dataset[sample]}
    assert seen == set(range(9, 18))


def test_tokens_beyond_32_bits_are_found(tmp_path: Path) -> None:
    """Three documents of 2^31 - 1 tokens each, the most that the format takes, in a file of holes."""
    prefix, longest, length = tmp_path / "long", 2**31 - 1, 1_000_000
    with IndexedDatasetWriter(prefix, vocab_size=50257):
        pass
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 4)
    lengths, offsets, bounds = [longest] * 3, [2 * longest * each for each in range(3)], range(4)
    index = header + struct.pack("<3i", *lengths) + struct.pack("<3q", *offsets) + struct.pack("<4q", *bounds)
    (tmp_path / "long.idx").write_bytes(index)
    with (tmp_path / "long.bin").open("r+b") as data:
        data.truncate(6 * longest)
        for document in range(3):
            data.seek(2 * ((document + 1) * longest - 1))  # the last token of each document
            data.write(struct.pack("<H", 1000 + document))
    indexed, epochs = IndexedDataset(prefix), 2
    num_samples = (epochs * 3 * longest - 1) // length
    dataset = GPTDataset(indexed, range(3), seq_length=length, num_samples=num_samples, seed=3, vocab_size=50257)
    stream = {2**31 - 2 + place * longest: 1000 + int(each) for place, each in enumerate(dataset.document_index)}
    assert max(stream) > 2**33
    where = {int(each): sample for sample, each in enumerate(dataset.shuffle_index[:num_samples])}
    for at, token in stream.items():
        if at // length in where:
            sample = dataset[where[at // length]]
            assert sample[at % length] == token
            assert sample.sum() == token  # and all else is a hole


def test_an_id_beyond_the_vocabulary_is_found_when_its_sample_is_read(dataset_of: DatasetOf, tmp_path: Path) -> None:
    indexed = dataset_of(5, 6)
    whole, checked = (
        GPTDataset(indexed, range(2), seq_length=5, num_samples=2, seed=0, vocab_size=size) for size in (11, 10)
    )
    assert sorted({int(token) for sample in range(2) for token in whole[sample]}) == list(range(11))
    with pytest.raises(DataError) as raised:
        [checked[sample] for sample in range(2)]
    assert str(raised.value) == (
        f"{indexed.prefix}.bin has the token id 10 at byte 40 (document 1), and the vocabulary has 10 ids from 0: "
        "bring back the file that the run began with, and continue from the last checkpoint"
    )
    with open(f"{indexed.prefix}.bin", "r+b") as file:
        file.write((-1).to_bytes(4, "little", signed=True))
    with pytest.raises(DataError, match=r"has the token id -1 at byte 0 \(document 0\)"):
        [whole[sample] for sample in range(2)]


def test_an_order_that_changed_on_disk_is_refused(dataset_of: DatasetOf, tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    dataset = GPTDataset(dataset_of(5, 6), range(2), seq_length=5, num_samples=2, seed=0, cache=cache)
    (order,) = tmp_path.glob("*-shuffle_index.npy")
    with order.open("r+b") as file:
        file.seek(-16, os.SEEK_END)
        file.write(np.array([10**6, 10**6]).tobytes())
    with pytest.raises(DataError, match=r"order of the samples of .* has changed since the start, and sample 0 is"):
        dataset[0]


def test_too_little_text_for_one_sample_is_refused_with_the_numbers(dataset_of: DatasetOf) -> None:
    indexed = dataset_of(5, 3)
    GPTDataset(indexed, range(2), seq_length=7, num_samples=3, seed=0)
    with pytest.raises(DataError, match=r"documents \[0, 2\) .* hold 8 tokens .* 1 = 9: shorten"):
        GPTDataset(indexed, range(2), seq_length=8, num_samples=1, seed=0)


@given(
    # Where a document is empty, Megatron may name it and we the next: the same token.
    lengths=lengths.map(lambda each: [max(1, length) for length in each]),
    seq_length=st.integers(1, 8),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@fixture_is_a_function
def test_samples_begin_where_megatron_begins_them(
    dataset_of: DatasetOf, lengths: list[int], seq_length: int, epochs: int, seed: int
) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    tokens = sum(lengths)
    num_samples = (epochs * tokens - 1) // seq_length
    dataset = GPTDataset(
        dataset_of(*lengths),
        range(len(lengths)),
        seq_length=seq_length,
        num_samples=num_samples,
        seed=seed,
    )
    theirs = helpers.build_sample_idx(
        np.array(lengths, np.int32),
        dataset.document_index,
        seq_length,
        len(dataset.document_index) // len(lengths),
        tokens,
    )
    ours = [list(dataset.locate(sample)) for sample in range(num_samples)]
    assert ours == theirs[:num_samples].tolist()
