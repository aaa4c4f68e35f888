"""Samples: what they hold, in which order, against the stream of tokens and against Megatron's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_terapipe.config import DataConfig
from megatron_terapipe.data.blended_dataset import BlendedDataset, interleave
from megatron_terapipe.data.gpt_dataset import (
    DatasetSplits,
    GPTDataset,
    build_datasets,
    split_ranges,
)
from megatron_terapipe.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_terapipe.errors import DataError

DatasetOf = Callable[..., IndexedDataset]

lengths = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda each: sum(each) > 8)
fixture_is_a_function = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    assert sorted(dataset.shuffle_index) == list(range(num_samples))

    orders = dataset.document_index.reshape(-1, len(lengths))
    assert all(sorted(order) == list(documents) for order in orders)
    stream = np.concatenate([indexed.get(document) for document in dataset.document_index])
    for epoch in stream.reshape(-1, tokens):
        assert sorted(epoch) == list(range(tokens))

    for sample, stream_sample in enumerate(dataset.shuffle_index):
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


def test_only_the_documents_of_the_range_are_read(dataset_of: DatasetOf) -> None:
    dataset = GPTDataset(dataset_of(9, 9, 9), range(1, 2), seq_length=4, num_samples=7, seed=0)
    seen = {int(token) for sample in range(7) for token in dataset[sample]}
    assert seen == set(range(9, 18))


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
    ours = np.stack(dataset.locate(np.arange(num_samples)), axis=1)
    assert ours.tolist() == theirs[:num_samples].tolist()


def test_one_epoch_is_megatrons_sample_for_sample(dataset_of: DatasetOf) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronIndexedDataset
    from megatron.core.datasets.utils import Split

    class Vocabulary:
        eod, pad, vocab_size = 99_999, 99_998, 100_000
        unique_identifiers: dict[str, str] = {}  # noqa: RUF012 - the name and type they read

    indexed = dataset_of(*np.random.default_rng(0).integers(1, 60, size=200).tolist())
    documents = split_ranges(shares_of("969,30,1"), 200)[0]
    num_samples = (int(indexed.sequence_lengths[: documents.stop].sum()) - 1) // 32
    config = megatron.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=32,
        split="969,30,1",
        blend=([indexed.prefix], None),
        tokenizer=Vocabulary(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    theirs = megatron.GPTDataset(
        MegatronIndexedDataset(indexed.prefix),
        indexed.prefix,
        np.arange(documents.start, documents.stop, dtype=np.int32),
        num_samples,
        Split.train,
        config,
    )
    ours = GPTDataset(indexed, documents, seq_length=32, num_samples=num_samples, seed=1234)
    assert len(ours) == len(theirs)
    for sample in range(num_samples):
        assert ours[sample][:-1].tolist() == theirs[sample]["tokens"].tolist()
        assert ours[sample][1:].tolist() == theirs[sample]["labels"].tolist()


@pytest.mark.parametrize(
    ("split", "num_documents", "bounds"),
    [
        ("969,30,1", 1000, (969, 999, 1000)),
        ("969,30,1", 249, (241, 249, 249)),
        ("100,0,0", 7, (7, 7, 7)),
        ("1", 7, (7, 7, 7)),
        ("0.5, 0.5", 10, (5, 10, 10)),
    ],
)
def test_documents_are_divided_in_proportion(split: str, num_documents: int, bounds: tuple[int, int, int]) -> None:
    train, valid, test = split_ranges(shares_of(split), num_documents)
    assert (train, valid, test) == (
        range(bounds[0]),
        range(bounds[0], bounds[1]),
        range(bounds[1], bounds[2]),
    )


@given(
    shares=st.lists(st.integers(0, 999), min_size=3, max_size=3).filter(lambda each: each[0] > 0),
    num_documents=st.integers(0, 5000),
)
@settings(max_examples=50, deadline=None)
def test_documents_are_divided_as_megatron_divides(shares: list[int], num_documents: int) -> None:
    theirs = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    text = ",".join(map(str, shares))
    matrix = theirs.convert_split_vector_to_split_matrix(theirs.parse_and_normalize_split(text))
    ours = split_ranges(shares_of(text), num_documents)
    assert sum(map(len, ours)) == num_documents
    for part, bookends in zip(ours, matrix, strict=True):
        if bookends is None:
            assert not part
        else:
            assert (part.start, part.stop) == tuple(round(end * float(num_documents)) for end in bookends)


@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    num_samples=st.integers(0, 300),
    more=st.integers(0, 50),
)
@settings(deadline=None)
def test_every_dataset_keeps_its_share_at_every_moment(weights: list[int], num_samples: int, more: int) -> None:
    order = interleave([float(weight) for weight in weights], num_samples)
    assert len(order) == num_samples
    for number, weight in enumerate(weights):
        given_so_far = np.cumsum(order == number)
        due = weight / sum(weights) * np.arange(1, num_samples + 1)
        assert np.all(abs(given_so_far - due) <= max(1.0, len(weights) / 2))
    longer = interleave([float(weight) for weight in weights], num_samples + more)
    assert longer[:num_samples].tolist() == order.tolist()


def test_a_blend_draws_each_dataset_in_its_own_order() -> None:
    letters = [[np.array([10 * dataset + sample]) for sample in range(4)] for dataset in range(2)]
    blend = BlendedDataset(letters, interleave([3.0, 1.0], 5))
    assert [int(blend[sample][0]) for sample in range(5)] == [0, 1, 10, 2, 3]


def shares_of(split: str) -> tuple[float, float, float]:
    return DataConfig(data_path=("any",), split=split).split_shares()


def datasets(data_path: list[str], split: str, seq_length: int, num_samples: tuple[int, int, int]) -> DatasetSplits:
    data = DataConfig(data_path=tuple(data_path), split=split)
    return build_datasets(data, seq_length=seq_length, num_samples=num_samples, seed=1)


def prefixes(tmp_path: Path, **lengths: int) -> list[str]:
    """Write datasets of ten documents each, whose tokens tell them apart; return the prefixes."""
    for number, (name, length) in enumerate(lengths.items()):
        with IndexedDatasetWriter(tmp_path / name, vocab_size=300) as writer:
            for _ in range(10):
                writer.add_document([number] * length)
    return [str(tmp_path / name) for name in lengths]


def test_the_parts_are_built_with_the_samples_asked_for(tmp_path: Path) -> None:
    data_path = prefixes(tmp_path, a=20)
    parts = datasets(data_path, "8,1,1", 10, (30, 4, 0))
    assert parts.train is not None
    assert parts.valid is not None
    assert (len(parts.train), len(parts.valid), parts.test) == (30, 4, None)
    assert parts.train[29].shape == (11,)


@pytest.mark.parametrize(("weights", "shares"), [((0.75, 0.25), (75, 25)), ((1.0, 1.0), (50, 50)), (None, (20, 80))])
def test_prefixes_are_blended_by_weight_or_else_by_size(
    tmp_path: Path, weights: tuple[float, float] | None, shares: tuple[int, int]
) -> None:
    a, b = prefixes(tmp_path, a=20, b=80)
    data_path = [str(weights[0]), a, str(weights[1]), b] if weights else [a, b]
    train = datasets(data_path, "1", 8, (100, 0, 0)).train
    assert train is not None
    drawn = np.array([int(train[sample][0]) for sample in range(100)])
    # A sample of a uniform dataset shows which one it came from.
    assert tuple(np.bincount(drawn).tolist()) == shares


def test_a_part_without_documents_is_refused_only_when_needed(tmp_path: Path) -> None:
    data_path = prefixes(tmp_path, a=20)
    assert datasets(data_path, "99,1,0", 8, (5, 0, 0)).valid is None
    with pytest.raises(DataError, match=r"no document of the 10 in .*/a for validation.*4 samples"):
        datasets(data_path, "99,1,0", 8, (5, 4, 0))


def test_a_path_that_does_not_exist_names_both_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.bin and .*absent\.idx"):
        datasets([str(tmp_path / "absent")], "1", 8, (1, 0, 0))
