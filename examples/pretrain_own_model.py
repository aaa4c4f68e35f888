"""Trains a model of your own with the whole trainer: its flags, layouts, checkpoints, metrics and reports.

    deepspeed --num_accelerators 2 examples/pretrain_own_model.py --pipeline-model-parallel-size 2 \
        --num-token-slices 4 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 32 \
        --micro-batch-size 8 --global-batch-size 16 --train-iters 30 --lr 3e-3 --convolution-width 4

Only `layers` is needed; the default loss is cross-entropy, and the default data comes from flags.
"""

import sys

import numpy as np
import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.nn import functional as F

from deepspeed_ext.runtime.attention.recurrences import causal_convolution
from megatron_terapipe.training.pretrain import pretrain


class Attention(nn.Module):
    """Attention beside a residual; `past` has the keys and values of earlier token slices."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, hidden, past):
        """Return the output [rows, tokens, hidden] of a token slice."""
        query, key, value = self.qkv(self.norm(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return hidden + self.out(past.attend(query, key, value).flatten(2))


class Convolution(nn.Module):
    """A causal convolution of each channel beside a residual; `past` has the inputs of earlier token slices."""

    def __init__(self, hidden, width):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, hidden)
        self.weight = nn.Parameter(torch.randn(hidden, width) / width**0.5)

    def forward(self, hidden, past):
        """Return the output [rows, tokens, hidden] of a token slice."""
        # Sequence-parallel ranks have some of its tokens each, and for these lines all tokens of some channels.
        inputs = past.all_tokens(self.norm(hidden).unsqueeze(3))[0].squeeze(3)
        weight = past.own_heads(self.weight)
        before = past.carried("inputs", inputs.new_zeros(len(inputs), weight.shape[1] - 1, len(weight)))
        outputs, last = causal_convolution(inputs, weight, before, past.begins(inputs.device))
        past.carry("inputs", last)
        return hidden + self.out(F.gelu(past.own_tokens(outputs.unsqueeze(3)).squeeze(3)))


def layers(config, ranks):
    """Return the layers from token ids to logits: attention and convolution in turn."""
    hidden, vocabulary = config.model.hidden_size, config.model.vocab_size
    attention = LayerSpec(Attention, hidden, config.model.num_attention_heads)
    convolution = LayerSpec(Convolution, hidden, config.own.convolution_width)
    blocks = [convolution if number % 2 else attention for number in range(config.model.num_layers)]
    return [LayerSpec(nn.Embedding, vocabulary, hidden), *blocks, LayerSpec(nn.Linear, hidden, vocabulary)]


def loss(logits, labels):
    """Return the mean cross-entropy of the labelled tokens, and a little of their logits' size (z-loss)."""
    targets, mask = labels
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(mask)
    losses = losses + 1e-4 * logits.logsumexp(dim=-1) ** 2
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


def flags(parser):
    """Add the flags of this program; `config.own` has their values."""
    parser.add_argument("--convolution-width", type=int, default=3, metavar="N", help="tokens of a convolution, from 2")


if __name__ == "__main__":
    sys.exit(pretrain(layers, loss=loss, datasets=datasets, flags=flags))
