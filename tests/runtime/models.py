"""A small transformer other than our GPT, as a user of the runtime may have."""

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.runtime.state.sequence_state import Past

VOCAB, HIDDEN, HEADS, GROUPS, SEQ = 32, 16, 4, 2, 24


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.3)
        self.position = nn.Parameter(torch.randn(SEQ, HIDDEN) * 0.3)

    def forward(self, tokens: Tensor, past: Past) -> Tensor:
        return F.embedding(tokens, self.weight) + self.position[past.prefix_len : past.prefix_len + tokens.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, HIDDEN + 2 * GROUPS * (HIDDEN // HEADS))
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (-1, HIDDEN // HEADS))
        query, key, value = heads.split([HEADS, GROUPS, GROUPS], dim=2)
        hidden = hidden + self.out(past.attend(query, key, value).flatten(2))
        return hidden + self.mlp(hidden)


class StatefulBlock(Block):
    """Mixes tokens by a causal convolution and a decayed linear attention, whose states it carries."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(3, HIDDEN) * 0.5)
        self.begin = nn.Parameter(torch.randn(2, HIDDEN) * 0.3)
        self.decay = nn.Parameter(torch.rand(HEADS))

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (-1, HIDDEN // HEADS))
        query, key, value = heads.split([HEADS, GROUPS, GROUPS], dim=2)
        key, value = (each.repeat_interleave(HEADS // GROUPS, dim=2) for each in (key, value))
        query, key, value = past.all_tokens(query, key, value)
        rows, tokens, own_heads, size = value.shape
        taps, begin = (
            past.own_heads(each.unflatten(1, (HEADS, size)).transpose(0, 1)) for each in (self.taps, self.begin)
        )
        window = past.carried("window", begin.transpose(0, 1).expand(rows, 2, own_heads, size))
        window = torch.cat((window, value), dim=1)
        past.carry("window", window[:, -2:])
        value = sum(window[:, tap : tap + tokens] * taps[:, tap] for tap in range(3))
        keep = torch.sigmoid(past.own_heads(self.decay))[:, None, None]
        state = past.carried("products", value.new_zeros(rows, own_heads, size, size))
        outputs = []
        for token in range(tokens):
            state = keep * state + key[:, token, :, :, None] * value[:, token, :, None, :]
            outputs.append((query[:, token, :, None, :] @ state).squeeze(-2))
        past.carry("products", state)
        hidden = hidden + self.out(past.own_tokens(torch.stack(outputs, dim=1)).flatten(2))
        return hidden + self.mlp(hidden)


def head(embedding: Embedding, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embedding.weight)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers(num_blocks: int = 4, *, tied: bool = True, stateful: bool = False) -> list[LayerSpec]:
    """Embedding, blocks and head; with `stateful` every other block has a state."""
    blocks = [LayerSpec(StatefulBlock if stateful and index % 2 == 0 else Block) for index in range(num_blocks)]
    if not tied:
        return [LayerSpec(Embedding), *blocks, LayerSpec(nn.Linear, HIDDEN, VOCAB)]
    return [
        TiedLayerSpec("embedding", Embedding),
        *blocks,
        TiedLayerSpec("embedding", Embedding, forward_fn=head),
    ]


def batches(count: int, rows: int, seed: int = 0, seq: int = SEQ) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (count, rows, seq + 1), generator=generator)
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]
