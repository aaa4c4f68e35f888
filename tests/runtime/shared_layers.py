"""Layers of different classes that hold one weight together: words that are looked up, recalled and predicted."""

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.state.sequence_state import Past
from tests.runtime import models

FIRST, BETWEEN, LAST = 0, 3, 6
SHARED = {FIRST: "words.weight", BETWEEN: "look_up.weight", LAST: "projection.weight"}
"""A weight of three layers of different classes."""
PLACE = {FIRST: f"{FIRST}.words.weight", BETWEEN: f"{BETWEEN}.look_up.weight", LAST: f"{LAST}.projection.weight"}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(models.VOCAB, models.HIDDEN)
        self.position = nn.Parameter(torch.randn(models.SEQ, models.HIDDEN) * 0.3)

    def forward(self, tokens: Tensor, past: Past) -> Tensor:
        return self.words(tokens) * 0.3 + self.position[past.prefix_len : past.prefix_len + tokens.shape[1]]


class Recall(nn.Module):
    """Adds the word that a hidden state is most like."""

    def __init__(self) -> None:
        super().__init__()
        self.look_up = nn.Linear(models.HIDDEN, models.VOCAB, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.look_up(hidden).softmax(-1) @ self.look_up.weight


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.HIDDEN)
        self.projection = nn.Linear(models.HIDDEN, models.VOCAB, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.projection(self.norm(hidden))


def layers() -> list[LayerSpec]:
    blocks = [LayerSpec(models.Block) for _ in range(2)]
    return [LayerSpec(Words), *blocks, LayerSpec(Recall), *blocks, LayerSpec(Head)]


def share(model: TokenSlicePipelineModule) -> None:
    model.share_layers(SHARED)
