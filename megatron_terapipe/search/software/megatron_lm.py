"""Megatron-LM as it was when most published tables were measured (2021 to 2023).

Sources: Narayanan et al., arXiv 2104.04473 sections 4.1 (scatter and gather of messages) and 4.2 (fused kernels);
Korthikanti et al., arXiv 2205.05198 section 4 (what a layer keeps).
"""

from megatron_terapipe.search.software.description import (
    NOTHING,
    OURS_ALONE,
    AttentionCore,
    Communication,
    Operator,
    Operators,
    ParameterBytes,
    Products,
    Software,
    StateBytes,
)

OPERATORS = Operators(
    # Backwards have a kernel more than forwards: sums for the weights of norms, and for biases.
    layernorm=Operator(forward=2, backward=3, backward_kernels=2),
    rmsnorm=Operator(forward=2, backward=3, backward_kernels=2),
    # Bias, dropout and sum are one kernel; it writes a mask of one byte.
    residual=Operator(forward=3, backward=4.5, forward_bytes=1, backward_bytes=1.5, backward_kernels=2),
    activation=Operator(forward=2, backward=3, backward_kernels=2),
    gated_activation=Operator(forward=3, backward=4.5, backward_kernels=2),
    bias=NOTHING,
    rotary=NOTHING,
    head_norm=Operator(forward=2, backward=3),
    heads=Operator(forward=2, backward=3, forward_kernels=0, backward_kernels=0),
    # Cast to fp32 (2 + 4), maximum (4), subtraction (8), exponential sum (4). Back: softmax read, scaled (8), cast (6).
    loss=Operator(forward_bytes=22, backward_bytes=14, forward_kernels=12, backward_kernels=12),
    embedding=Operator(forward=4, backward=4, forward_kernels=6, backward_kernels=6),
)

FP32 = ParameterBytes(weights=4, gradients=4, optimizer=8)
FP32_SHARED = ParameterBytes(weights=4, gradients=4, optimizer=12, step=4, divided=("optimizer", "step"))
HALF = ParameterBytes(weights=2, gradients=4, optimizer=12)
"""Gradients add up in fp32."""

MEGATRON_LM = Software(
    name="megatron-lm",
    title="Megatron-LM of 2021 to 2023",
    operators=OPERATORS,
    products=Products(forward_kernels=3, backward_kernels=6, accumulation_bytes=8),
    attention=AttentionCore(
        kernel="scores", skips_masked=False, forward_kernels=8, backward_kernels=16, keeps_dropped=True
    ),
    communication=Communication(shares_transfers=True, reduction_bytes=2),
    runs=(
        *OURS_ALONE,
        ("schedule", ("gpipe", "1f1b", "interleaved")),
        ("num_token_slices", (1,)),
        ("stage_partition", ("uniform",)),
    ),
    residual_dropout=True,
    bucket_elements=500_000_000,
    states=(
        StateBytes(precision="fp32", zero_stage=0, parameter=FP32),
        StateBytes(precision="fp32", zero_stage=1, parameter=FP32_SHARED, bucket_element_bytes=4),
        StateBytes(precision="fp16", zero_stage=0, parameter=HALF),
        StateBytes(
            precision="fp16",
            zero_stage=1,
            parameter=ParameterBytes(weights=2, gradients=2, optimizer=12, step=4, divided=("optimizer", "step")),
            bucket_element_bytes=2,
        ),
        StateBytes(precision="bf16", zero_stage=0, parameter=HALF),
        # A gradient of a micro-batch, and sums in fp32.
        StateBytes(
            precision="bf16",
            zero_stage=1,
            parameter=ParameterBytes(weights=2, gradients=6, optimizer=12, divided=("optimizer",)),
            bucket_element_bytes=2,
        ),
    ),
)
