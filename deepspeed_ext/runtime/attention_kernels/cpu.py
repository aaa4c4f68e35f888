"""Attention on CPUs."""

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention_kernels.interface import Attended, Gradients

_aten = torch.ops.aten


class CpuFlash:
    """Torch's flash attention for CPUs, which aligns its causal mask to the upper left: prefix and diagonal apart.

    The two parts merge exactly by their log-sum-exps, and the backward of each part is exact when given the merged
    output and log-sum-exp, since softmax weights are exp(score - log-sum-exp) whatever part a key is in.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend to the diagonal, then to the prefix if there is one, as in `AttentionKernel`."""
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
        """Return the gradients of diagonal and prefix, which share the queries, as in `AttentionKernel`."""
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
