"""The micro-batches that ranks read, and the batches of their token slices."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as draw

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.model.gpt import gpt_loss
from megatron_terapipe.training.micro_batches import further_labels, micro_batches, split_batch
from megatron_terapipe.training.run import prepare
from tests.model.configs import logits_of
from tests.strategies import cuts
from tests.training.gpt_runs import FLAGS

MICRO_BATCHES = 2
WORDS = FLAGS.replace("--data-path unread", "--mock-data --global-batch-size 8 --eval-iters 0 --num-workers 0")


def read(rank: int, words: str) -> torch.Tensor:
    """Tokens of the micro-batches of a rank of four: [2, rows, tokens]."""
    launch = LaunchEnvironment(rank=rank, world_size=4, local_rank=rank, local_size=4)
    run = prepare(parse_arguments(f"{WORDS} {words}".split()), launch)
    reading = SimpleNamespace(reads_data=True)
    with closing(micro_batches(run, reading, run.datasets.train, consumed_samples=0)) as batches:
        return torch.stack([next(batches).tokens for _ in range(MICRO_BATCHES)])


def test_sequence_parallel_ranks_read_the_samples_of_their_replica() -> None:
    of_all = [read(rank, "--context-parallel-size 2") for rank in range(4)]
    assert torch.equal(of_all[0], of_all[1])
    assert torch.equal(of_all[2], of_all[3])
    alone = read(0, "--context-parallel-size 4")
    in_order = torch.stack([of_all[0], of_all[2]], dim=1).flatten(0, 2)
    assert torch.equal(in_order[: len(alone.flatten(0, 1))], alone.flatten(0, 1))
    assert len(in_order.unique(dim=0)) == 8


def batch_of(seq_length: int, mask: torch.Tensor, vocabulary: int = 13) -> MicroBatch:
    samples = torch.randint(0, vocabulary, (len(mask), seq_length + 1), generator=torch.Generator().manual_seed(1))
    return MicroBatch(tokens=samples[:, :-1], labels=samples[:, 1:], loss_mask=mask)


@given(cuts(max_token_slices=6, max_length=9), draw.data())
def test_parts_are_the_batch_with_weights_by_loss_tokens(token_slices: TokenSlices, data: draw.DataObject) -> None:
    seq_length = token_slices.seq_length
    row = draw.lists(draw.sampled_from([0.0, 1.0]), min_size=seq_length, max_size=seq_length)
    mask = torch.tensor(data.draw(draw.tuples(row, row)), dtype=torch.float64)  # also of no token
    batch = batch_of(seq_length, mask)
    parts = split_batch(batch, token_slices)
    assert [part.inputs.shape[1] for part in parts] == list(token_slices.lengths)
    assert torch.equal(torch.cat([part.inputs for part in parts], 1), batch.tokens)
    assert torch.equal(torch.cat([part.labels[0] for part in parts], 1), batch.labels)
    assert torch.equal(torch.cat([part.labels[1] for part in parts], 1), mask)
    logits = torch.randn(2, seq_length, 13, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ends = [0, *torch.tensor(token_slices.lengths).cumsum(0).tolist()]
    total = sum(
        part.loss_weight * gpt_loss(logits_of(logits[:, start:end]), part.labels)
        for part, start, end in zip(parts, ends, ends[1:], strict=False)
    )
    torch.testing.assert_close(total, gpt_loss(logits_of(logits), (batch.labels, mask)), rtol=1e-13, atol=1e-14)


def test_a_further_prediction_counts_within_a_document_and_where_its_target_is_known() -> None:
    batch = replace(batch_of(6, torch.tensor([[1.0, 1, 1, 1, 0, 1], [1] * 6])), document_starts=((0, 3), (0,)))
    labels, counts = further_labels(batch, 2)
    (first, second), samples = counts.unbind(), torch.cat((batch.tokens[:, :1], batch.labels), dim=1)
    assert first.T.tolist() == [[1, 1, 1, 1, 0, 1], [1, 1, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0]]
    assert second.T.tolist() == [[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2]
    for depth in range(3):
        assert torch.equal(labels[:, : 6 - depth, depth], samples[:, depth + 1 :])
