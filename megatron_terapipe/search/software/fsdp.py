"""PyTorch's fully sharded data parallelism with FlashAttention-2, other kernels eager.

Each rank keeps a part of every weight. A layer's weights are gathered before its forward and again before its backward,
one layer ahead of the ops, and its gradients are reduced in fp32 while the layer before it computes. Trials write it as
ZeRO 1 without a pipeline.

Sources: Zhao et al., arXiv 2304.11277 sections 3 and 4. Bytes and kernels of eager operators were counted as PyTorch
2.13 dispatches them in bf16.
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

_RMSNORM = Operator(forward=4, backward=8, forward_bytes=28, backward_bytes=76, forward_kernels=8, backward_kernels=16)

FSDP = Software(
    name="fsdp",
    title="PyTorch FSDP, eager",
    operators=Operators(
        # The gradients of weight and bias read input and gradient once more.
        layernorm=Operator(forward=2, backward=5, backward_kernels=2),
        # Written in Python with casts to fp32: each step is a kernel.
        rmsnorm=_RMSNORM,
        # Forward the sum; back the sum of the gradients of both branches.
        residual=Operator(forward=3, backward=3),
        activation=Operator(forward=2, backward=3),
        gated_activation=Operator(forward=5, backward=9, forward_kernels=2, backward_kernels=3),
        # Added by the product; its gradient sums the gradient of the output.
        bias=Operator(backward=1, forward_kernels=0),
        # Halves are swapped and put together, for queries and for keys.
        rotary=Operator(forward=10, backward=10, forward_kernels=10, backward_kernels=10),
        head_norm=_RMSNORM,
        # Gradients of queries, keys and values are put together for the product before.
        heads=Operator(backward=1.5, forward_kernels=0),
        # Cast to fp32 (2 + 4), log-softmax (8). Back: zeros (4), log-softmax (12), cast (4 + 2).
        loss=Operator(
            forward=1, backward=1, forward_bytes=12, backward_bytes=20, forward_kernels=3, backward_kernels=4
        ),
        embedding=Operator(forward=2, backward=2, backward_kernels=10),
    ),
    # Gradients of a micro-batch are put into one tensor, cast to fp32 and divided before they are reduced.
    products=Products(forward_kernels=1, backward_kernels=2, accumulation_bytes=18),
    attention=AttentionCore(kernel="flash-attention-2", forward_kernels=2, backward_kernels=4),
    communication=Communication(
        overlaps_gradient_reduction=True, overlaps_weight_gather=True, reduction_bytes=4, shards_weights=True
    ),
    runs=(
        ("pipeline_parallel_size", (1,)),
        ("tensor_parallel_size", (1,)),
        ("num_token_slices", (1,)),
        ("schedule", ("1f1b",)),
        ("stage_partition", ("uniform",)),
        ("zero_stage", (1,)),
        ("sequence_parallel_size", (1,)),
        ("recompute", ("none", "full")),
        ("offload", (False,)),
    ),
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
