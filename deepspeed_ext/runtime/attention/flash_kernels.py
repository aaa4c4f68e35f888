"""Fused attention kernels of torch on CPUs and CUDA devices, and the choice of a kernel by device, dtype and head size.

    flash               fp16, bf16      causal mask aligned to the bottom right, so one call does; documents too
    memory-efficient    and fp32        the same mask by number 2; key heads are repeated for the queries of their group

Both take sliding windows: flash attention counts the keys before a query, the other kernel counts the query's own too.

The conditions of each follow torch 2.13: `aten/src/ATen/native/transformers/cuda`, files `sdp_utils.cpp`,
`flash_attn/flash_api.cpp`, `attention_backward.cu` and `mem_eff_attention/kernel_forward.h`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F

from deepspeed_ext.runtime.attention.kernels import (
    Attended,
    AttentionKernel,
    Gradients,
    PiecewiseAttention,
    Places,
    PlainAttention,
    QueryTile,
    for_values,
    query_tiles,
)

_aten = torch.ops.aten


class CpuFlash:
    """Torch's flash attention for CPUs, which aligns its causal mask to the upper left: prefix and diagonal apart.

    The two parts merge exactly by their log-sum-exps, and the backward of each part is exact when given the merged
    output and log-sum-exp, since softmax weights are exp(score - log-sum-exp) in either part.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend to the diagonal, then to the prefix if there is one, as in `AttentionKernel`."""
        prefix_len = key.shape[1] - query.shape[1]
        diagonal = _forward(query, key[:, prefix_len:], value[:, prefix_len:], scale, causal=True)
        if not prefix_len:
            return diagonal
        prefix = _forward(query, key[:, :prefix_len], value[:, :prefix_len], scale, causal=False)
        # Shares of the merged softmax, exp(part - log-sum-exp of both), which add up to 1.
        of_prefix = (prefix.log_sum_exp - diagonal.log_sum_exp).sigmoid().transpose(1, 2).unsqueeze(-1)
        output = diagonal.output.lerp_(prefix.output, of_prefix.to(query.dtype))
        return Attended(output, torch.logaddexp(diagonal.log_sum_exp, prefix.log_sum_exp))

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients of diagonal and prefix, which share the queries, as in `AttentionKernel`."""
        prefix_len = key.shape[1] - query.shape[1]
        diagonal = key[:, prefix_len:], value[:, prefix_len:]
        of_query, of_key, of_value = _backward(output_gradient, query, *diagonal, attended, scale, causal=True)
        if not prefix_len:
            return Gradients.cut(of_query, of_key, of_value)
        prefix = key[:, :prefix_len], value[:, :prefix_len]
        of_query_too, *of_prefix = _backward(output_gradient, query, *prefix, attended, scale, causal=False)
        return Gradients(of_query.add_(of_query_too), (of_key, of_value), (of_prefix[0], of_prefix[1]))


class _MaskedCpuFlash:
    """Torch's flash attention for CPUs with a mask [N, E] that is added to the scores."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        return _forward(query, key, value, scale, mask=self._mask)

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        return Gradients.cut(*_backward(output_gradient, query, key, value, attended, scale, mask=self._mask))


def cpu_flash(window: int | None = None) -> AttentionKernel:
    """Torch's flash attention for CPUs; in a sliding window with a mask for each tile of the queries.

    Keys out of the reach of a whole tile are not computed.
    """
    if window is None:
        return CpuFlash()

    def tiles(query: Tensor, key: Tensor) -> Iterator[tuple[AttentionKernel, Places, Places]]:
        # Longer tiles compute more keys out of the windows; shorter ones take more calls.
        for tile in query_tiles(query.shape[1], key.shape[1], window, max(128, window // 4)):
            yield _MaskedCpuFlash(_mask(tile, window, query.dtype)), (_ALL, tile.queries), (_ALL, tile.keys)

    return PiecewiseAttention(tiles)


_ALL = slice(None)


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


def _mask(tile: QueryTile, window: int, dtype: torch.dtype) -> Tensor:
    """Mask that is added to the scores [N, E] of a tile: 0 in the window of a query, minus infinity elsewhere."""
    num_queries, num_keys = (each.stop - each.start for each in tile)
    # Keys from the first of a query's window on, up to its own.
    last = num_keys - num_queries
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril_(last).triu_(last + 1 - window)
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(~seen, float("-inf"))


Capability = tuple[int, int]
"""Compute capability of a device, such as (8, 0)."""

CAUSAL_FROM_BOTTOM_RIGHT = 2
"""Number of a mask of the memory-efficient kernel (`CustomMaskType` in its sources)."""

LOG_SUM_EXP_ROW = 32
"""The memory-efficient kernel pads the queries of its log-sum-exp to a multiple of this (`kAlignLSE`)."""


@cache
def capability_of(device: torch.device) -> Capability:
    """Compute capability of a CUDA device; (0, 0) for devices of other makers, where kernels differ."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def flash_takes(dtype: torch.dtype, head_size: int, capability: Capability) -> bool:
    """Whether flash attention computes forward and backward for such heads."""
    # There the backward of these sizes exceeds the shared memory.
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    too_large = 192 < head_size <= 224 if small else False
    fits = head_size % 8 == 0 and head_size <= 256 and not too_large
    return dtype in (torch.float16, torch.bfloat16) and capability >= (8, 0) and fits


