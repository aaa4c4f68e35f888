"""The output layer as several pipeline layers, each with some rows of its weight (Yeung et al., arXiv 2411.05288).

The vocabulary is cut by rows, one part for each pipeline rank, and the parts are the ranks' last stages. Hidden states
of a token slice pass all of them, with two sums of each token, to which every stage adds its own:

    last transformer stage ---> stage of part 0 ---> stage of part 1 ---> ... ---> stage of the last part ---> loss
                           hidden          hidden, sums         hidden, sums            sums

The sums are the logarithm of the sum of exponentials of the logits so far, and the logit of the target, in whichever
part it is. Their difference at the end is the loss. Backward, each stage finds the gradient of its rows from the
gradients of the two sums, and adds to the gradient of the hidden states. So no op waits for all ranks at once, and the
work is scheduled as that of any other stage.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.embedding import AT_AN_END, Head
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.tensor_parallel.linear import ColumnParallelLinear
from megatron_terapipe.tensor_parallel.logits import Logits
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks


class VocabularySums(NamedTuple):
    """Output of a stage with a part of the vocabulary: what the next one needs of a token slice."""

    hidden: Tensor
    """[B, n, hidden] of the tokens that this rank has between the matrices."""
    log_sum: Tensor
    """[B, N], logarithm of the sum of exponentials of the logits so far."""
    of_target: Tensor
    """[B, N], the logit of the target, 0 until the part that has it."""
    labels: Tensor
    """[B, N], the targets."""

    def cross_entropy(self, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each token, [B, N], after the last part.

        Args:
            targets: token ids [B, N]; those of the labels.
        """
        return self.log_sum - self.of_target


class VocabularyRows(nn.Module):
    """Some rows of the output layer's weight.

    Args:
        model: the model section, with its vocabulary size known.
        ranks: ranks that share the rows of this part.
    """

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks, number: int, num_parts: int) -> None:
        super().__init__()
        self.head, self.ranks, self.first_part = Head(model), ranks, number * ranks.size
        # Layers are seeded one after the other, and all parts draw from one weight.
        torch.manual_seed(torch.initial_seed() - number)
        self.linear = ColumnParallelLinear(
            model.hidden_size,
            model.padded_vocab_size(ranks.size),
            # Only cuts the weight: sums go over the tensor-parallel ranks of one part.
            TensorParallelRanks(self.first_part + ranks.rank, num_parts * ranks.size),
            normal(model.init_method_std),
            bias=False,
        )
        setattr(self.linear.weight, AT_AN_END, True)

    def logits(self, hidden: Tensor) -> Logits:
        """Return the logits of this part, for the tokens of [B, n, hidden]."""
        return self.head.logits(hidden, self.linear.weight, self.ranks, first_part=self.first_part)


class FirstVocabularyPart(VocabularyRows):
    """The first part of the vocabulary, where the labels come in."""

    def forward(self, hidden: Tensor, labels: Tensor) -> VocabularySums:
        """Return the sums over this part.

        Args:
            hidden: [B, n, hidden], output of the final norm.
            labels: token ids [B, N].
        """
        return VocabularySums(hidden, *self.logits(hidden).sums(labels), labels)


class VocabularyPart(VocabularyRows):
    """A later part of the vocabulary."""

    def forward(self, before: tuple[Tensor, Tensor, Tensor, Tensor]) -> VocabularySums:
        """Return the sums over this part and those before.

        Args:
            before: output of the part before: hidden [B, n, hidden], log_sum, of_target and labels [B, N].
        """
        hidden, log_sum, of_target, labels = before
        own_sum, own_target = self.logits(hidden).sums(labels)
        return VocabularySums(hidden, torch.logaddexp(log_sum, own_sum), of_target + own_target, labels)
