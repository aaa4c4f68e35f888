"""Logits of some tokens at a time: a token keeps its hidden state from forward to backward, and never a row of logits.

A token of Llama 3 has 128,256 logits: 770 kB with what the loss keeps of them, beside 8 kB of hidden state.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""Label of tokens that do not count."""
LOGITS_AT_ONCE = 1 << 26
"""Logits that exist together: 256 MB in fp32."""


@dataclass(frozen=True, slots=True, eq=False)
class TiledLogits:
    """Output of a head whose logits are computed for some tokens at a time."""

    hidden: Tensor
    """[B, N, C]."""
    project: Callable[[Tensor], Tensor]
    """Function from hidden states [B, n, C] to logits [B, n, V]."""
    vocabulary: int
    """Logits V of a token."""

    def compute(self) -> Tensor:
        """Return all logits: [B, N, V]."""
        return self.project(self.hidden)

    def summed_loss(self, labels: Tensor, *, at_once: int = LOGITS_AT_ONCE) -> Tensor:
        """Return the sum of the cross entropies of labelled tokens; the backward computes their logits again.

        Args:
            labels: [B, N]; -100 does not count.
            at_once: logits that exist together at most; one token's at least.
        """
        length = max(at_once // (len(labels) * self.vocabulary), 1)
        tiles = zip(self.hidden.split(length, dim=1), labels.split(length, dim=1), strict=True)
        losses = [
            # No layer of a head draws random numbers.
            checkpoint(self._summed, hidden, tile, use_reentrant=False, preserve_rng_state=False)
            for hidden, tile in tiles
        ]
        return torch.stack(losses).sum()

    def _summed(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return summed_cross_entropy(self.project(hidden), labels)


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropies of labelled tokens, in fp32 at least.

    Args:
        logits: [B, N, V].
        labels: [B, N]; -100 does not count.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
