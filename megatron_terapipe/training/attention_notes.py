"""Notes about attention on an accelerator, printed before a run begins."""

import torch

from megatron_terapipe.config import Config


def attention_notes(config: Config, device: torch.device, *, flash_attention_3: bool) -> list[str]:
    """Lines for the log: a kernel that was activated, and settings that keep a device from its speed.

    Args:
        config: configuration of the run.
        device: that computes.
        flash_attention_3: whether it is activated.
    """
    if device.type == "cpu":
        return []
    lines = []
    if flash_attention_3:
        lines.append(" attention by FlashAttention-3")
    if config.precision.dtype == "fp32":
        lines.append(
            " warning: fp32 leaves most of a GPU idle: train with --bf16, or let products round to TF32 with "
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"
        )
    if config.model.attention_dropout:
        lines.append(
            " warning: dropout in attention keeps it from flash kernels, and its scores are written out: give "
            "--attention-dropout 0 if you can"
        )
    return lines
