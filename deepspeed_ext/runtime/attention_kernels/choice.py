"""Choice of the attention kernel, by device, dtype and head size."""

from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention_kernels.cpu import CpuFlash
from deepspeed_ext.runtime.attention_kernels.cuda import (
    Capability,
    CudaFlash,
    CudaFlashOfRuns,
    MemoryEfficient,
    capability_of,
    flash_takes,
    memory_efficient_takes,
)
from deepspeed_ext.runtime.attention_kernels.interface import AttentionKernel
from deepspeed_ext.runtime.attention_kernels.plain import PlainAttention


def kernel_for(
    query: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    capability: Callable[[torch.device], Capability] = capability_of,
) -> AttentionKernel:
    """The best kernel for queries [B, N, H, D].

    Args:
        query: the queries, of which device, dtype and head size count.
        window: keys that a query sees, itself included; None for all up to its own.
        softcap: limit of the scores, which no fused kernel of torch's knows; None for none.
    """
    if softcap is not None:
        return PlainAttention(window=window, softcap=softcap)
    if query.device.type == "cpu":
        return CpuFlash(window)
    if query.device.type == "cuda":
        heads = query.dtype, query.shape[-1], capability(query.device)
        if flash_takes(*heads):
            return CudaFlash(window)
        if memory_efficient_takes(*heads):
            return MemoryEfficient(window)
    return PlainAttention(window=window)


def kernel_of_runs_for(
    query: Tensor,
    window: int | None = None,
    capability: Callable[[torch.device], Capability] = capability_of,
) -> CudaFlashOfRuns | None:
    """Return the kernel that attends within many runs of tokens in one call; None if there is none, as on CPUs.

    Args:
        query: [B, N, H, D], for its device, dtype and head size.
        window: keys that a query sees, itself included; None for all of its run up to its own.
    """
    if query.device.type == "cuda" and flash_takes(query.dtype, query.shape[-1], capability(query.device)):
        return CudaFlashOfRuns(window)
    return None
