"""Attention written out, in operations of any device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_ext.pointwise import Pointwise
from deepspeed_ext.runtime.attention_kernels.interface import Attended, Gradients
from deepspeed_ext.runtime.sequence.positional_dropout import DropoutPlace, head_rows, scaled_mask


@dataclass(frozen=True, slots=True)
class AttentionDropout:
    """Dropout on the probabilities of attention.

    Attributes:
        probability: probability of zero, above 0.
        place: place of the queries.
        first_head: number of the first query head, where a rank holds some of them.
        first_key: position of the first key.
    """

    probability: float
    place: DropoutPlace
    first_head: int = 0
    first_key: int = 0

    def numbers(self, length: int, num_heads: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor, float]:
        """Random int32 [B, H, N] of queries by head and [E] of keys, which make the mask, and the probability.

        Args:
            length: N.
            num_heads: H.
            num_keys: E.
            device: device of the numbers.
        """
        rows = head_rows(self.place.rows(length, device), self.first_head, num_heads)
        return rows, self.place.columns(self.first_key, num_keys, device), self.probability


class PlainAttention:
    """Attention written out, for devices and dtypes without a fused kernel, and for dropout by position.

    Scores [B, G, H/G, N, E] exist while the kernel runs; the backward computes them again.

    Args:
        dropout: on the probabilities; None for none.
    """

    def __init__(self, dropout: AttentionDropout | None = None) -> None:
        self._dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Return output and log-sum-exp, as in `AttentionKernel`."""
        groups, at_least_fp32 = key.shape[2], torch.promote_types(query.dtype, torch.float32)
        scores = self._scores(
            _by_group(query, groups, at_least_fp32), _by_group(key, groups, at_least_fp32), query, key
        )
        weights, log_sum_exp = _weights(scores, scale, value.dtype, *self._numbers(query, key))
        output = torch.bmm(_flat(weights), _by_group(value, groups, value.dtype))
        return Attended(_by_token(output, query, query.dtype), log_sum_exp.flatten(1, 2))

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients, from weights computed again, as in `AttentionKernel`."""
        groups, at_least_fp32 = key.shape[2], torch.promote_types(query.dtype, torch.float32)
        queries, keys, values, of_output = (
            _by_group(each, groups, at_least_fp32) for each in (query, key, value, output_gradient)
        )
        scores, of_weights = (self._scores(*each, query, key) for each in ((queries, keys), (of_output, values)))
        # Row sums of weights * of_weights, which equal output . output_gradient.
        row = _row_sums(output_gradient, attended.output, groups, at_least_fp32)
        log_sum_exp = attended.log_sum_exp.unflatten(1, (groups, -1))
        numbers = self._numbers(query, key)
        weights, of_scores = (_flat(each) for each in _backward(scores, scale, log_sum_exp, of_weights, row, *numbers))
        return Gradients.cut(
            _by_token(torch.bmm(of_scores, keys), query, query.dtype),
            _by_token(torch.bmm(of_scores.transpose(1, 2), queries), key, key.dtype),
            _by_token(torch.bmm(weights.transpose(1, 2), of_output), value, value.dtype),
        )

    def _numbers(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float] | tuple[()]:
        if self._dropout is None:
            return ()
        return self._dropout.numbers(query.shape[1], query.shape[2], key.shape[1], query.device)

    @staticmethod
    def _scores(rows: Tensor, columns: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Products [B, G, R, N, E] of what queries [B G, R N, D] and keys [B G, E, D] have."""
        shape = query.shape[0], key.shape[2], -1, query.shape[1], key.shape[1]
        return torch.bmm(rows, columns.transpose(1, 2)).view(shape)


def _flat(weights: Tensor) -> Tensor:
    """Weights [B, G, R, N, E] as matrices [B G, R N, E]."""
    return weights.flatten(0, 1).flatten(1, 2)


@Pointwise
def _by_group(heads: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Heads [B, N, G R, D] as matrices [B G, R N, D] of a type."""
    return heads.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).to(dtype).flatten(0, 1).flatten(1, 2)


@Pointwise
def _by_token(product: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices [B G, R N, D] as heads [B, N, G R, D] of a type, as the tensor `like` has them."""
    rows, length, heads, _ = like.shape
    groups = product.shape[0] // rows
    product = product.unflatten(0, (rows, groups)).unflatten(2, (heads // groups, length))
    return product.permute(0, 3, 1, 2, 4).to(dtype).flatten(2, 3).contiguous()


@Pointwise
def _row_sums(one: Tensor, other: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Sums [B, G, R, N] over channels of the product of two tensors [B, N, G R, D]."""
    return (one * other).sum(-1, dtype=dtype).transpose(1, 2).unflatten(1, (groups, -1))


@Pointwise
def _weights(
    scores: Tensor,
    scale: float,
    dtype: torch.dtype,
    head_rows: Tensor | None = None,
    columns: Tensor | None = None,
    probability: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weights [B, G, R, N, E], dropped where there are random numbers, and log-sum-exp [B, G, R, N] of the scores."""
    scores = _masked(scores, scale)
    log_sum_exp = scores.logsumexp(-1)
    weights = (scores - log_sum_exp.unsqueeze(-1)).exp()
    if head_rows is not None:
        weights = weights * scaled_mask(head_rows, columns, probability, weights)
    return weights.to(dtype), log_sum_exp


@Pointwise
def _backward(
    scores: Tensor,
    scale: float,
    log_sum_exp: Tensor,
    of_weights: Tensor,
    row: Tensor,
    head_rows: Tensor | None = None,
    columns: Tensor | None = None,
    probability: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weights as in the forward, and gradients of the scores [B, G, R, N, E].

    Args:
        scores: [B, G, R, N, E].
        scale: factor of the scores.
        log_sum_exp: [B, G, R, N].
        of_weights: gradients of the dropped weights.
        row: sums over each row of weights times their gradients.
        head_rows: random numbers of the queries by head; None for no dropout.
        columns: random numbers of the keys.
        probability: that a weight is dropped.
    """
    weights = (_masked(scores, scale) - log_sum_exp.unsqueeze(-1)).exp()
    if head_rows is None:
        return weights, weights * (of_weights - row.unsqueeze(-1)) * scale
    mask = scaled_mask(head_rows, columns, probability, weights)
    return weights * mask, weights * (of_weights * mask - row.unsqueeze(-1)) * scale


def _masked(scores: Tensor, scale: float) -> Tensor:
    """Scores [..., N, E] scaled, those of keys that a query does not see infinitely low."""
    length, num_keys = scores.shape[-2:]
    keys = torch.arange(num_keys, device=scores.device)
    last_seen = torch.arange(num_keys - length, num_keys, device=scores.device)
    return (scores * scale).masked_fill(keys > last_seen.unsqueeze(1), float("-inf"))
