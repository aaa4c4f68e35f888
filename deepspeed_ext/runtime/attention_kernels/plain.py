"""Attention written out, in operations of any device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention_kernels.interface import Attended, Gradients
from deepspeed_ext.runtime.positional_dropout import DropoutPlace, attention_keep_mask


@dataclass(frozen=True, slots=True)
class AttentionDropout:
    """Dropout on the probabilities of attention.

    Attributes:
        probability: of zero, above 0.
        place: of the queries.
        first_head: number of the first query head, where a rank holds some of them.
        first_key: position of the first key.
    """

    probability: float
    place: DropoutPlace
    first_head: int = 0
    first_key: int = 0

    def scaled_mask(self, weights: Tensor) -> Tensor:
        """What each of the weights [B, G, R, N, E] is multiplied by: 0, or 1 / (1 - probability)."""
        _, groups, heads, length, keys = weights.shape
        rows = self.place.rows(length, weights.device)
        kept = attention_keep_mask(rows, self.first_head, groups * heads, self.first_key, keys, self.probability)
        return kept.unflatten(1, (groups, heads)).to(weights.dtype) / (1 - self.probability)


class PlainAttention:
    """Attention written out, for devices and dtypes without a fused kernel, and for dropout by position.

    Scores [B, G, H/G, N, E] exist while the kernel runs; the backward computes them again.

    Args:
        dropout: on the probabilities; None for none.
    """

    def __init__(self, dropout: AttentionDropout | None = None) -> None:
        self._dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend."""
        scores = self._scores(query, key, scale)
        log_sum_exp = scores.logsumexp(-1)
        weights = self._dropped((scores - log_sum_exp.unsqueeze(-1)).exp()).to(value.dtype)
        output = torch.einsum("bgrne,begd->bngrd", weights, value)
        return Attended(output.flatten(2, 3), log_sum_exp.flatten(1, 2))

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Gradients, from weights recomputed."""
        groups = key.shape[2]
        log_sum_exp = attended.log_sum_exp.unflatten(1, (groups, -1)).unsqueeze(-1)
        weights = (self._scores(query, key, scale) - log_sum_exp).exp()
        grouped = output_gradient.unflatten(2, (groups, -1)).to(weights.dtype)
        of_weights = self._dropped(torch.einsum("bngrd,begd->bgrne", grouped, value.to(weights.dtype)))
        # Row sums of weights * of_weights, which equal output . output_gradient.
        row = (output_gradient * attended.output).sum(-1, dtype=weights.dtype).transpose(1, 2)
        of_scores = weights * (of_weights - row.unflatten(1, (groups, -1)).unsqueeze(-1)) * scale
        query_grouped = query.unflatten(2, (groups, -1)).to(weights.dtype)
        return Gradients.cut(
            torch.einsum("bgrne,begd->bngrd", of_scores, key.to(weights.dtype)).flatten(2, 3).to(query.dtype),
            torch.einsum("bgrne,bngrd->begd", of_scores, query_grouped).to(key.dtype),
            torch.einsum("bgrne,bngrd->begd", self._dropped(weights), grouped).to(value.dtype),
        )

    def _dropped(self, weights: Tensor) -> Tensor:
        return weights if self._dropout is None else weights * self._dropout.scaled_mask(weights)

    @staticmethod
    def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
        at_least_fp32 = torch.promote_types(query.dtype, torch.float32)
        grouped = query.unflatten(2, (key.shape[2], -1)).to(at_least_fp32)
        scores = torch.einsum("bngrd,begd->bgrne", grouped, key.to(at_least_fp32)) * scale
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        unseen = unseen.triu(key.shape[1] - query.shape[1] + 1)
        return scores.masked_fill(unseen, float("-inf"))
