"""DeepSpeed's ALST: ZeRO 3 with sequence-parallel ranks, layers of Hugging Face's transformers and Liger's kernels.

It has no pipeline, and the search does not rank its strategies: `search/rivals` prices it beside a ranking.

Sources: Bekman et al., arXiv 2506.13996; ArcticTraining, `projects/sequence-parallelism` (its recipes name
FlashAttention-2, Liger and a reduction in bf16) and `monkey_patches.py`; DeepSpeed 0.19.8, `runtime/sequence_parallel/
ulysses_sp.py`. Liger's kernels (arXiv 2410.10989) fuse a norm, a gated activation, a rotation, and the head with its
loss.
"""

from dataclasses import replace

from megatron_terapipe.search.software.description import Operator
from megatron_terapipe.search.software.fsdp import FSDP

ALST = replace(
    FSDP,
    name="alst",
    title="ZeRO 3 with Ulysses, DeepSpeed's ALST",
    operators=replace(
        FSDP.operators,
        rmsnorm=Operator(forward=2, backward=4, backward_kernels=2),
        gated_activation=Operator(forward=3, backward=5),
        # Queries and keys are turned in place.
        rotary=Operator(forward=2, backward=2),
        # Queries, keys, values and outputs travel one by one; each is copied before its exchange and behind it.
        exchange=Operator(forward=4, backward=4, forward_kernels=4, backward_kernels=4),
        # The forward writes gradients over the logits, some tokens at a time.
        loss=Operator(forward=3, backward=0, forward_kernels=2, backward_kernels=0),
    ),
    # A gradient in bf16 is copied into a bucket, and its part out of it.
    products=replace(FSDP.products, accumulation_bytes=8),
    communication=replace(FSDP.communication, reduction_bytes=2),
    loss_in_place=True,
    # Segments of its allocator can grow (PYTORCH_CUDA_ALLOC_CONF), so little is lost between them.
    allocator_factor=1.03,
)
