"""FlashAttention-3, which torch calls in place of its own flash attention once it is activated."""

import importlib.util
import warnings

import torch
from torch.nn import attention

from deepspeed_ext.runtime.attention_kernels.cuda import capability_of

HOPPER = 9
"""Major compute capability that its kernels are for; torch refuses calls on any other."""
PACKAGE = "flash_attn_interface"
"""Name by which its installation is imported."""


def activate_flash_attention_3(device: torch.device) -> bool:
    """Let flash attention of this process be FlashAttention-3, where device, torch and its package allow.

    Returns:
        Whether it is.
    """
    activate = getattr(attention, "activate_flash_attention_impl", None)  # since torch 2.11
    if device.type != "cuda" or activate is None or importlib.util.find_spec(PACKAGE) is None:
        return False
    if capability_of(device)[0] != HOPPER:
        return False
    try:
        activate("FA3")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # An installation that does not fit this torch or this CUDA must not stop a run that can do without it.
        warnings.warn(f"FlashAttention-3 is installed, but cannot be used: {error}", stacklevel=2)
        return False
    return True
