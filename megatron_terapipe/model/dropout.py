"""Dropout on the residual stream."""

from enum import IntEnum

import torch
from torch import Tensor

from megatron_terapipe.model.attention import Past
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks


class DropoutSite(IntEnum):
    """The uses of dropout in one layer, each with masks of its own. Attention's probabilities are site 0."""

    EMBEDDING = 1
    ATTENTION = 2
    MLP = 3


def residual_dropout(
    hidden: Tensor,
    probability: float,
    site: DropoutSite,
    past: Past,
    ranks: TensorParallelRanks,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Return `hidden` after dropout, plus the residual: [B, n, hidden].

    Args:
        hidden: [B, n, hidden] of the tokens that this rank has between the matrices.
        past: the tokens before, and the random numbers of this micro-batch.
        ranks: ranks that share the tokens.
        residual: [B, n, hidden] to add; None to add nothing.
        multiplier: factor of `hidden` as it is added to the residual.
    """
    if not probability:
        return hidden if residual is None else torch.add(residual, hidden, alpha=multiplier)
    if multiplier != 1:
        hidden = hidden * multiplier
    first_token = ranks.first_token(hidden.shape[1])
    return past.dropout(hidden, probability, site=site, first_token=first_token, residual=residual)
