"""Attention on CPUs."""

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention_kernels.interface import Attended, Gradients, QueryTile, query_tiles

_aten = torch.ops.aten


class CpuFlash:
    """Torch's flash attention for CPUs, which aligns its causal mask to the upper left: prefix and diagonal apart.

    The two parts merge exactly by their log-sum-exps, and the backward of each part is exact when given the merged
    output and log-sum-exp, since softmax weights are exp(score - log-sum-exp) whatever part a key is in.

    A sliding window is a mask that the kernel is given, tile by tile of the queries: keys out of the reach of a whole
    tile are then not computed.

    Args:
        window: keys that a query sees, itself included; None for all up to its own.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend to the diagonal, then to the prefix if there is one, as in `AttentionKernel`."""
        if self._window is not None:
            return self._forward_in_window(query, key, value, scale, self._window)
        prefix_len = key.shape[1] - query.shape[1]
        diagonal = _forward(query, key[:, prefix_len:], value[:, prefix_len:], scale, causal=True)
        if not prefix_len:
            return diagonal
        prefix = _forward(query, key[:, :prefix_len], value[:, :prefix_len], scale, causal=False)
        log_sum_exp = torch.logaddexp(diagonal.log_sum_exp, prefix.log_sum_exp)
        output = prefix.output * _weight(prefix, log_sum_exp)
        output += diagonal.output * _weight(diagonal, log_sum_exp)
        return Attended(output, log_sum_exp)

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients of diagonal and prefix, which share the queries, as in `AttentionKernel`."""
        if self._window is not None:
            return self._backward_in_window(output_gradient, query, key, value, attended, scale, self._window)
        prefix_len = key.shape[1] - query.shape[1]
        diagonal = key[:, prefix_len:], value[:, prefix_len:]
        of_query, of_key, of_value = _backward(output_gradient, query, *diagonal, attended, scale, causal=True)
        if not prefix_len:
            return Gradients.cut(of_query, of_key, of_value)
        prefix = key[:, :prefix_len], value[:, :prefix_len]
        of_query_too, *of_prefix = _backward(output_gradient, query, *prefix, attended, scale, causal=False)
        return Gradients(of_query.add_(of_query_too), (of_key, of_value), (of_prefix[0], of_prefix[1]))

    @staticmethod
    def _forward_in_window(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Attended:
        output = torch.empty_like(query)
        at_least_fp32 = torch.promote_types(query.dtype, torch.float32)
        log_sum_exp = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=at_least_fp32)
        for tile in query_tiles(query.shape[1], key.shape[1], window, _tile_length(window)):
            queries, keys = slice(tile.first, tile.end), slice(tile.first_key, tile.end_key)
            mask = _mask(tile, window, query.dtype)
            attended = _forward(query[:, queries], key[:, keys], value[:, keys], scale, mask=mask)
            output[:, queries], log_sum_exp[:, :, queries] = attended
        return Attended(output, log_sum_exp)

    @staticmethod
    def _backward_in_window(
        output_gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Attended,
        scale: float,
        window: int,
    ) -> Gradients:
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for tile in query_tiles(query.shape[1], key.shape[1], window, _tile_length(window)):
            queries, keys = slice(tile.first, tile.end), slice(tile.first_key, tile.end_key)
            found = _backward(
                output_gradient[:, queries],
                query[:, queries],
                key[:, keys],
                value[:, keys],
                Attended(attended.output[:, queries], attended.log_sum_exp[:, :, queries].contiguous()),
                scale,
                mask=_mask(tile, window, query.dtype),
            )
            of_query[:, queries] = found[0]
            of_key[:, keys] += found[1]
            of_value[:, keys] += found[2]
        return Gradients.cut(of_query, of_key, of_value)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> Attended:
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output, log_sum_exp = _aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first, 0.0, causal, attn_mask=mask, scale=scale
    )
    return Attended(output.transpose(1, 2), log_sum_exp)


def _backward(
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Attended,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> list[Tensor]:
    """Gradients of queries [B, N, H, D], keys and values [B, E, G, D]."""
    tensors = (output_gradient, query, key, value, attended.output)
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(tensor.transpose(1, 2) for tensor in tensors), attended.log_sum_exp, 0.0, causal, attn_mask=mask, scale=scale
    )
    return [gradient.transpose(1, 2) for gradient in gradients]


def _tile_length(window: int) -> int:
    """Queries of a tile: as it is longer, more keys out of the windows are computed; as it is shorter, calls cost."""
    return max(128, window // 4)


def _mask(tile: QueryTile, window: int, dtype: torch.dtype) -> Tensor:
    """Mask that is added to the scores [N, E] of a tile: 0 in the window of a query, minus infinity elsewhere."""
    num_queries, num_keys = tile.end - tile.first, tile.end_key - tile.first_key
    # Keys from the first of a query's window on, up to its own.
    last = num_keys - num_queries
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril_(last).triu_(last + 1 - window)
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _weight(part: Attended, log_sum_exp: Tensor) -> Tensor:
    """Share of a part in the merged softmax, [B, N, H, 1]."""
    return (part.log_sum_exp - log_sum_exp).exp().transpose(1, 2).unsqueeze(-1).to(part.output.dtype)
