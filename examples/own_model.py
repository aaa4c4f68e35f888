"""Trains a model of your own in token slices, on two CPU cores or GPUs.

    deepspeed --num_accelerators 2 examples/own_model.py

The model has two stages. With four ranks, the two of a stage share the tokens of every token slice.
A layer sees one token slice of every sequence. Its argument `past` has all that it needs of earlier tokens.
"""

import os

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.initialize import init_distributed, initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule

SEQ, VOCAB, HIDDEN, HEADS = 64, 32, 64, 4


class Block(nn.Module):
    """Attention and a feed-forward, each beside a residual."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 128), nn.GELU(), nn.Linear(128, HIDDEN))

    def forward(self, hidden, past):  # noqa: D102
        query, key, value = self.qkv(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)  # each [rows, tokens, heads, dim]
        hidden = hidden + self.out(past.attend(query, key, value).flatten(2))
        return hidden + self.mlp(hidden)


def counting():
    """Sequences that count upwards from anywhere, by a step of their own."""
    while True:
        start, step = torch.randint(VOCAB, (8, 1)), torch.randint(1, 4, (8, 1))
        tokens = (start + step * torch.arange(SEQ + 1)) % VOCAB
        yield tokens[:, :-1], tokens[:, 1:]


init_distributed()
# Without their share of the cores, ranks on CPUs would wait for each other's threads.
torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // deepspeed.comm.get_world_size()))
model = TokenSlicePipelineModule(
    [LayerSpec(nn.Embedding, VOCAB, HIDDEN), *[LayerSpec(Block)] * 4, LayerSpec(nn.Linear, HIDDEN, VOCAB)],
    layout=ParallelLayout(
        pipeline_parallel_size=2, sequence_parallel_size=deepspeed.comm.get_world_size() // 2, num_token_slices=4
    ),
    token_slices=TokenSlices((20, 16, 14, 14)),
    loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
)
config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "steps_per_print": 10**9}
engine, *_ = initialize(model, config, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3))
torch.manual_seed(0)  # all ranks must read the same data
data = counting()
for step in range(30):
    loss = engine.train_batch(data)
    if step % 5 == 4 and deepspeed.comm.get_rank() == 0:
        print(f"step {step + 1} loss {loss:.3f}", flush=True)
