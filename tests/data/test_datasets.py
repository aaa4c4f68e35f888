"""The datasets of a run: which documents, which blend, how many samples, in Megatron's very order; random tokens.

Samples are compared with the stream of tokens.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_terapipe.config import DataConfig
from megatron_terapipe.data import blend_order
from megatron_terapipe.data import datasets as module
from megatron_terapipe.data.blend_order import BlendOrder
from megatron_terapipe.data.datasets import (
    BlendedDataset,
    DatasetSplits,
    GPTDataset,
    build_datasets,
    mock_datasets,
    split_ranges,
)
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


def whole_order(dataset: GPTDataset, epochs: int) -> list[np.ndarray]:
    """Documents [epochs, documents] and samples [samples] of epochs, in their order."""
    orders = [dataset.order(epoch) for epoch in range(epochs)]
    return [np.stack([each.documents[:] for each in orders]), np.concatenate([each.samples[:] for each in orders])]


def order_before(lengths: list[int], seq_length: int, epochs: int, seed: int) -> list[np.ndarray]:
    """The same, of all epochs at once: as this trainer drew them until it drew epochs when they are needed."""
    tokens = sum(lengths)
    documents = np.empty((epochs, len(lengths)), np.int32)
    samples = np.empty((epochs * tokens - 1) // seq_length, np.int64)
    for epoch in range(epochs):
        random = np.random.RandomState([seed, epoch] if epoch else seed)
        documents[epoch] = np.arange(len(lengths))
        random.shuffle(documents[epoch])
        first, end = (max(0, (e * tokens - 1) // seq_length) for e in (epoch, epoch + 1))
        samples[first:end] = np.arange(first, end)
        random.shuffle(samples[first:end])
    return [documents, samples]


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
    document_index, shuffle_index = whole_order(dataset, epochs)
    assert sorted(shuffle_index) == list(range(num_samples))

    assert all(sorted(order) == list(documents) for order in document_index)
    stream = np.concatenate([indexed.run(document, 0, 10**6) for document in document_index.reshape(-1)])
    for epoch in stream.reshape(-1, tokens):
        assert sorted(epoch) == list(range(tokens))
    for ours, before in zip(
        (document_index, shuffle_index), order_before(lengths, seq_length, epochs, seed), strict=True
    ):
        assert ours.tolist() == before.tolist()

    for sample, stream_sample in enumerate(shuffle_index):
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


@pytest.fixture
def stores_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders of small epochs are stored, too."""
    monkeypatch.setattr(module, "_STORED_FROM", 0)


@pytest.mark.usefixtures("stores_all")
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
        assert len(list(tmp_path.glob("*.json"))) == before + kept.epoch_of(8) + 1


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
    document_index, shuffle_index = whole_order(dataset, epochs)
    stream = {
        2**31 - 2 + place * longest: 1000 + each for place, each in enumerate(document_index.reshape(-1).tolist())
    }
    assert max(stream) > 2**33
    where = {int(each): sample for sample, each in enumerate(shuffle_index)}
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


@pytest.mark.usefixtures("stores_all")
def test_an_order_that_changed_on_disk_is_refused(dataset_of: DatasetOf, tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    dataset = GPTDataset(dataset_of(5, 6), range(2), seq_length=5, num_samples=2, seed=0, cache=cache)
    dataset.order(0)
    (order,) = tmp_path.glob("*-samples.npy")
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
        whole_order(dataset, epochs)[0].reshape(-1),
        seq_length,
        epochs,
        tokens,
    )
    ours = [dataset.locate(sample) for sample in range(num_samples)]
    assert [[epoch * len(lengths) + position, token] for epoch, position, token in ours] == theirs[
        :num_samples
    ].tolist()


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
    theirs = list(zip(dataset_index.tolist(), dataset_sample_index.tolist(), strict=True))
    assert entries(BlendOrder(weights, num_samples)) == theirs


def entries(order: BlendOrder) -> list[tuple[int, int]]:
    return [order[sample] for sample in range(len(order))]


def each_furthest_below_its_share(weights: list[float], num_samples: int) -> list[tuple[int, int]]:
    """Dataset and number of each sample, by the definition: all datasets are compared for each sample."""
    shares = (np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)).tolist()
    given, chosen = [0] * len(shares), []
    for sample in range(num_samples):
        lags = [share * float(sample or 1) - of for share, of in zip(shares, given, strict=True)]
        dataset = lags.index(max(lags))
        chosen.append((dataset, given[dataset]))
        given[dataset] += 1
    return chosen


