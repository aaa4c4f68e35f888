"""Attention of one token slice over the keys and values up to its end, forward and backward, by device.

Shapes, here and in `attention`: queries [B, N, H, D] of the N tokens of a token slice; keys and values [B, E, G, D] of
all E tokens up to its end, H a multiple of G (grouped queries); log-sum-exp [B, H, N], in at least fp32. Query n sees
the keys 0 .. E - N + n, which is causal attention aligned to the bottom right:

    prefix    diagonal
    x x x x | x . .        E - N keys that all queries see, then N keys under the usual causal mask
    x x x x | x x .
    x x x x | x x x
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepspeed_ext.runtime.positional_dropout import DropoutPlace, attention_keep_mask

_aten = torch.ops.aten


class Attended(NamedTuple):
    """Output [B, N, H, D] of attention, and its log-sum-exp [B, H, N]."""

    output: Tensor
    log_sum_exp: Tensor


class Gradients(NamedTuple):
    """What the backward of a token slice's attention finds.

    Attributes:
        query: [B, N, H, D].
        own: of the token slice's own keys and values, each [B, N, G, D]; not yet complete.
        prefix: of the keys and values before it, each [B, E - N, G, D].
    """

    query: Tensor
    own: tuple[Tensor, Tensor]
    prefix: tuple[Tensor, Tensor]

    @classmethod
    def cut(cls, query: Tensor, key: Tensor, value: Tensor) -> "Gradients":
        """From gradients of all E keys and values: views."""
        prefix_len = key.shape[1] - query.shape[1]
        return cls(query, (key[:, prefix_len:], value[:, prefix_len:]), (key[:, :prefix_len], value[:, :prefix_len]))


class AttentionKernel(Protocol):
    """Forward and backward of attention, without autograd."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend."""

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Gradients of queries, keys and values from that of the output."""


def kernel_for(query: Tensor) -> AttentionKernel:
    """The best kernel for a tensor's device and dtype."""
    if query.device.type == "cpu":
        return CpuFlash()
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0:
        return CudaFlash()
    return PlainAttention()


class CpuFlash:
    """Torch's flash attention for CPUs, which aligns its causal mask to the upper left: prefix and diagonal apart.

    The two parts merge exactly by their log-sum-exps, and the backward of each part is exact when given the merged
    output and log-sum-exp, since softmax weights are exp(score - log-sum-exp) whatever part a key is in.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend to the diagonal, then to the prefix if there is one."""
        prefix_len = key.shape[1] - query.shape[1]
        diagonal = self._part(query, key[:, prefix_len:], value[:, prefix_len:], scale, causal=True)
        if not prefix_len:
            return diagonal
        prefix = self._part(query, key[:, :prefix_len], value[:, :prefix_len], scale, causal=False)
        log_sum_exp = torch.logaddexp(diagonal.log_sum_exp, prefix.log_sum_exp)
        output = prefix.output * _weight(prefix, log_sum_exp)
        output += diagonal.output * _weight(diagonal, log_sum_exp)
        return Attended(output, log_sum_exp)

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Gradients of both parts; the prefix and the diagonal share the queries."""
        prefix_len = key.shape[1] - query.shape[1]

        def part(start: int, end: int, *, causal: bool) -> list[Tensor]:
            tensors = (output_gradient, query, key[:, start:end], value[:, start:end], attended.output)
            gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(tensor.transpose(1, 2) for tensor in tensors), attended.log_sum_exp, 0.0, causal, scale=scale
            )
            return [gradient.transpose(1, 2) for gradient in gradients]

        of_query, of_key, of_value = part(prefix_len, key.shape[1], causal=True)
        if not prefix_len:
            return Gradients.cut(of_query, of_key, of_value)
        of_query_too, *of_prefix = part(0, prefix_len, causal=False)
        return Gradients(of_query.add_(of_query_too), (of_key, of_value), (of_prefix[0], of_prefix[1]))

    @staticmethod
    def _part(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Attended:
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output, log_sum_exp = _aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal, scale=scale)
        return Attended(output.transpose(1, 2), log_sum_exp)


def _weight(part: Attended, log_sum_exp: Tensor) -> Tensor:
    """Share of a part in the merged softmax, [B, N, H, 1]."""
    return (part.log_sum_exp - log_sum_exp).exp().transpose(1, 2).unsqueeze(-1).to(part.output.dtype)


class CudaFlash:
    """Flash attention on CUDA: one call, since its causal mask is aligned to the bottom right."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend."""
        output, log_sum_exp, *_ = _aten._flash_attention_forward(
            query, key, value, None, None, query.shape[1], key.shape[1], 0.0, True, False, scale=scale
        )
        return Attended(output, log_sum_exp)

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Gradients; without dropout the kernel's random state is not read."""
        no_random_state = torch.empty(2, dtype=torch.uint64, device=query.device)
        return Gradients.cut(
            *_aten._flash_attention_backward(
                output_gradient.contiguous(),
                query,
                key,
                value,
                attended.output,
                attended.log_sum_exp,
                None,
                None,
                query.shape[1],
                key.shape[1],
                0.0,
                True,
                no_random_state,
                no_random_state,
                scale=scale,
            )
        )


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
