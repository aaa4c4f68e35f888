"""PyTorch's fully sharded data parallelism with flash attention, other kernels eager: MosaicML's llm-foundry of 2023.

Each rank keeps a part of every weight. A layer's weights are gathered before its forward and again before its backward,
one layer ahead of the ops, and its gradients are reduced while the layer before it computes. Trials write it as ZeRO 1
without a pipeline.

Sources: Zhao et al., arXiv 2304.11277 sections 3 and 4; llm-foundry's throughput tables
(github.com/mosaicml/llm-foundry, scripts/train/benchmarking), whose settings are `FULL_SHARD` and `PURE` (weights,
gradients and messages in bf16), and whose attention is Triton's (`attn_impl` in `submit_benchmarks.py`), a form of the
first FlashAttention. Bytes of eager kernels are those of their inputs and outputs.
"""

from megatron_terapipe.search.software.description import (
    AttentionCore,
    Communication,
    Operator,
    Operators,
    ParameterBytes,
    Products,
    Software,
    StateBytes,
)

_ALL = ("weights", "gradients", "optimizer", "step")

FSDP = Software(
    name="fsdp",
    title="PyTorch FSDP, eager",
    operators=Operators(
        # The gradients of weight and bias read input and gradient once more.
        layernorm=Operator(forward=2, backward=5, backward_kernels=2),
        # Cast, square, mean, root, product, cast and product with the weight, each by itself in fp32.
        rmsnorm=Operator(
            forward=3, backward=4, forward_bytes=28, backward_bytes=70, forward_kernels=6, backward_kernels=15
        ),
        # Forward the sum; back the sum of the gradients of both branches.
        residual=Operator(forward=3, backward=3),
        activation=Operator(forward=2, backward=3),
        gated_activation=Operator(forward=5, backward=8, forward_kernels=2, backward_kernels=3),
        bias=Operator(backward=1, forward_kernels=0),
        rotary=Operator(forward=13, backward=13, forward_kernels=6, backward_kernels=6),
        head_norm=Operator(
            forward=3, backward=4, forward_bytes=28, backward_bytes=70, forward_kernels=6, backward_kernels=15
        ),
        # Gradients of queries, keys and values are put together for the product before.
        heads=Operator(forward=0, backward=1.5, forward_kernels=0, backward_kernels=1),
        # flash-attn's fused loss reads the logits twice, and writes their gradient in place.
        loss=Operator(forward=2, backward=2, forward_kernels=2, backward_kernels=1),
        embedding=Operator(forward=2, backward=3, backward_kernels=4),
    ),
    # Gradients are divided before and after the reduction, and copied to its buffer.
    products=Products(forward_kernels=1, backward_kernels=2, accumulation_bytes=8),
    attention=AttentionCore(kernel="flash-attention-1", forward_kernels=2, backward_kernels=4),
    communication=Communication(
        overlaps_gradient_reduction=True, overlaps_weight_gather=True, reduction_bytes=2, shards_weights=True
    ),
    runs=(
        ("pipeline_parallel_size", (1,)),
        ("tensor_parallel_size", (1,)),
        ("num_token_slices", (1,)),
        ("schedule", ("1f1b",)),
        ("stage_partition", ("uniform",)),
        ("zero_stage", (1,)),
        ("recompute", ("none", "full")),
    ),
    loss_in_place=True,
    # About one transformer layer of 7B parameters, of which the next one is gathered ahead.
    bucket_elements=200_000_000,
    states=tuple(
        StateBytes(
            precision=precision,
            zero_stage=1,
            parameter=ParameterBytes(weights=4, gradients=4, optimizer=8, divided=_ALL),
            bucket_element_bytes=4 if precision == "fp32" else 2,
        )
        for precision in ("fp32", "fp16", "bf16")
    ),
)
