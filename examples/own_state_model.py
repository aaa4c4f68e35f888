"""Trains a language model that is not a transformer in token slices, on two CPU cores or GPUs.

    deepspeed --num_accelerators 2 examples/own_state_model.py

Its layers have a state of constant size instead of keys and values, however long the sequence is. More such layers are
in `layers_with_state.py`.
"""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.initialize import init_distributed, initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule

SEQ, VOCAB, HIDDEN, TAPS = 64, 32, 64, 3


class Block(nn.Module):
    """A causal convolution and a feed-forward, each beside a residual."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(HIDDEN, HIDDEN, TAPS)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 128), nn.GELU(), nn.Linear(128, HIDDEN))

    def forward(self, hidden, past):  # noqa: D102
        before = past.carried("inputs", hidden.new_zeros(len(hidden), TAPS - 1, HIDDEN))
        inputs = torch.cat((before, hidden), dim=1)
        past.carry("inputs", inputs[:, 1 - TAPS :])
        hidden = hidden + self.convolution(inputs.transpose(1, 2)).transpose(1, 2)
        return hidden + self.mlp(hidden)


def counting():
    """Sequences that count upwards from anywhere, by a step of their own."""
    while True:
        start, step = torch.randint(VOCAB, (8, 1)), torch.randint(1, 4, (8, 1))
        tokens = (start + step * torch.arange(SEQ + 1)) % VOCAB
        yield tokens[:, :-1], tokens[:, 1:]


init_distributed()
model = TokenSlicePipelineModule(
    [LayerSpec(nn.Embedding, VOCAB, HIDDEN), *[LayerSpec(Block)] * 4, LayerSpec(nn.Linear, HIDDEN, VOCAB)],
    layout=ParallelLayout(pipeline_parallel_size=2, num_token_slices=4),
    token_slices=TokenSlices.uniform(SEQ, 4),
    loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
)
config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "steps_per_print": 10**9}
engine, *_ = initialize(model, config, optimizer=torch.optim.Adam(model.parameters(), lr=5e-4))
torch.manual_seed(0)  # all ranks must read the same data
data = counting()
for step in range(30):
    loss = engine.train_batch(data)
    if step % 5 == 4 and deepspeed.comm.get_rank() == 0:
        print(f"step {step + 1} loss {loss:.3f}", flush=True)
