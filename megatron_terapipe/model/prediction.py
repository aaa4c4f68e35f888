"""Layers that predict further tokens (multi-token prediction), and the losses of all predictions.

DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437 section 2.2, equations 21 to 25. Depth 0 is the model;
depth k reads of a token t the output of depth k - 1 after its last norm, and the k-th token after t, which is a label:

    output of depth k - 1 --norm--.
                                   >-- product 2h -> h -- transformer layer -- norm --> output --> logits of t + k + 1
    embedding of t + k     --norm--'

Word embedding and output layer are the model's. All of it is on the stage of the output layer, whose `Logits` each
depth takes over with another hidden state; the embedding is a tied layer. So a token slice needs nothing of later ones.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_ext.runtime.state.sequence_state import Past
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.model.block import DropoutSite, TransformerBlock, residual_dropout
from megatron_terapipe.model.embedding import WordEmbedding
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.logits import Logits
from megatron_terapipe.model.norm import NORMS
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks, linear


class Predictions(NamedTuple):
    """Output of the layers that predict further tokens, for one token slice."""

    logits: tuple[Logits, ...]
    """Of each depth so far."""
    words: tuple[Tensor, ...]
    """[B, n, hidden], the embeddings of the tokens that later depths read."""

    def compute(self) -> Tensor:
        """This rank's logits of the next token, [B, N, V / size]."""
        return self.logits[0].compute()


def further_words(embedding: WordEmbedding, logits: Logits, labels: Tensor) -> Predictions:
    """Embed the tokens that each depth reads.

    Args:
        labels: [B, N, 1 + D], for each depth the token that it predicts, which the next depth reads.
    """
    return Predictions((logits,), tuple(embedding(read) for read in labels.unbind(-1)[:-1]))


class PredictionLayer(nn.Module):
    """One depth. Tensor-parallel ranks have its norms and the product before its transformer layer whole.

    Args:
        more: arguments of the transformer layer.
    """

    def __init__(self, model: ModelConfig, block: BlockShape, ranks: TensorParallelRanks, **more: Any) -> None:
        super().__init__()
        norm, hidden = NORMS[model.normalization], model.hidden_size
        self.ranks, self.dropout = ranks, model.hidden_dropout
        self.words_norm, self.hidden_norm = norm(model, ranks), norm(model, ranks)
        self.projection = ranks.whole(hidden, 2 * hidden, initialize=normal(model.init_method_std))
        """[h, 2h]: the columns of the embedded word first."""
        self.block = TransformerBlock(model, block, ranks, **more)
        self.final_norm = norm(model, ranks)

    def forward(self, before: Predictions, past: Past) -> Predictions:
        """Add the logits of this depth."""
        last, (words, *later) = before.logits[-1], before.words
        dropout = self.dropout if self.training else 0.0
        words = residual_dropout(words, dropout, DropoutSite.EMBEDDING, past, self.ranks)
        joined = torch.cat((self.words_norm(words), self.hidden_norm(last.hidden)), dim=-1)
        hidden = self.final_norm(self.block(linear(joined, self.projection), past))
        return Predictions((*before.logits, last.of(hidden)), tuple(later))


def prediction_losses(predictions: Predictions, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Return the weighed sum of the cross-entropies of each depth, [1 + D].

    Args:
        labels: the token that each depth predicts, and the weight of its loss, each [B, N, 1 + D].
    """
    each = zip(predictions.logits, *(part.unbind(-1) for part in labels), strict=True)
    losses = ((logits.cross_entropy(targets), weights) for logits, targets, weights in each)
    return torch.stack([(loss * weights.to(loss.dtype)).sum() for loss, weights in losses])
