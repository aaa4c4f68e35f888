"""The order of micro-batches: independent of ranks, resumable, and safe in the background."""

import threading
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_terapipe.data.loader import MicroBatchLoader
from megatron_terapipe.errors import ConfigError


class Numbers:
    """Sample n is the tokens n, n + 1, n + 2."""

    def __init__(self, size: int, fails_at: int | None = None) -> None:
        self.size = size
        self.fails_at = fails_at
        self.num_read = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
        self.num_read += 1
        if sample == self.fails_at:
            raise OSError(f"sample {sample} cannot be read")
        return np.arange(sample, sample + 3)


def samples_of(count: int, *shape: int, size: int = 1000, num_workers: int = 0) -> list[list[int]]:
    """Return the samples' numbers in the first micro-batches; shape: the loader's four integers."""
    with MicroBatchLoader(Numbers(size), *shape, num_workers=num_workers) as batches:
        return [batch.tokens[:, 0].tolist() for batch in islice(batches, count)]


def test_ranks_take_turns() -> None:
    #        micro-batch 0     1
    assert samples_of(2, 2, 0, 2) == [[0, 1], [4, 5]]
    assert samples_of(2, 2, 1, 2) == [[2, 3], [6, 7]]


@settings(max_examples=30, deadline=None)
@given(
    micro_batch_size=st.integers(1, 3),
    data_parallel_size=st.sampled_from([1, 2, 3, 4, 6]),
    consumed=st.integers(0, 50),
    num_workers=st.integers(0, 2),
)
def test_a_global_batch_is_the_same_samples_under_every_data_parallel_size(
    micro_batch_size: int, data_parallel_size: int, consumed: int, num_workers: int
) -> None:
    global_batch_size = 36 * micro_batch_size
    per_rank = global_batch_size // (micro_batch_size * data_parallel_size)
    batches = [
        samples_of(
            2 * per_rank,
            micro_batch_size,
            rank,
            data_parallel_size,
            consumed,
            num_workers=num_workers,
        )
        for rank in range(data_parallel_size)
    ]
    for step in range(2):
        start = consumed + step * global_batch_size
        seen = [
            sample
            for of_rank in batches
            for batch in of_rank[step * per_rank : (step + 1) * per_rank]
            for sample in batch
        ]
        assert sorted(seen) == list(range(start, start + global_batch_size))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_resumed_run_goes_on_where_it_stopped(num_workers: int) -> None:
    whole = samples_of(10, 2, 1, 2, 0, num_workers=num_workers)
    resumed = samples_of(6, 2, 1, 2, 4 * 2 * 2, num_workers=num_workers)
    assert whole[4:] == resumed


def test_after_the_last_sample_comes_the_first() -> None:
    assert samples_of(3, 2, 0, 1, 3, size=5) == [[3, 4], [0, 1], [2, 3]]


def test_batches_are_tensors_of_inputs_labels_and_loss_mask() -> None:
    with MicroBatchLoader(Numbers(9), 2, 0, 1, masked_eod=2) as batches:
        batch = next(batches)
    assert batch.tokens.tolist() == [[0, 1], [1, 2]]
    assert batch.labels.tolist() == [[1, 2], [2, 3]]
    assert batch.loss_mask.tolist() == [[1.0, 1.0], [1.0, 0.0]]
    assert (batch.tokens.dtype, batch.loss_mask.dtype) == (torch.int64, torch.float32)
    assert batch.document_starts == ((0,), (0,))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_documents_are_told_apart_when_asked(num_workers: int) -> None:
    with MicroBatchLoader(Numbers(9), 3, 0, 1, num_workers=num_workers, separating_eod=2) as batches:
        assert next(batches).document_starts == ((0,), (0,), (0, 1))
        assert next(batches).document_starts == ((0,), (0,), (0,))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """Runs of one training: ranks, size of a micro-batch, and how many micro-batches a rank has in each step."""
    run = st.tuples(
        st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4).map(sorted)
    )
    return draw(st.lists(run, min_size=1, max_size=4))


