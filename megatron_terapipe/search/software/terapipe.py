"""This trainer, as it is on main. `tests/search/software/test_terapipe.py` counts its kernels and bytes again."""

from megatron_terapipe.config.deepspeed import BUCKET_ELEMENTS
from megatron_terapipe.config.flops import LOGITS_AT_ONCE
from megatron_terapipe.search.software.description import (
    NOTHING,
    AttentionCore,
    Communication,
    Operator,
    Operators,
    ParameterBytes,
    Products,
    Software,
    StateBytes,
)

TERAPIPE = Software(
    name="terapipe",
    title="this trainer",
    operators=Operators(
        layernorm=Operator(forward=2, backward=3),
        rmsnorm=Operator(forward=2, backward=3),
        residual=Operator(forward=3, backward=4.5),
        activation=Operator(forward=2, backward=3),
        gated_activation=Operator(forward=3, backward=4.5),
        bias=NOTHING,
        rotary=NOTHING,
        head_norm=Operator(forward=2, backward=3),
        heads=NOTHING,
        # Cast to fp32 (2 + 4), maximum (4), difference (8), sum of exponentials (4); softmax scaled (8), cast (6).
        loss=Operator(forward_bytes=22, backward_bytes=14, forward_kernels=12, backward_kernels=12),
        embedding=Operator(forward=4, backward=4, forward_kernels=6, backward_kernels=6),
    ),
    products=Products(forward_kernels=3, backward_kernels=6, accumulation_bytes=8),
    attention=AttentionCore(kernel="flash-attention-2", forward_kernels=8, backward_kernels=16),
    communication=Communication(overlaps_transfers=True, overlaps_gradient_reduction=True),
    selective_recomputes="norms",
    logits_at_once=LOGITS_AT_ONCE,
    bucket_elements=BUCKET_ELEMENTS,
    states=(
        StateBytes(precision="fp32", zero_stage=0, parameter=ParameterBytes(weights=4, gradients=4, optimizer=8)),
        # DeepSpeedZeroOptimizer keeps copies and moments, and gradients of its own part.
        StateBytes(
            precision="fp32",
            zero_stage=1,
            parameter=ParameterBytes(weights=4, gradients=4, optimizer=12, step=4, divided=("optimizer", "step")),
            bucket_element_bytes=4,
        ),
        # FP16_Optimizer: gradients in fp32, and again as one tensor.
        StateBytes(
            precision="fp16", zero_stage=0, parameter=ParameterBytes(weights=2, gradients=2, optimizer=12, step=8)
        ),
        StateBytes(
            precision="fp16",
            zero_stage=1,
            parameter=ParameterBytes(weights=2, gradients=2, optimizer=12, step=4, divided=("optimizer", "step")),
            bucket_element_bytes=2,
        ),
        # BF16_Optimizer divides its state at stage 0, too; there gradients add up in bf16.
        StateBytes(
            precision="bf16",
            zero_stage=0,
            parameter=ParameterBytes(weights=2, gradients=2, optimizer=12, step=4, divided=("optimizer", "step")),
        ),
        # Products add to the sums, so no gradient of a micro-batch is kept beside them (docs/adr/0025).
        StateBytes(
            precision="bf16",
            zero_stage=1,
            parameter=ParameterBytes(weights=2, gradients=4, optimizer=12, divided=("optimizer",)),
            bucket_element_bytes=4,
        ),
    ),
)
