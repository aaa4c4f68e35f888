"""MosaicML's llm-foundry of 2023: FSDP with Triton's attention and fused losses.

Sources: its throughput tables (github.com/mosaicml/llm-foundry, scripts/train/benchmarking). Most rows say `FULL_SHARD`
and `DEFAULT` (gradients are reduced in fp32). `attn_impl` in `submit_benchmarks.py` is Triton's, a form of the first
FlashAttention.
"""

from dataclasses import replace

from megatron_terapipe.search.software.description import Operator
from megatron_terapipe.search.software.fsdp import FSDP

LLM_FOUNDRY = replace(
    FSDP,
    name="llm-foundry",
    title="MosaicML's llm-foundry of 2023",
    operators=replace(
        FSDP.operators,
        # flash-attn's fused loss reads logits and writes their gradient over them. Two metrics of each micro-batch cast
        # the logits to fp32 and compute the loss again.
        loss=Operator(forward=3, backward=2, forward_bytes=24, forward_kernels=7),
    ),
    attention=replace(FSDP.attention, kernel="flash-attention-1"),
    loss_in_place=True,
)