@given(
    weights=weights_in_any_unit, num_samples=st.integers(1, 400), block=st.integers(1, 500), stored=st.integers(1, 5)
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_the_order_is_the_same_in_blocks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, weights: list[float], num_samples: int, block: int, stored: int
) -> None:
    monkeypatch.setattr(blend_order, "_BLOCK", block)
    monkeypatch.setattr(blend_order, "_BLOCKS_STORED_ONCE", stored)
    wanted, order = each_furthest_below_its_share(weights, num_samples), BlendOrder(weights, num_samples)
    for sample in (num_samples - 1, num_samples // 2):
        assert order[sample] == wanted[sample]
    assert entries(order) == wanted
    datasets = [dataset for dataset, _ in wanted[: num_samples // 3]]
    assert order.given(num_samples // 3).tolist() == [datasets.count(each) for each in range(len(weights))]


@pytest.mark.parametrize("kind", ["random", "equal", "tenths"])
def test_the_compiled_order_is_the_order(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored in the second half, too."""
    random = np.random.default_rng(0)
    weights = {"random": random.random(99), "equal": np.ones(99), "tenths": random.integers(1, 10, 99) / 10}[kind]
    monkeypatch.setattr(blend_order, "_BLOCK", 5000)
    monkeypatch.setattr(blend_order, "_BLOCKS_STORED_ONCE", 2)
    monkeypatch.setattr(blend_order, "_COMPILED_FROM", 0)
    wanted = each_furthest_below_its_share(weights.tolist(), 25_000)
    for _ in range(2):
        orders = [BlendOrder(weights.tolist(), 25_000, IndexCache(tmp_path)) for _ in range(2)]
        assert [orders[1][24_999], *entries(orders[0])] == [wanted[-1], *wanted]
        assert len(list(tmp_path.glob("*-given.npy"))) == 2


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


def shares_of(split: str) -> tuple[float, float, float]:
    shares = DataConfig(data_path=("any",), split=split).split_shares()
    return shares


def datasets(data_path: list[str], split: str, seq_length: int, num_samples: tuple[int, int, int]) -> DatasetSplits:
    data = DataConfig(data_path=tuple(data_path), split=split)
    return build_datasets(data, seq_length=seq_length, num_samples=num_samples, seed=1)


def prefixes(tmp_path: Path, **lengths: int) -> list[str]:
    """Write datasets of ten documents each, each with another token; return the prefixes."""
    for number, (name, length) in enumerate(lengths.items()):
        with IndexedDatasetWriter(tmp_path / name, vocab_size=300) as writer:
            for _ in range(10):
                writer.add_document([number] * length)
    return [str(tmp_path / name) for name in lengths]


def test_the_parts_have_the_given_numbers_of_samples_and_only_those_that_are_needed_documents(tmp_path: Path) -> None:
    data_path = prefixes(tmp_path, a=20)
    parts = datasets(data_path, "8,1,1", 10, (30, 4, 0))
    assert (len(parts.train), len(parts.valid), parts.test) == (30, 4, None)
    assert parts.train[29].shape == (11,)
    assert datasets(data_path, "99,1,0", 8, (5, 0, 0)).valid is None
    with pytest.raises(DataError, match=r"no document of the 10 in .*/a for validation.*4 samples"):
        datasets(data_path, "99,1,0", 8, (5, 4, 0))


@pytest.mark.parametrize(("weights", "shares"), [((0.75, 0.25), (75, 25)), ((1.0, 1.0), (50, 50)), (None, (20, 80))])
def test_prefixes_are_blended_by_weight_or_else_by_size(
    tmp_path: Path, weights: tuple[float, float] | None, shares: tuple[int, int]
) -> None:
    a, b = prefixes(tmp_path, a=20, b=80)
    data_path = [str(weights[0]), a, str(weights[1]), b] if weights else [a, b]
    train = datasets(data_path, "1", 8, (100, 0, 0)).train
    drawn = np.array([int(train[sample][0]) for sample in range(100)])
    # A sample of a uniform dataset shows which one it came from.
    assert tuple(np.bincount(drawn).tolist()) == shares


def test_each_part_may_have_data_of_its_own(tmp_path: Path) -> None:
    a, b, c = prefixes(tmp_path, a=20, b=20, c=20)
    data = DataConfig(train_data_path=("0.5", a, "0.5", b), valid_data_path=(c,), mmap_warmup=True)
    parts = build_datasets(data, seq_length=8, num_samples=(40, 10, 0), seed=1)
    assert [int(parts.train[sample][0]) for sample in range(4)] == [0, 1, 0, 1]
    # All ten documents, and not those that a split would leave.
    assert {int(parts.valid[sample][0]) for sample in range(10)} == {2}
    assert isinstance(parts.valid, GPTDataset)
    assert sorted(parts.valid.order(0).documents) == list(range(10))
    with pytest.raises(DataError, match="--test-data-path is needed for testing of 3 samples: give it"):
        build_datasets(data, seq_length=8, num_samples=(40, 10, 3), seed=1)


@pytest.mark.parametrize("epochs", [1, 3])
def test_exactly_so_many_epochs(tmp_path: Path, epochs: int) -> None:
    (a,) = prefixes(tmp_path, a=20)
    data = DataConfig(data_path=(a,), split="5,5", train_data_exact_num_epochs=epochs)
    available = (epochs * 100 - 1) // 8
    parts = build_datasets(data, seq_length=8, num_samples=(3, 3, 0), seed=1)
    assert isinstance(parts.train, GPTDataset)
    assert isinstance(parts.valid, GPTDataset)
    assert (len(parts.train), parts.train.epoch_of(available - 1)) == (available, epochs - 1)
    assert len(parts.valid) == 3
    build_datasets(data, seq_length=8, num_samples=(available, 0, 0), seed=1)
    with pytest.raises(DataError, match=rf"makes {available} samples of .*/a and the run takes {available + 1}: raise"):
        build_datasets(data, seq_length=8, num_samples=(available + 1, 0, 0), seed=1)


@pytest.mark.usefixtures("stores_all")
def test_an_index_is_cached_in_the_folder_of_the_data_if_that_can_be_written(tmp_path: Path) -> None:
    def samples() -> list[list[int]]:
        train = build_datasets(DataConfig(data_path=(a,)), seq_length=8, num_samples=(9, 0, 0), seed=1).train
        return [train[number].tolist() for number in range(9)]

    (a,) = prefixes(tmp_path, a=20)
    (tmp_path / "index_cache").write_text("in the way")
    plain = samples()
    (tmp_path / "index_cache").unlink()
    assert samples() == plain
    assert len(list((tmp_path / "index_cache").glob("*.npy"))) == 3
    assert samples() == plain


@pytest.mark.parametrize("epochs", [None, 3])
@pytest.mark.parametrize("blended", [False, True])
def test_without_reads_only_the_numbers_of_samples_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int | None, blended: bool
) -> None:
    a, b = prefixes(tmp_path, a=40, b=60)
    data = DataConfig(
        data_path=("1", a, "2", b) if blended else (a,),
        split="8,2",
        data_cache_path="none",
        train_data_exact_num_epochs=epochs,
    )
    read = build_datasets(data, seq_length=8, num_samples=(20, 5, 0), seed=1)
    monkeypatch.setattr(module, "draw_order", lambda *_, **__: pytest.fail("drawn"))
    unread = build_datasets(data, seq_length=8, num_samples=(20, 5, 0), seed=1, reads=False)
    assert (len(unread.train), len(unread.valid), unread.test) == (len(read.train), len(read.valid), read.test)
    with pytest.raises(AssertionError, match="reads no data"):
        unread.train[0]


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize(("seq_length", "samples"), [(100_000, 5), (8, 100_000)])
def test_faults_of_the_data_are_found_on_every_rank(
    tmp_path: Path, blended: bool, seq_length: int, samples: int
) -> None:
    a, b = prefixes(tmp_path, a=40, b=60)
    data = DataConfig(data_path=("1", a, "2", b) if blended else (a,), split="8,2", train_data_exact_num_epochs=3)
    said = []
    for reads in (True, False):
        with pytest.raises(DataError) as caught:
            build_datasets(data, seq_length=seq_length, num_samples=(samples, 5, 0), seed=1, reads=reads)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_blend_of_one_epoch_is_megatrons_sample_for_sample(tmp_path: Path) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from megatron.core.datasets.blended_dataset import BlendedDataset as MegatronBlendedDataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronIndexedDataset
    from megatron.core.datasets.utils import Split

    class Vocabulary:
        eod, pad, vocab_size = 99_999, 99_998, 100_000
        unique_identifiers: dict[str, str] = {}  # noqa: RUF012 - the name and type they read

    random = np.random.default_rng(0)
    names = [str(tmp_path / name) for name in "abc"]
    for number, name in enumerate(names):
        with IndexedDatasetWriter(name, vocab_size=1 << 20) as writer:
            for length in random.integers(1, 60, size=100).tolist():
                writer.add_document(random.integers(0, 30_000, size=length) + 30_000 * number)
    weights, wanted = [0.6, 0.3, 0.1], 100
    words = tuple(word for pair in zip(map(str, weights), names, strict=True) for word in pair)
    ours = build_datasets(
        DataConfig(data_path=words, split="8,2"), seq_length=32, num_samples=(wanted, 0, 0), seed=1234
    ).train
    assert isinstance(ours, BlendedDataset)
    config = megatron.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=32,
        split="8,2,0",
        blend=(names, weights),
        tokenizer=Vocabulary(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    theirs = MegatronBlendedDataset(
        [
            megatron.GPTDataset(
                MegatronIndexedDataset(name), name, np.arange(80, dtype=np.int32), of_name, Split.train, config
            )
            for name, of_name in zip(names, (61, 31, 11), strict=True)
        ],
        weights,
        wanted,
        config,
    )
    assert [dataset for dataset, _ in entries(ours.order)] == theirs.dataset_index.tolist()
    for sample in range(wanted):
        assert ours[sample][:-1].tolist() == theirs[sample]["tokens"].tolist()
        assert ours[sample][1:].tolist() == theirs[sample]["labels"].tolist()


def test_random_samples_depend_on_seed_part_and_number_only() -> None:
    splits, again = (mock_datasets(seq_length=999, num_samples=(4, 2, 0), vocab_size=7, seed=1) for _ in range(2))
    assert (len(splits.train), len(splits.valid), splits.test) == (4, 2, None)
    assert splits.train[0].shape == (1000,)
    assert set(splits.train[0].tolist()) == set(range(7))
    for sample in reversed(range(4)):
        assert np.array_equal(splits.train[sample], again.train[sample])
    assert not np.array_equal(splits.train[0], splits.train[1])
    assert not np.array_equal(splits.train[0], splits.valid[0])
