"""Ranks that share the tokens of every token slice: batch sizes, data, messages and refusals.

The ladders have their losses and gradients.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.runtime.initialize import for_deepspeed
from tests.distributed import run_distributed
from tests.runtime.training import ROWS, Setup, batches_of, build, feed

CUT = (12, 2, 4, 6)
FACTS = Setup(dp=2, sp=2, cut=CUT, micro_batches=3)


def _facts() -> dict[str, Any]:
    """Batch sizes, data and messages of an engine, and its refusals."""
    dataset = TensorDataset(torch.arange(24))
    sizes = {"train_batch_size": ROWS * 3 * FACTS.dp}
    engine = build(FACTS, config=sizes)
    found: dict[str, Any] = {"sizes": [engine.train_batch_size()]}

    def exchanges() -> int:
        counts = engine.ledger.collectives.counts()
        return next(count for group, count in counts.items() if group.startswith("sequence-parallel ranks#"))

    by_data_parallel_rank = iter(batches_of(FACTS, engine.grid.get_data_parallel_rank()))
    with pytest.raises(UserError) as other_data:
        engine.train_batch(by_data_parallel_rank)
    found["other data"] = str(other_data.value)
    with pytest.raises(PlanError) as refused:
        engine.train_batch(feed(engine, FACTS), token_slices=(11, 13))
    engine.train_batch(feed(engine, FACTS))  # The first one compares layers, with more exchanges.
    found |= {"refused": str(refused.value), "samples": engine.global_samples}
    before, _ = exchanges(), engine.train_batch(feed(engine, FACTS))
    found["exchanges"] = exchanges() - before
    losses = engine.eval_batch(feed(engine, FACTS), reduce_output=None)
    found["losses"] = [loss.item() for loss in losses]
    found["mean"] = engine.eval_batch(feed(engine, FACTS)).item()
    for change, size in ((engine.set_train_batch_size, ROWS * 5 * FACTS.dp), (engine.set_train_micro_batch_size, 3)):
        change(size)
        found["sizes"].append(engine.train_batch_size())
    found["micro-batches"] = engine.micro_batches
    found["read"] = [list(engine.deepspeed_io(dataset, route=route).data_sampler) for route in ("train", "eval")]
    found["replica"] = engine.replica
    return found


@pytest.fixture(scope="module")
def facts() -> list[dict[str, Any]]:
    return run_distributed(_facts, 4)


MICRO, COUNT = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
LAYOUT = ParallelLayout(data_parallel_size=3, sequence_parallel_size=4)


@pytest.mark.parametrize("given", [{}, {MICRO: 1}, {COUNT: 2}, {MICRO: 1, COUNT: 2}, {"bf16": {"enabled": True}}])
def test_deepspeed_gets_sizes_as_it_counts_them(given: dict[str, Any]) -> None:
    assert for_deepspeed({"train_batch_size": 6, **given}, LAYOUT) == {"train_batch_size": 24, **given}
    assert for_deepspeed(given, LAYOUT) == given


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "one sequence x data-parallel size 3 = 3"),
        ({MICRO: 2}, f"{MICRO} 2 x data-parallel size 3 = 6"),
        ({MICRO: 1, COUNT: 1}, f"{MICRO} 1 x {COUNT} 1 x data-parallel size 3 = 3"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_as_the_user_counts(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"^train_batch_size 8 does not fit {line}: change one of them"):
        for_deepspeed({"train_batch_size": 8, **given}, LAYOUT)


def test_batch_sizes_count_every_sequence_once(facts: list[dict[str, Any]]) -> None:
    for found in facts:
        assert found["sizes"] == [ROWS * 3 * 2, ROWS * 5 * 2, 3 * 5 * 2]
        assert found["samples"] == ROWS * 3 * 2
        assert found["micro-batches"] == 5


def test_ranks_of_a_replica_read_the_same_samples_and_replicas_read_others(facts: list[dict[str, Any]]) -> None:
    for first, same, other, same_as_other in zip(*(found["read"] for found in facts), strict=True):
        assert (first, other) == (same, same_as_other)
        assert sorted(first + other) == list(range(24))
    assert [found["replica"] for found in facts] == [0, 0, 1, 1]


def test_other_data_on_ranks_that_share_sequences_is_refused(facts: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(facts):
        members = "0, 1" if rank < 2 else "2, 3"
        assert found["other data"].startswith(f"ranks {members} share every sequence and were given different micro-")


def test_losses_of_micro_batches_are_those_of_whole_sequences(facts: list[dict[str, Any]]) -> None:
    for replica in (facts[:2], facts[2:]):
        assert replica[0]["losses"] == replica[1]["losses"]
    mean = np.mean([facts[rank]["losses"] for rank in (0, 2)])
    assert [found["mean"] for found in facts] == pytest.approx([mean] * 4, rel=1e-6)


def test_the_ledger_counts_head_exchanges(facts: list[dict[str, Any]]) -> None:
    """One there and one back, forward and backward, of each layer, token slice and micro-batch."""
    assert [found["exchanges"] for found in facts] == [4 * FACTS.num_blocks * len(CUT) * FACTS.micro_batches] * 4


def test_lengths_that_ranks_cannot_share_are_refused_before_anything_runs(facts: list[dict[str, Any]]) -> None:
    line = "token slice 0 of 11,13 has 11 tokens, which 2 sequence-parallel ranks cannot share evenly"
    assert all(found["refused"].startswith(line) for found in facts)
