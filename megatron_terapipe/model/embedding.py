"""Words and positions in, logits out: the two ends of the model, which may share one weight."""

import torch
from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model import accumulation
from megatron_terapipe.model.attention import Past
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.linear import Linear


class WordEmbedding(nn.Module):
    """A vector for each word of the padded vocabulary.

    Args:
        model: the model section, with its vocabulary size known.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.padded_vocab_size(), model.hidden_size))
        normal(model.init_method_std)(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, N] in, [B, N, hidden] out."""
        return accumulation.embedding(tokens, self.weight)


class PositionEmbedding(nn.Module):
    """A vector for each position, added."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_position_embeddings, model.hidden_size))
        normal(model.init_method_std)(self.weight)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """[B, N, hidden] of tokens that start at position `past.prefix_len` in, the same out."""
        return hidden + self.weight[past.prefix_len : past.prefix_len + hidden.shape[1]]


def tied_logits(embedding: WordEmbedding, hidden: Tensor) -> Tensor:
    """Logits [B, N, vocabulary] from the word embedding's own weight."""
    return accumulation.linear(hidden, embedding.weight)


class OutputLayer(nn.Module):
    """Logits from a weight of their own."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.linear = Linear(model.hidden_size, model.padded_vocab_size(), normal(model.init_method_std), bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, N, vocabulary]."""
        return self.linear(hidden)
