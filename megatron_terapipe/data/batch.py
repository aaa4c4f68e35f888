"""One micro-batch: what the model reads, what it must predict, and which predictions count."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch of one data-parallel rank.

    Attributes:
        tokens: input ids, int64 [micro_batch, seq].
        labels: the id after each input, int64 [micro_batch, seq].
        loss_mask: 1 where the prediction counts, else 0, float32 [micro_batch, seq].
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor

    @classmethod
    def from_samples(cls, samples: Tensor, masked_eod: int | None = None) -> "Batch":
        """Cut samples into inputs and labels.

        Args:
            samples: ids, int64 [micro_batch, seq + 1].
            masked_eod: id of the end of a document when the prediction after it, the first token
                of an unrelated document, does not count; None counts every prediction.
        """
        tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
        if masked_eod is not None:
            loss_mask[tokens == masked_eod] = 0.0
        return cls(tokens=tokens, labels=labels, loss_mask=loss_mask)

    def as_pipeline_batch(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return `(tokens, (labels, loss_mask))`: the first stage's input and the last stage's."""
        return self.tokens, (self.labels, self.loss_mask)
