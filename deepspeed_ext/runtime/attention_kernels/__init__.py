"""Attention of one token slice over the keys and values up to its end, forward and backward, by device."""

from deepspeed_ext.runtime.attention_kernels.choice import kernel_for, kernel_of_runs_for
from deepspeed_ext.runtime.attention_kernels.cpu import CpuFlash
from deepspeed_ext.runtime.attention_kernels.cuda import CudaFlash, CudaFlashOfRuns, MemoryEfficient, Runs
from deepspeed_ext.runtime.attention_kernels.flash3 import activate_flash_attention_3
from deepspeed_ext.runtime.attention_kernels.interface import Attended, AttentionKernel, Gradients
from deepspeed_ext.runtime.attention_kernels.plain import AttentionDropout, PlainAttention

__all__ = [
    "Attended",
    "AttentionDropout",
    "AttentionKernel",
    "CpuFlash",
    "CudaFlash",
    "CudaFlashOfRuns",
    "Gradients",
    "MemoryEfficient",
    "PlainAttention",
    "Runs",
    "activate_flash_attention_3",
    "kernel_for",
    "kernel_of_runs_for",
]
