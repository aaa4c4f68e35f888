"""Which samples each rank reads: replicas share the batch, and ranks that share sequences read the same ones."""

from types import SimpleNamespace

import torch

from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.training.micro_batches import micro_batches
from megatron_terapipe.training.run import prepare
from tests.training.gpt_runs import FLAGS

MICRO_BATCHES = 2
WORDS = FLAGS.replace("--data-path unread", "--mock-data --global-batch-size 8 --eval-iters 0 --num-workers 0")


def read(rank: int, words: str) -> torch.Tensor:
    """Tokens of the micro-batches of a rank of four: [2, rows, tokens]."""
    launch = LaunchEnvironment(rank=rank, world_size=4, local_rank=rank, local_size=4)
    run = prepare(parse_arguments(f"{WORDS} {words}".split()), launch)
    reading = SimpleNamespace(reads_data=True)
    with micro_batches(run, reading, run.datasets.train, consumed_samples=0) as batches:
        return torch.stack([next(batches).tokens for _ in range(MICRO_BATCHES)])


def test_sequence_parallel_ranks_read_the_samples_of_their_replica() -> None:
    of_all = [read(rank, "--context-parallel-size 2") for rank in range(4)]
    assert torch.equal(of_all[0], of_all[1])
    assert torch.equal(of_all[2], of_all[3])
    alone = read(0, "--context-parallel-size 4")
    in_order = torch.stack([of_all[0], of_all[2]], dim=1).flatten(0, 2)
    assert torch.equal(in_order[: len(alone.flatten(0, 1))], alone.flatten(0, 1))
    assert len(in_order.unique(dim=0)) == 8
