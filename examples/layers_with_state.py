"""Layers with a state for models of your own: each replaces attention, and trains in token slices.

A layer reads the state that it left after the token slice before (`past.carried`), and leaves one for the next
(`past.carry`); gradients go the same way back. In a pipeline nothing of it travels between ranks.

Where sequence-parallel ranks share the tokens, `past.all_tokens` gives each rank all tokens of its part of the heads
or channels, and `past.own_tokens` is the way back; with one rank both do nothing. Packed documents start again where
`past.begins` is true.
"""

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed_ext.runtime.attention.recurrences import causal_convolution, linear_attention


def zeros(like, *shape):
    """A state before the first token, in fp32 or the wider type of the model."""
    return like.new_zeros(len(like), *shape, dtype=torch.promote_types(like.dtype, torch.float32))


class CausalConvolution(nn.Module):
    """Each channel is a sum of its last inputs, with weights of its own. The state: all inputs but the oldest."""

    def __init__(self, width, taps=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, taps) / taps**0.5)

    def forward(self, hidden, past):  # noqa: D102
        inputs = past.all_tokens(hidden.unsqueeze(3))[0].squeeze(3)  # [B, N, channels of this rank]
        weight = past.own_heads(self.weight)
        before = past.carried("inputs", inputs.new_zeros(len(inputs), weight.shape[1] - 1, len(weight)))
        outputs, after = causal_convolution(inputs, weight, before, past.begins(hidden.device))
        past.carry("inputs", after)
        return past.own_tokens(outputs.unsqueeze(3)).squeeze(3)


class TokenShift(nn.Module):
    """RWKV's channel mix: a blend of each token with the one before, then a gated MLP. The state: the last token."""

    def __init__(self, width):
        super().__init__()
        self.share = nn.Parameter(torch.rand(width))
        self.key, self.gate, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, hidden, past):  # noqa: D102
        inputs = past.all_tokens(hidden.unsqueeze(3))[0].squeeze(3)
        last = past.carried("last", inputs.new_zeros(len(inputs), 1, inputs.shape[2]))
        before = torch.cat((last, inputs[:, :-1]), dim=1)
        past.carry("last", inputs[:, -1:])
        if (begins := past.begins(hidden.device)) is not None:
            before = before.masked_fill(begins.unsqueeze(2), 0)
        mixed = torch.lerp(before, inputs, past.own_heads(self.share))
        mixed = past.own_tokens(mixed.unsqueeze(3)).squeeze(3)
        return torch.sigmoid(self.gate(mixed)) * self.value(F.relu(self.key(mixed)).square())


class LinearAttention(nn.Module):
    """Attention without softmax, whose past fades (retention). The state: a matrix of keys times values for a head."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.query_key_value, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.fading = nn.Parameter(torch.linspace(1, 5, heads))
        self.norm = nn.RMSNorm(width // heads)

    def forward(self, hidden, past):  # noqa: D102
        parts = self.query_key_value(hidden).unflatten(2, (3, self.heads, -1)).unbind(2)
        query, key, value = past.all_tokens(*parts)  # each [B, N, heads of this rank, size]
        log_decay = F.logsigmoid(past.own_heads(self.fading)).expand(value.shape[:3])
        state = past.carried("state", zeros(value, value.shape[2], key.shape[3], value.shape[3]))
        outputs, state = linear_attention(query, key, value, log_decay, state, begins=past.begins(hidden.device))
        past.carry("state", state)
        return self.out(past.own_tokens(self.norm(outputs).to(hidden.dtype)).flatten(2))


class GatedDeltaNet(nn.Module):
    """Linear attention that replaces the value of a key (Yang et al., arXiv 2412.06464), gated by the token."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.sizes = *[width // heads] * 4, 1, 1
        self.inward, self.out = (
            nn.Linear(width, heads * sum(self.sizes), bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.fading, self.norm = nn.Parameter(torch.rand(heads)), nn.RMSNorm(width // heads)
        self.heads = heads

    def forward(self, hidden, past):  # noqa: D102
        (inner,) = past.all_tokens(self.inward(hidden).unflatten(2, (self.heads, -1)))
        query, key, value, gate, rate, decay = inner.split(self.sizes, dim=3)
        query, key = F.normalize(query, dim=3), F.normalize(key, dim=3)
        log_decay = -past.own_heads(self.fading).exp() * F.softplus(decay.squeeze(3))
        state = past.carried("state", zeros(value, value.shape[2], key.shape[3], value.shape[3]))
        rate, begins = torch.sigmoid(rate.squeeze(3)), past.begins(hidden.device)
        outputs, state = linear_attention(query, key, value, log_decay, state, rate=rate, begins=begins)
        past.carry("state", state)
        return self.out(past.own_tokens((self.norm(outputs) * F.silu(gate)).to(hidden.dtype)).flatten(2))


class Mamba2(nn.Module):
    """Mamba-2 (Dao and Gu, arXiv 2405.21060): a convolution, then a state-space layer with a time step of the token.

    Groups of heads share keys B and queries C, and sequence-parallel ranks share the groups. Two states: the last
    inputs of the convolution, and the matrices.
    """

    def __init__(self, width, heads=4, groups=2, size=16, taps=4):
        super().__init__()
        inner, heads = 2 * width // groups, heads // groups  # of a group
        self.groups, self.gate_and_rest, self.value_key_query = (
            groups,
            (inner, inner + 2 * size, heads),
            (inner, size, size),
        )
        self.inward = nn.Linear(width, groups * sum(self.gate_and_rest), bias=False)
        self.out = nn.Linear(2 * width, width, bias=False)
        self.taps = nn.Parameter(torch.randn(groups, inner + 2 * size, taps) / taps**0.5)
        self.fading, self.step, self.skip = (nn.Parameter(torch.rand(groups, heads)) for _ in range(3))
        self.norm = nn.RMSNorm(inner)

    def forward(self, hidden, past):  # noqa: D102
        (inner,) = past.all_tokens(self.inward(hidden).unflatten(2, (self.groups, -1)))
        gate, inputs, step = inner.split(self.gate_and_rest, dim=3)
        taps, fading, bias, skip = map(past.own_heads, (self.taps, self.fading, self.step, self.skip))
        begins = past.begins(hidden.device)
        before = past.carried("inputs", inputs.new_zeros(len(inputs), taps.shape[2] - 1, inputs[0, 0].numel()))
        convolved, after = causal_convolution(inputs.flatten(2), taps.flatten(0, 1), before, begins)
        past.carry("inputs", after)
        x, key, query = F.silu(convolved).unflatten(2, (len(taps), -1)).split(self.value_key_query, dim=3)
        x, step = x.unflatten(3, (step.shape[3], -1)), F.softplus(step + bias)
        value, log_decay = (x * step.unsqueeze(4)).flatten(2, 3), (-fading.exp() * step).flatten(2)
        state = past.carried("state", zeros(value, value.shape[2], key.shape[3], value.shape[3]))
        outputs, state = linear_attention(query, key, value, log_decay, state, begins=begins)
        past.carry("state", state)
        outputs = outputs.unflatten(2, skip.shape) + skip.unsqueeze(2) * x
        return self.out(past.own_tokens(self.norm(outputs.flatten(3) * F.silu(gate)).to(hidden.dtype)).flatten(2))
