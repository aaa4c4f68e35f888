"""A micro-batch: tokens, labels, and the mask of the labels that count."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch of one data-parallel rank."""

    tokens: Tensor
    """Input ids, int64 [micro_batch, seq]."""
    labels: Tensor
    """The id after each input, int64 [micro_batch, seq]."""
    loss_mask: Tensor
    """1 where the prediction counts, else 0, float32 [micro_batch, seq]."""
    document_starts: tuple[tuple[int, ...], ...] = ()
    """Per row the positions in [0, seq) at which its documents begin, ascending, the first 0. Left out, each row is one
    document."""

    def __post_init__(self) -> None:
        """Take each row as one document unless told otherwise."""
        if not self.document_starts:
            object.__setattr__(self, "document_starts", ((0,),) * len(self.tokens))

    @classmethod
    def from_samples(
        cls, samples: Tensor, *, separating_eod: int | None = None, masked_eod: int | None = None
    ) -> "Batch":
        """Cut samples into inputs and labels.

        Args:
            samples: ids, int64 [micro_batch, seq + 1].
            separating_eod: id of the end of a document when the documents of a row are told apart; None takes
                each row as one document.
            masked_eod: id of the end of a document when the prediction after it, the first token
                of an unrelated document, does not count; None counts every prediction.
        """
        tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
        if masked_eod is not None:
            loss_mask[tokens == masked_eod] = 0.0
        starts = () if separating_eod is None else tuple(_document_starts(row == separating_eod) for row in tokens)
        return cls(tokens=tokens, labels=labels, loss_mask=loss_mask, document_starts=starts)

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, from which an accelerator copies while it computes."""
        return Batch(
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            loss_mask=self.loss_mask.pin_memory(),
            document_starts=self.document_starts,
        )

    def as_pipeline_batch(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return `(tokens, (labels, loss_mask))`, each [B, N]: inputs of the first and of the last stage."""
        return self.tokens, (self.labels, self.loss_mask)


def _document_starts(ends: Tensor) -> tuple[int, ...]:
    """Return where documents begin, given where tokens end one, bool [seq]; an end at the last position begins none."""
    return (0, *(end + 1 for end in ends[:-1].nonzero().flatten().tolist()))