def memory_efficient_takes(dtype: torch.dtype, head_size: int, capability: Capability) -> bool:
    """Whether the memory-efficient kernel computes forward and backward for such heads."""
    oldest = {torch.float32: (5, 0), torch.float16: (5, 0), torch.bfloat16: (8, 0)}
    # Tensor cores load 16 bytes of a row at once.
    return dtype in oldest and capability >= oldest[dtype] and head_size * dtype.itemsize % 16 == 0


class Runs(NamedTuple):
    """Bounds of the runs of queries and of keys in one row. Each run attends only to itself."""

    queries: Tensor
    """Int32 [runs + 1], the first 0, the last the number of queries."""
    keys: Tensor
    """The same for keys. The last keys of a run have the positions of its queries."""
    longest_queries: int
    """Queries of the longest run."""
    longest_keys: int
    """Keys of the longest run."""


class CudaFlash:
    """Flash attention: one call, since its causal mask is aligned to the bottom right.

    With runs, each attends to itself. Shapes then have no dimension of rows: queries are [N, H, D], keys and values
    [E, G, D], the log-sum-exp [H, N].
    """

    def __init__(self, window: int | None = None) -> None:
        self._before = None if window is None else window - 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float, runs: Runs | None = None) -> Attended:
        """Return output and log-sum-exp, as in `AttentionKernel`."""
        bounds = runs or (None, None, query.shape[1], key.shape[1])
        output, log_sum_exp, *_ = _aten._flash_attention_forward(
            query, key, value, *bounds, 0.0, True, False, scale=scale, window_size_left=self._before
        )
        return Attended(output, log_sum_exp)

    def gradients(
        self,
        output_gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Attended,
        scale: float,
        runs: Runs | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values, each [B, tokens, heads, D] as given."""
        bounds = runs or (None, None, query.shape[1], key.shape[1])
        # Without dropout no state of a random generator is read: any tensor may take its place.
        no_random_state = attended.log_sum_exp
        return _aten._flash_attention_backward(
            output_gradient,
            *(query, key, value),
            *attended,
            *bounds,
            *(0.0, True, no_random_state, no_random_state),
            scale=scale,
            window_size_left=self._before,
        )

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients, as in `AttentionKernel`."""
        return Gradients.cut(*self.gradients(output_gradient, query, key, value, attended, scale))


class MemoryEfficient:
    """The memory-efficient kernel, for fp32 and for heads that flash attention does not take.

    It has no groups: keys and values are repeated for each query head while it runs. In fp32 it computes products by
    three products of tensor cores (`OpMultiplyAddFastF32`), with little loss.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Return output and log-sum-exp, as in `AttentionKernel`."""
        repeats = query.shape[2] // key.shape[2]
        output, log_sum_exp, *_ = _aten._efficient_attention_forward(
            *(query, _repeated(key, repeats), _repeated(value, repeats)),
            *(None, None, None, None, None),  # bias, and bounds of runs
            *(0.0, CAUSAL_FROM_BOTTOM_RIGHT, True),
            scale=scale,
            window_size=self._window,
        )
        # It is padded, as the backward needs it: a view keeps the strides.
        return Attended(output, log_sum_exp[..., : query.shape[1]])

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients, as in `AttentionKernel`."""
        groups = key.shape[2]
        repeats = query.shape[2] // groups
        no_random_state = attended.log_sum_exp
        of_query, of_key, of_value, _ = _aten._efficient_attention_backward(
            output_gradient,
            *(query, _repeated(key, repeats), _repeated(value, repeats)),
            *(None, attended.output, None, None),
            *(query.shape[1], key.shape[1], _padded(attended.log_sum_exp)),
            *(0.0, no_random_state, no_random_state, CAUSAL_FROM_BOTTOM_RIGHT, False),
            scale=scale,
            window_size=self._window,
        )
        if repeats > 1:
            of_key, of_value = (each.unflatten(2, (groups, repeats)).sum(3) for each in (of_key, of_value))
        return Gradients.cut(of_query, of_key, of_value)


def _padded(log_sum_exp: Tensor) -> Tensor:
    """A log-sum-exp with padded rows, as the forward returns; one that was joined from pieces is not padded."""
    if log_sum_exp.stride(1) % LOG_SUM_EXP_ROW == 0:
        return log_sum_exp
    return F.pad(log_sum_exp, (0, -log_sum_exp.shape[-1] % LOG_SUM_EXP_ROW), value=float("inf"))


def _repeated(heads: Tensor, repeats: int) -> Tensor:
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=2)


_NEWER = {"FA3": ("flash_attn_interface", (9,)), "FA4": ("flash_attn", (9, 10))}
"""By torch's names, preferred first: package, and major compute capabilities that torch's adapter takes."""


def activate_flash_attention(samples: Sequence[tuple[Tensor, Tensor, int | None]]) -> list[str]:
    """Use FlashAttention-3, else 4, else torch's own, FlashAttention-2, in this process; return lines for the log.

    A newer one must first give the results of torch's own: its package may not fit this torch, CUDA, device or size of
    heads. With deterministic algorithms only torch's own is used, as sums in the backward of others have no order.

    Args:
        samples: queries [1, N, H, D], keys [1, E, G, D] and the window of each kind of layer.
    """
    if not samples or not all(isinstance(kernel_for(query), CudaFlash) for query, _, _ in samples):
        return []
    known: list[str] = getattr(attention, "list_flash_attention_impls", list)()  # Since torch 2.11.
    major, lines, own = capability_of(samples[0][0].device)[0], [], _both_ways(samples)
    for name, (package, majors) in _NEWER.items():
        if major not in majors or name not in known or torch.are_deterministic_algorithms_enabled():
            continue
        try:
            attention.activate_flash_attention_impl(name)
            if all((new - old).norm() <= 0.02 * old.norm() for new, old in zip(_both_ways(samples), own, strict=True)):
                return [*lines, f" attention by FlashAttention-{name[2:]}"]
            raise ValueError("its results differ from torch's own flash attention")
        except Exception as error:  # Compilers of kernels raise their own.
            attention.restore_flash_attention_impl(_raise_warn=False)
            if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] != package:
                reason = str(error).partition("\n")[0] or type(error).__name__
                lines.append(f" warning: FlashAttention-{name[2:]} is installed, but cannot be used: {reason}")
    return [*lines, " attention by FlashAttention-2" + "; docs/how-to/gpu.md has newer ones" * (major in (9, 10))]


def _both_ways(samples: Sequence[tuple[Tensor, Tensor, int | None]]) -> list[Tensor]:
    """Outputs, log-sum-exps and gradients of `CudaFlash`, as one row and as one run."""
    found: list[Tensor] = []
    for query, key, window in samples:
        kernel, scale = CudaFlash(window), query.shape[-1] ** -0.5
        bounds = [torch.tensor([0, each.shape[1]], dtype=torch.int32).to(each.device) for each in (query, key)]
        for runs in (None, Runs(*bounds, query.shape[1], key.shape[1])):
            one, other = (query, key) if runs is None else (query.squeeze(0), key.squeeze(0))
            attended = kernel.forward(one, other, other, scale, runs)
            found += *attended, *kernel.gradients(one, one, other, other, attended, scale, runs)
    return found


def kernel_for(
    query: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    capability: Callable[[torch.device], Capability] = capability_of,
    value_size: int | None = None,
) -> AttentionKernel:
    """The fastest kernel for queries [B, N, H, D].

    Args:
        softcap: limit of the scores, which no fused kernel of torch supports; None for none.
        value_size: width of the values; None for D.
    """
    if softcap is not None:
        return PlainAttention(window=window, softcap=softcap)
    value_size = value_size or query.shape[-1]
    if query.device.type == "cpu":
        return for_values(cpu_flash(window), query, value_size)
    if query.device.type == "cuda":
        dtype, device = query.dtype, capability(query.device)
        if flash_takes(dtype, query.shape[-1], device):
            return for_values(CudaFlash(window), query, value_size)
        if all(memory_efficient_takes(dtype, size, device) for size in (query.shape[-1], value_size)):
            return MemoryEfficient(window)
    return PlainAttention(window=window)


def kernel_of_runs_for(
    query: Tensor,
    window: int | None = None,
    capability: Callable[[torch.device], Capability] = capability_of,
) -> CudaFlash | None:
    """The kernel for queries [T, heads, D] in runs of tokens, in one call; None if there is none, as on CPUs."""
    if query.device.type == "cuda" and flash_takes(query.dtype, query.shape[-1], capability(query.device)):
        return CudaFlash(window)
    return None
