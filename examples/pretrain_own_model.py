"""Trains a model of your own with the whole trainer: its flags, layouts, checkpoints, metrics and reports.

    deepspeed --num_accelerators 2 examples/pretrain_own_model.py --pipeline-model-parallel-size 2 \
        --num-token-slices 4 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \
        --max-position-embeddings 64 --vocab-size 32 --micro-batch-size 8 --global-batch-size 16 --train-iters 30 \
        --lr 3e-3

Each function here is optional but `layers`. `--help` also shows the flag of this program.
"""

import sys

import numpy as np
import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.nn import functional as F

from megatron_terapipe.training.pretrain import pretrain


class Attention(nn.Module):
    """Attention beside a residual; `past` has the keys and values of earlier token slices."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, hidden, past):  # noqa: D102
        query, key, value = self.qkv(self.norm(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return hidden + self.out(past.attend(query, key, value).flatten(2))


class Convolution(nn.Module):
    """A causal convolution over three tokens beside a residual; `past` has the last two of the token slice before."""

    def __init__(self, hidden):
        super().__init__()
        self.convolution, self.out = nn.Conv1d(hidden, hidden, 3, groups=hidden), nn.Linear(hidden, hidden)

    def forward(self, hidden, past):  # noqa: D102
        before = past.carried("inputs", hidden.new_zeros(len(hidden), 2, hidden.shape[2]))
        inputs = torch.cat((before, hidden), dim=1)
        past.carry("inputs", inputs[:, -2:])
        return hidden + self.out(F.gelu(self.convolution(inputs.transpose(1, 2)).transpose(1, 2)))


def layers(config, ranks):
    """Return the layers, first to last: attention and convolution in turn."""
    model = config.model
    kinds = (
        LayerSpec(Attention, model.hidden_size, model.num_attention_heads),
        LayerSpec(Convolution, model.hidden_size),
    )
    blocks = [kinds[number % 2] for number in range(model.num_layers)]
    embedding, output = (
        (nn.Embedding, model.vocab_size, model.hidden_size),
        (nn.Linear, model.hidden_size, model.vocab_size),
    )
    return [LayerSpec(*embedding), *blocks, LayerSpec(*output)]


def loss(outputs, labels):
    """Return the mean cross-entropy of the labelled tokens."""
    targets, mask = labels
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(mask)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


class Counting:
    """Sequences that count upwards from anywhere, by a step of their own; sample n is always the same."""

    def __init__(self, config, num_samples):
        self.length, self.vocab_size, self.num_samples = config.model.seq_length, config.model.vocab_size, num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, number):
        draw = np.random.default_rng(number)
        return (draw.integers(self.vocab_size) + draw.integers(1, 4) * np.arange(self.length + 1)) % self.vocab_size


def datasets(config):
    """Return the data for training, validation and test."""
    return Counting(config, 10_000), Counting(config, 64), None


if __name__ == "__main__":
    sys.exit(pretrain(layers, loss=loss, datasets=datasets))
