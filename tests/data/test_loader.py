"""Micro-batches: documents separated as in Megatron; an order independent of ranks, resumable, in the background."""

import threading
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepspeed_ext.runtime.attention.documents import Documents
from megatron_terapipe.data.loader import MicroBatch, load_micro_batches

SAMPLES = torch.tensor([[1, 2, 0, 3], [4, 0, 0, 5]])


def positions_of(batch: MicroBatch) -> torch.Tensor:
    """Positions as layers get them."""
    return Documents(batch.document_starts).positions(0, batch.tokens.shape[1])


ENDS = torch.tensor([[1, 0, 2, 3, 0, 4], [0, 0, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize(
    ("samples", "ends", "starts", "positions", "mask"),
    [
        (SAMPLES, {}, [(0,)] * 2, [[0, 1, 2]] * 2, [[1, 1, 1]] * 2),
        (SAMPLES, {"masked_eod": 0}, [(0,)] * 2, [[0, 1, 2]] * 2, [[1, 1, 0], [1, 0, 0]]),
        # The first row's last end is its last input: the document after it is in the next sample.
        (
            ENDS,
            {"separating_eod": 0},
            [(0, 2), (0, 1, 2), (0,)],
            [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2], [0, 1, 2, 3, 4]],
            [[1] * 5] * 3,
        ),
    ],
)
def test_labels_are_the_next_tokens_and_documents_begin_after_ends(
    samples: torch.Tensor, ends: dict[str, int], starts: list[Any], positions: list[Any], mask: list[Any]
) -> None:
    batch = MicroBatch.from_samples(samples, **ends)
    assert batch.tokens.tolist() == samples[:, :-1].tolist() and batch.labels.tolist() == samples[:, 1:].tolist()
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert (list(batch.document_starts), batch.loss_mask.tolist()) == (starts, mask)
    assert positions_of(batch).tolist() == positions
    by_hand = MicroBatch(tokens=batch.tokens, labels=batch.labels, loss_mask=batch.loss_mask)
    assert by_hand.document_starts == ((0,),) * len(samples)


@given(data=st.data(), rows=st.integers(1, 3), seq=st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_documents_are_megatrons(data: st.DataObject, rows: int, seq: int) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    eod = 2
    token = st.integers(0, 4)
    samples = torch.tensor([data.draw(st.lists(token, min_size=seq + 1, max_size=seq + 1)) for _ in range(rows)])
    batch = MicroBatch.from_samples(samples, separating_eod=eod, masked_eod=eod)
    positions = positions_of(batch)
    for row in range(rows):
        starts = torch.tensor(batch.document_starts[row])
        # The document of each position: how many have begun by then.
        document = (starts[None] <= torch.arange(seq)[:, None]).sum(1)
        attends = (document[:, None] == document[None]) & torch.ones(seq, seq, dtype=torch.bool).tril()
        mask, loss_mask, position_ids = megatron._get_ltor_masks_and_position_ids(
            batch.tokens[row], eod, True, True, True, True
        )
        assert torch.equal(~attends, mask[0])
        assert torch.equal(batch.loss_mask[row], loss_mask)
        assert torch.equal(positions[row], position_ids)
        assert batch.document_starts[row][0] == 0
        assert list(batch.document_starts[row]) == sorted(set(batch.document_starts[row]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pinned_batch_is_the_same_in_other_memory() -> None:
    batch = MicroBatch.from_samples(SAMPLES, separating_eod=0, masked_eod=0)
    pinned = batch.pin_memory()
    for ours, theirs in ((pinned.tokens, batch.tokens), (pinned.labels, batch.labels)):
        assert ours.is_pinned()
        assert torch.equal(ours, theirs)
    assert pinned.loss_mask.is_pinned()
    assert torch.equal(pinned.loss_mask, batch.loss_mask)
    assert pinned.document_starts == batch.document_starts


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


SIZE = 50
"""Samples, after the last of which the first follows."""


def samples_of(count: int, *shape: int, num_workers: int) -> list[list[int]]:
    """Return the samples' numbers in the first micro-batches; shape: the loader's four integers."""
    with closing(load_micro_batches(Numbers(SIZE), *shape, num_workers=num_workers)) as batches:
        return [batch.tokens[:, 0].tolist() for batch in islice(batches, count)]


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
            assert in_order == [sample % SIZE for sample in range(consumed, consumed + step)]
            done, consumed = done + num_micro_batches, consumed + step


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_exception_in_the_background_is_raised_in_its_place_and_ends_the_threads(num_workers: int) -> None:
    before = {*threading.enumerate()}
    with closing(load_micro_batches(Numbers(9, fails_at=5), 2, 0, 1, 0, num_workers)) as batches:
        assert next(batches).tokens[:, 0].tolist() == [0, 1]
        assert next(batches).tokens[:, 0].tolist() == [2, 3]
        with pytest.raises(OSError, match="sample 5 cannot be read"):
            next(batches)
    assert before.issuperset(threading.enumerate())


@pytest.mark.parametrize("num_workers", [1, 3])
def test_slow_and_uneven_samples_keep_their_order(num_workers: int) -> None:
    class Uneven(Numbers):
        def __getitem__(self, sample: int, /) -> NDArray[np.int64]:
            # A late sample of one thread is not overtaken by those of others.
            threading.Event().wait(0.003 * (sample % 3 == 0))
            return super().__getitem__(sample)

    with closing(load_micro_batches(Uneven(100), 1, 0, 1, num_workers=num_workers)) as batches:
        assert [int(batch.tokens[0, 0]) for batch in islice(batches, 40)] == list(range(40))


@pytest.mark.parametrize(("seq_length", "most"), [(1, 10), (4_000_000, 3)], ids=["short", "long"])
def test_the_background_stays_a_few_batches_ahead_and_ends_on_close(seq_length: int, most: int) -> None:
    dataset = Numbers(1000)
    before = {*threading.enumerate()}
    batches = load_micro_batches(dataset, 1, 0, 1, num_workers=1, seq_length=seq_length)
    next(batches)
    assert len({*threading.enumerate()} - before) == 1
    batches.close()
    batches.close()
    assert before.issuperset(threading.enumerate())
    assert dataset.num_read <= most
    with pytest.raises(StopIteration):
        next(batches)
