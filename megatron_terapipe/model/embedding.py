"""Words and positions in, logits out: the two ends of the model, which may share one weight."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.model.flops import LOGITS_AT_ONCE
from megatron_terapipe.model.attention import Past
from megatron_terapipe.model.dropout import DropoutSite, residual_dropout
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.tensor_parallel import products
from megatron_terapipe.tensor_parallel.linear import ColumnParallelLinear
from megatron_terapipe.tensor_parallel.logits import LiveLogits, Logits
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks, WeightPart

AT_AN_END = "at_an_end"
"""Attribute of the weights with a row for each token, whose learning rate may be set apart; others do not have it."""


class WordEmbedding(nn.Module):
    """A vector for each word of the padded vocabulary, of which each rank holds some.

    Args:
        model: the model section, with its vocabulary size known.
        ranks: ranks that share the vocabulary.
    """

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks) -> None:
        super().__init__()
        self.ranks, self.multiplier, self.head = ranks, model.embedding_multiplier, Head(model)
        rows = model.padded_vocab_size(ranks.size)
        first = normal(model.embedding_init_method_std)
        self.weight = ranks.parameter(rows, model.hidden_size, cut=0, initialize=first)
        setattr(self.weight, AT_AN_END, True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [B, N] in, [B, n, hidden] of the tokens this rank has between the matrices out."""
        words = self._words(tokens)
        return words if self.multiplier == 1 else words * self.multiplier

    def _words(self, tokens: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return products.embedding(tokens, self.weight)
        own = tokens - self.ranks.rank * self.weight.shape[0]
        elsewhere = (own < 0) | (own >= self.weight.shape[0])
        part = products.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self.ranks.sum_parts(part.masked_fill(elsewhere.unsqueeze(-1), 0))


class PositionEmbedding(nn.Module):
    """Adds learned positions to the embedded words, where the model has them, and applies dropout.

    Args:
        ranks: ranks that share the tokens.
    """

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks) -> None:
        super().__init__()
        self.ranks, self.dropout = ranks, model.hidden_dropout
        self.weight = None
        if model.position_embedding_type == "learned_absolute":
            weight = torch.empty(model.max_position_embeddings, model.hidden_size)
            normal(model.embedding_init_method_std)(weight, WeightPart(weight.shape))
            self.weight = ranks.replicated(weight)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the input of the first transformer layer: [B, n, hidden].

        Args:
            hidden: [B, n, hidden], the embedded words of the tokens that this rank has between the matrices.
        """
        if self.weight is not None:
            num_tokens = hidden.shape[1] * (self.ranks.size if self.ranks.sequence_parallel else 1)
            positions = self.ranks.own_tokens(past.positions(num_tokens, hidden.device))
            hidden = hidden + F.embedding(positions, self.weight)
        return residual_dropout(hidden, self.dropout if self.training else 0.0, DropoutSite.EMBEDDING, past, self.ranks)


class Head:
    """Settings of the logits, beside their weight.

    Args:
        model: the model section, with its vocabulary size known.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._live = LiveLogits(LOGITS_AT_ONCE)
        self._multiplier, self._softcap, self._words = model.logit_multiplier, model.logit_softcap, model.vocab_size

    def logits(self, hidden: Tensor, weight: Tensor, ranks: TensorParallelRanks, *, first_part: int = 0) -> Logits:
        """Return the logits of tokens.

        Args:
            hidden: [B, n, hidden].
            weight: rows of this rank, [rows, hidden].
            ranks: ranks that share the vocabulary, or a part of it.
            first_part: parts of the vocabulary before those of these ranks.
        """
        # A factor of the hidden state is one of the logits, of which there are many more.
        scaled = hidden if self._multiplier == 1 else hidden * self._multiplier
        return Logits(
            scaled, weight, ranks, self._live, words=self._words, softcap=self._softcap, first_part=first_part
        )


def tied_logits(embedding: WordEmbedding, hidden: Tensor) -> Logits:
    """Return the logits of the tokens [B, N, vocabulary], computed with the weight of the word embedding.

    Args:
        hidden: [B, n, hidden], output of the final norm.
    """
    return embedding.head.logits(hidden, embedding.weight, embedding.ranks)


class OutputLayer(nn.Module):
    """Logits from a weight of their own.

    Args:
        model: the model section, with its vocabulary size known.
        ranks: ranks that share the vocabulary.
    """

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks) -> None:
        super().__init__()
        self.head = Head(model)
        self.linear = ColumnParallelLinear(
            model.hidden_size,
            model.padded_vocab_size(ranks.size),
            ranks,
            normal(model.init_method_std),
            bias=False,
        )
        setattr(self.linear.weight, AT_AN_END, True)

    def forward(self, hidden: Tensor) -> Logits:
        """Logits of the tokens of [B, n, hidden]."""
        return self.head.logits(hidden, self.linear.weight, self.linear.ranks)
