"""Megatron-core as NVIDIA runs it since 2024: Transformer Engine's layers, fused kernels, messages under ops.

Sources: Megatron-core's user guide (overlap of gradient reduction, parameter gathering and messages between stages) and
Transformer Engine's (LayerNormLinear, fused attention by cuDNN), release 2.x; the performance guide of NeMo for
tensor-parallel communication overlap.
"""

from dataclasses import replace

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

_DIVIDED = ("optimizer",)
"""The distributed optimizer divides copies and moments, not the gradients that products add to."""

_SINGLE = ParameterBytes(weights=4, gradients=4, optimizer=8)
_HALF = ParameterBytes(weights=2, gradients=4, optimizer=12)

MEGATRON_CORE = Software(
    name="megatron-core",
    title="Megatron-core with Transformer Engine",
    operators=Operators(
        layernorm=Operator(forward=2, backward=3),
        rmsnorm=Operator(forward=2, backward=3),
        # Bias, dropout and sum are one kernel; without dropout it writes no mask.
        residual=Operator(forward=3, backward=3),
        activation=Operator(forward=2, backward=3),
        gated_activation=Operator(forward=3, backward=5),
        # Added where the product or the activation reads it; its gradient sums the gradient of the output.
        bias=Operator(backward=1, forward_kernels=0),
        rotary=Operator(forward=2, backward=2),
        head_norm=Operator(forward=2, backward=3),
        heads=NOTHING,
        # Maximum, sum of exponentials and probability in one pass each over fp32 copies, as the shared loss does it.
        loss=Operator(forward_bytes=22, backward_bytes=14, forward_kernels=8, backward_kernels=4),
        embedding=Operator(forward=2, backward=2, forward_kernels=4, backward_kernels=4),
    ),
    # Products add weight gradients to sums in fp32 themselves.
    products=Products(forward_kernels=1, backward_kernels=2, accumulation_bytes=8, accumulates_in_place=True),
    attention=AttentionCore(
        kernel="flash-attention-2",
        on=(("hopper", "cudnn"), ("blackwell", "cudnn")),
        forward_kernels=2,
        backward_kernels=4,
    ),
    communication=Communication(
        overlaps_transfers=True,
        shares_transfers=True,
        overlaps_gradient_reduction=True,
        overlaps_weight_gather=True,
        # What products hide of collectives, less what that slows them down: chosen beside runs that NVIDIA published,
        # which lie between 0 and 0.5.
        tensor_parallel_overlap=0.1,
        reduction_bytes=2,
    ),
    runs=(
        *OURS_ALONE,
        ("schedule", ("gpipe", "1f1b", "interleaved")),
        ("num_token_slices", (1,)),
        ("stage_partition", ("uniform",)),
    ),
    bucket_elements=40_000_000,
    states=tuple(
        StateBytes(
            precision=precision,
            zero_stage=zero_stage,
            parameter=replace(parameter, divided=_DIVIDED if zero_stage else ()),
        )
        for precision, parameter in (("fp32", _SINGLE), ("fp16", _HALF), ("bf16", _HALF))
        for zero_stage in (0, 1)
    ),
)
