"""Words and positions in, logits out: the two ends of the model, which may share one weight.

The output layer may also be several pipeline layers, each with some rows of its weight (Yeung et al., arXiv
2411.05288): one part for each pipeline rank, and the parts are the ranks' last stages. Hidden states of a token slice
pass all of them, with two sums of each token, to which every stage adds its own:

    last transformer stage ---> stage of part 0 ---> stage of part 1 ---> ... ---> stage of the last part ---> loss
                           hidden          hidden, sums         hidden, sums            sums

The sums are the logarithm of the sum of exponentials of the logits before, and the logit of the target, in whichever
part it is. Their difference at the end is the loss. Backward, each stage finds the gradient of its rows from the
gradients of the two sums, and adds to the gradient of the hidden states. So no op waits for all ranks at once, and the
work is scheduled as of any other stage.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.runtime.state.sequence_state import Past
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.flops import LOGITS_AT_ONCE
from megatron_terapipe.model.block import DropoutSite, residual_dropout
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.logits import LiveLogits, Logits
from megatron_terapipe.model.tensor_parallel import ColumnParallelLinear, TensorParallelRanks, embedding

AT_AN_END = "at_an_end"
"""Attribute of the weights with a row for each token, which may have their own learning rate."""


class WordEmbedding(nn.Module):
    """A vector for each word of the padded vocabulary, of which each rank holds some."""

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
            return embedding(tokens, self.weight)
        own = tokens - self.ranks.rank * self.weight.shape[0]
        elsewhere = (own < 0) | (own >= self.weight.shape[0])
        part = embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self.ranks.sum_parts(part.masked_fill(elsewhere.unsqueeze(-1), 0))


class PositionEmbedding(nn.Module):
    """Adds learned positions to the embedded words, where the model has them, and applies dropout."""

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks) -> None:
        super().__init__()
        self.ranks, self.dropout = ranks, model.hidden_dropout
        self.weight = None
        if model.position_embedding_type == "learned_absolute":
            first = normal(model.embedding_init_method_std)
            self.weight = ranks.whole(model.max_position_embeddings, model.hidden_size, initialize=first)

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
    """Settings of the logits other than their weight."""

    def __init__(self, model: ModelConfig) -> None:
        self._live = LiveLogits(LOGITS_AT_ONCE)
        self._multiplier, self._softcap, self._words = model.logit_multiplier, model.logit_softcap, model.vocab_size

    def logits(
        self,
        hidden: Tensor,
        weight: Tensor,
        ranks: TensorParallelRanks,
        *,
        bias: Tensor | None = None,
        first_part: int = 0,
    ) -> Logits:
        """Return the logits of the tokens of [B, n, hidden], with the rows [rows, hidden] of this rank.

        Args:
            bias: [rows], added after the multiplier; None for none.
            first_part: parts of the vocabulary before the parts of these ranks.
        """
        settings = {"words": self._words, "multiplier": self._multiplier, "softcap": self._softcap}
        return Logits(hidden, weight, ranks, self._live, bias=bias, first_part=first_part, **settings)


def tied_logits(embedding: WordEmbedding, hidden: Tensor) -> Logits:
    """Return the logits of the tokens [B, N, vocabulary], computed with the weight of the word embedding."""
    return embedding.head.logits(hidden, embedding.weight, embedding.ranks)


class OutputLayer(nn.Module):
    """Logits from a weight of their own, or from the rows of it that are part `number` of several."""

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks, number: int = 0, num_parts: int = 1) -> None:
        super().__init__()
        self.head, self.ranks, self.first_part = Head(model), ranks, number * ranks.size
        if num_parts > 1:
            # Layers are seeded one after the other, and all parts draw from one weight.
            torch.manual_seed(torch.initial_seed() - number)
        self.linear = ColumnParallelLinear(
            model.hidden_size,
            model.padded_vocab_size(ranks.size),
            # Only cuts the weight: sums go over the tensor-parallel ranks of one part.
            TensorParallelRanks(self.first_part + ranks.rank, num_parts * ranks.size),
            normal(model.init_method_std),
            bias=model.add_output_bias,
        )
        setattr(self.linear.weight, AT_AN_END, True)

    def forward(self, hidden: Tensor) -> Logits:
        """Return the logits of these rows, for the tokens of [B, n, hidden]."""
        weight, bias = self.linear.weight, self.linear.bias
        return self.head.logits(hidden, weight, self.ranks, bias=bias, first_part=self.first_part)


class VocabularySums(NamedTuple):
    """Output of a stage with a part of the vocabulary: the input of the next one, for one token slice."""

    hidden: Tensor
    """[B, n, hidden] of the tokens that this rank has between the matrices."""
    log_sum: Tensor
    """[B, N], logarithm of the sum of exponentials of the logits of the parts up to this one."""
    of_target: Tensor
    """[B, N], the logit of the target, 0 until the part that has it."""
    labels: Tensor
    """[B, N], the targets."""

    def cross_entropy(self, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each token, [B, N], after the last part."""
        return self.log_sum - self.of_target


class FirstVocabularyPart(OutputLayer):
    """The first part of the vocabulary, where the labels come in."""

    def forward(self, hidden: Tensor, labels: Tensor) -> VocabularySums:
        """Return the sums over this part, for hidden states [B, n, hidden] and labels [B, N]."""
        return VocabularySums(hidden, *super().forward(hidden).sums(labels), labels)


class VocabularyPart(OutputLayer):
    """A later part of the vocabulary."""

    def forward(self, before: tuple[Tensor, Tensor, Tensor, Tensor]) -> VocabularySums:
        """Return the sums over this part and those before.

        Args:
            before: output of the part before: hidden [B, n, hidden], log_sum, of_target and labels [B, N].
        """
        hidden, log_sum, of_target, labels = before
        own_sum, own_target = super().forward(hidden).sums(labels)
        return VocabularySums(hidden, torch.logaddexp(log_sum, own_sum), of_target + own_target, labels)
