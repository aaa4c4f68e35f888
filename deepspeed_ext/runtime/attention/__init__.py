"""Attention of one token slice over the keys and values up to its end, forward and backward, by device."""

from deepspeed_ext.runtime.attention.flash_kernels import (
    CpuFlash,
    CudaFlash,
    MemoryEfficient,
    Runs,
    activate_flash_attention_3,
    kernel_for,
    kernel_of_runs_for,
)
from deepspeed_ext.runtime.attention.kernels import (
    Attended,
    AttentionDropout,
    AttentionKernel,
    Gradients,
    PlainAttention,
)

__all__ = [
    "Attended",
    "AttentionDropout",
    "AttentionKernel",
    "CpuFlash",
    "CudaFlash",
    "Gradients",
    "MemoryEfficient",
    "PlainAttention",
    "Runs",
    "activate_flash_attention_3",
    "kernel_for",
    "kernel_of_runs_for",
    "sequence_state",
]