@settings(max_examples=60, deadline=None)
@given(runs=histories(), num_workers=st.integers(0, 1))
def test_samples_are_consumed_in_order_whatever_changes_between_runs_and_steps(
    runs: list[tuple[int, int, list[int]]], num_workers: int
) -> None:
    """Over resumes with other ranks and micro-batches, and steps that grow within a run: none left out, none twice."""
    consumed = 0
    for ranks, micro_batch_size, steps in runs:
        of_ranks = [
            samples_of(sum(steps), micro_batch_size, rank, ranks, consumed, num_workers=num_workers)
            for rank in range(ranks)
        ]
        done = 0
        for num_micro_batches in steps:
            micro_batches = [of_rank[done : done + num_micro_batches] for of_rank in of_ranks]
            in_order = [sample for turn in zip(*micro_batches, strict=True) for batch in turn for sample in batch]
            step = micro_batch_size * ranks * num_micro_batches
            assert in_order == [sample % 1000 for sample in range(consumed, consumed + step)]
            done, consumed = done + num_micro_batches, consumed + step


def test_evaluations_read_the_same_samples_under_every_data_parallel_size() -> None:
    alone = samples_of(6, 2, 0, 1)
    together = [samples_of(3, 2, rank, 2) for rank in range(2)]
    assert sorted(alone) == sorted(together[0] + together[1])
    assert samples_of(6, 2, 0, 1) == alone


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_exception_in_the_background_is_raised_in_its_place(num_workers: int) -> None:
    with MicroBatchLoader(Numbers(9, fails_at=5), 2, 0, 1, 0, num_workers) as batches:
        assert next(batches).tokens[:, 0].tolist() == [0, 1]
        assert next(batches).tokens[:, 0].tolist() == [2, 3]
        with pytest.raises(OSError, match="sample 5 cannot be read"):
            next(batches)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_slow_and_uneven_samples_keep_their_order(num_workers: int) -> None:
    class Uneven(Numbers):
        def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
            # What is late in one thread overtakes nothing that is ready in another.
            threading.Event().wait(0.003 * (sample % 3 == 0))
            return super().__getitem__(sample)

    with MicroBatchLoader(Uneven(100), 1, 0, 1, num_workers=num_workers) as batches:
        assert [int(batch.tokens[0, 0]) for batch in islice(batches, 40)] == list(range(40))


def test_a_loader_closed_amid_an_exception_ends_its_threads() -> None:
    before = {*threading.enumerate()}
    with pytest.raises(OSError, match="cannot be read"), MicroBatchLoader(Numbers(9, fails_at=1), 1, 0, 1) as batches:
        for _ in batches:
            pass
    assert before.issuperset(threading.enumerate())


def test_the_background_stays_a_few_batches_ahead_and_ends_on_close() -> None:
    dataset = Numbers(1000)
    before = {*threading.enumerate()}
    batches = MicroBatchLoader(dataset, 1, 0, 1, num_workers=1)
    next(batches)
    assert len({*threading.enumerate()} - before) == 1
    batches.close()
    batches.close()
    assert before.issuperset(threading.enumerate())
    assert dataset.num_read <= 10
    with pytest.raises(StopIteration):
        next(batches)


def test_of_long_samples_fewer_are_prepared_ahead() -> None:
    dataset = Numbers(1000)
    with MicroBatchLoader(dataset, 1, 0, 1, num_workers=1, seq_length=4_000_000) as batches:
        for _ in range(3):
            next(batches)
    assert dataset.num_read <= 5


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 2, 2, 0), r"rank 2 is not in \[0, 2\)"),
        ((0, 0, 1, 0), "micro_batch_size 0"),
        ((1, 0, 1, -1), "consumed_samples -1"),
    ],
)
def test_senseless_sizes_are_refused(shape: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MicroBatchLoader(Numbers(9), *shape)
