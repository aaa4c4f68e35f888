"""Attention on CUDA devices, by the kernels that torch has.

    flash               fp16, bf16      causal mask aligned to the bottom right, so one call does; documents too
    memory-efficient    and fp32        the same mask by number 2; key heads are repeated for the queries of their group

Both take sliding windows: flash attention counts the keys before a query, the other kernel counts the query's own too.

What each of them takes is read off torch 2.13: `aten/src/ATen/native/transformers/cuda`, files `sdp_utils.cpp`,
`flash_attn/flash_api.cpp`, `attention_backward.cu` and `mem_eff_attention/kernel_forward.h`.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.runtime.attention_kernels.interface import Attended, Gradients

_aten = torch.ops.aten

Capability = tuple[int, int]
"""Compute capability of a device, such as (8, 0)."""

CAUSAL_FROM_BOTTOM_RIGHT = 2
"""Number of a mask of the memory-efficient kernel (`CustomMaskType` in its sources)."""

LOG_SUM_EXP_ROW = 32
"""The memory-efficient kernel pads the queries of its log-sum-exp to a multiple of so many (`kAlignLSE`)."""


@cache
def capability_of(device: torch.device) -> Capability:
    """Compute capability of a CUDA device; (0, 0) where it is no device of NVIDIA's, whose kernels differ."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def flash_takes(dtype: torch.dtype, head_size: int, capability: Capability) -> bool:
    """Whether flash attention computes forward and backward for such heads.

    Args:
        dtype: type of queries, keys and values.
    """
    # On these, the backward of these sizes wants more shared memory than there is.
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    too_large = 192 < head_size <= 224 if small else False
    fits = head_size % 8 == 0 and head_size <= 256 and not too_large
    return dtype in (torch.float16, torch.bfloat16) and capability >= (8, 0) and fits


def memory_efficient_takes(dtype: torch.dtype, head_size: int, capability: Capability) -> bool:
    """Whether the memory-efficient kernel computes forward and backward for such heads.

    Args:
        dtype: type of queries, keys and values.
    """
    oldest = {torch.float32: (5, 0), torch.float16: (5, 0), torch.bfloat16: (8, 0)}
    # Rows of 16 bytes are what tensor cores load at once.
    return dtype in oldest and capability >= oldest[dtype] and head_size * dtype.itemsize % 16 == 0


class CudaFlash:
    """Flash attention: one call, since its causal mask is aligned to the bottom right.

    Args:
        window: keys that a query sees, itself included; None for all up to its own.
    """

    def __init__(self, window: int | None = None) -> None:
        self._before = _keys_before(window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Return output and log-sum-exp, as in `AttentionKernel`."""
        output, log_sum_exp, *_ = _aten._flash_attention_forward(
            query,
            key,
            value,
            None,
            None,
            query.shape[1],
            key.shape[1],
            0.0,
            True,
            False,
            scale=scale,
            window_size_left=self._before,
        )
        return Attended(output, log_sum_exp)

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients, as in `AttentionKernel`."""
        # Without dropout no state of a random generator is read: any tensor stands for it.
        no_random_state = attended.log_sum_exp
        return Gradients.cut(
            *_aten._flash_attention_backward(
                output_gradient,
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
                window_size_left=self._before,
            )
        )


def _keys_before(window: int | None) -> int | None:
    """Keys before its own that a query sees: how flash attention takes a window."""
    return None if window is None else window - 1


class Runs(NamedTuple):
    """Bounds of the runs of queries and of keys in one row; runs do not attend to each other."""

    queries: Tensor
    """Int32 [runs + 1], the first 0, the last the number of queries."""
    keys: Tensor
    """The same of keys. Of each run the last keys are those of its queries."""
    longest_queries: int
    """Queries of the longest run."""
    longest_keys: int
    """Keys of the longest run."""


class CudaFlashOfRuns:
    """Flash attention of many runs in one call, each by a causal mask of its own, aligned to the bottom right.

    Shapes have no dimension of rows: queries are [N, H, D], keys and values [E, G, D], the log-sum-exp [H, N].

    Args:
        window: keys that a query sees, itself included; None for all of its run up to its own.
    """

    def __init__(self, window: int | None = None) -> None:
        self._before = _keys_before(window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output [N, H, D] and its log-sum-exp [H, N].

        Args:
            query: [N, H, D].
            key: [E, G, D].
            value: [E, G, D].
            scale: factor of the scores.
        """
        output, log_sum_exp, *_ = _aten._flash_attention_forward(
            query, key, value, *runs, 0.0, True, False, scale=scale, window_size_left=self._before
        )
        return output, log_sum_exp

    def backward(
        self,
        output_gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum_exp: Tensor,
        runs: Runs,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries [N, H, D], keys and values [E, G, D].

        Args:
            output_gradient: [N, H, D].
            query: [N, H, D].
            key: [E, G, D].
            value: [E, G, D].
            output: [N, H, D].
            log_sum_exp: [H, N].
            scale: factor of the scores.
        """
        return _aten._flash_attention_backward(
            output_gradient,
            query,
            key,
            value,
            output,
            log_sum_exp,
            *runs,
            0.0,
            True,
            log_sum_exp,
            log_sum_exp,
            scale=scale,
            window_size_left=self._before,
        )


class MemoryEfficient:
    """The memory-efficient kernel, for fp32 and for what flash attention does not take.

    It knows no groups: keys and values are repeated for each query head while it runs. In fp32 it computes products by
    three products of tensor cores (`OpMultiplyAddFastF32`), which loses little.

    Args:
        window: keys that a query sees, itself included; None for all up to its own.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Return output and log-sum-exp, as in `AttentionKernel`."""
        repeats = query.shape[2] // key.shape[2]
        output, log_sum_exp, *_ = _aten._efficient_attention_forward(
            query,
            _repeated(key, repeats),
            _repeated(value, repeats),
            None,
            None,
            None,
            None,
            None,
            0.0,
            CAUSAL_FROM_BOTTOM_RIGHT,
            True,
            scale=scale,
            window_size=self._window,
        )
        # It is padded, as the backward wants it: a view keeps the strides.
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
            query,
            _repeated(key, repeats),
            _repeated(value, repeats),
            None,
            attended.output,
            None,
            None,
            query.shape[1],
            key.shape[1],
            _padded(attended.log_sum_exp),
            0.0,
            no_random_state,
            no_random_state,
            CAUSAL_FROM_BOTTOM_RIGHT,
            False,
            scale=scale,
            window_size=self._window,
        )
        if repeats > 1:
            of_key, of_value = (each.unflatten(2, (groups, repeats)).sum(3) for each in (of_key, of_value))
        return Gradients.cut(of_query, of_key, of_value)


def _padded(log_sum_exp: Tensor) -> Tensor:
    """A log-sum-exp whose rows are padded as those that the forward gave; what came of pieces is not."""
    if log_sum_exp.stride(1) % LOG_SUM_EXP_ROW == 0:
        return log_sum_exp
    return F.pad(log_sum_exp, (0, -log_sum_exp.shape[-1] % LOG_SUM_EXP_ROW), value=float("inf"))


def _repeated(heads: Tensor, repeats: int) -> Tensor:
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=2)
