"""A small transformer other than our GPT, as a user of the runtime may have."""

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.runtime.attention.sequence_state import Past

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


def head(embedding: Embedding, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embedding.weight)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers(num_blocks: int = 4, *, tied: bool = True) -> list[LayerSpec]:
    blocks = [LayerSpec(Block) for _ in range(num_blocks)]
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
