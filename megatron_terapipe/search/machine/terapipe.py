"""This trainer, as it is on main: without options that change kernels, on a GPU with triton.

Kernels and bytes are counted by `benchmarks.kernel_counts`, and again by `tests/search/machine/test_terapipe.py`:
the reads and writes of autograd's operators and compiled functions (`pointwise.py`), in the middle of a sequence, with
four query heads to a key head. `--compile-pointwise never` launches more.
"""

from megatron_terapipe.config.deepspeed import BUCKET_ELEMENTS
from megatron_terapipe.config.flops import LOGITS_AT_ONCE
from megatron_terapipe.search.machine.software import (
    WITH_PIPELINES,
    AttentionCore,
    Communication,
    Operator,
    Operators,
    Products,
    Software,
    StateBytes,
)

OPERATORS = Operators(
    # Compiled: a loop over rows, which in the backward adds the gradient of the residual, too; there also one over
    # columns, for the weight's gradient, which reads both inputs again.
    layernorm=Operator(forward=2, backward=6, backward_kernels=2),
    rmsnorm=Operator(forward=2, backward=6, backward_kernels=2),
    # Without dropout, one of a layer's two sums is computed in the pass of the norm after it. With dropout each is one
    # kernel, which draws the mask on the way, and the backward has one kernel and 2 numbers more.
    residual=Operator(forward=2.5, backward=0, forward_kernels=0.5, backward_kernels=0),
    activation=Operator(forward=2, backward=3),
    # Compiled: gate and up are read once, their gradients written side by side.
    gated_activation=Operator(forward=3, backward=5),
    # Added by the product itself; the gradient is a sum over its rows.
    bias=Operator(backward=1, forward_kernels=0),
    # Compiled: a part of the kernels that copy heads, which read the angles.
    rotary=Operator(
        forward=0, backward=0, forward_bytes=0.2, backward_bytes=0.1, forward_kernels=0, backward_kernels=0
    ),
    # Its input is copied out of the product; of queries instead of the copy for attention. The others are then apart.
    head_norm=Operator(
        forward=2.4, backward=5, forward_bytes=0.1, backward_bytes=0.1, forward_kernels=2.5, backward_kernels=2
    ),
    # Queries out of the product, keys and values into their buffers (1 kernel). Back: gradients put together (1), and
    # and gradients of keys and values with later token slices (2).
    heads=Operator(forward=1.2, backward=1.6, backward_bytes=0.8, forward_kernels=1, backward_kernels=3),
    # Packed in the order of the message, and unpacked: two copies. Queries, keys and values are unpacked one by one,
    # the output at once.
    exchange=Operator(forward=4, backward=4, forward_kernels=3, backward_kernels=3),
    # `model/experts.py`: tokens copied to their pairs (2), pairs of other ranks' experts set to 0 (2), rows copied to
    # their choices and added up (3); back the same, in the other order.
    routing=Operator(forward=7, backward=7, forward_kernels=25, backward_kernels=20),
    # The gate, the product with the weight of the row, and zeros of other ranks' pairs; repeated in the backward.
    expert_activation=Operator(forward=9, backward=16, forward_kernels=5, backward_kernels=10),
    # Compiled: one pass over logits finds the largest and the sum of exponentials. Back: gradients take the place of
    # logits in another. The other kernels touch a number of each token.
    loss=Operator(forward=1, backward=2, forward_kernels=13, backward_kernels=12),
    # Rows of the gradient are cast (2 + 4), and added to rows in fp32 (4 + 8).
    embedding=Operator(forward=2, backward=1, backward_bytes=16, backward_kernels=2),
)

TERAPIPE = Software(
    name="terapipe",
    title="this trainer",
    operators=OPERATORS,
    # The gradient of a weight is added to its sum in fp32, read and written, by the product.
    # Grouped products of experts put out bf16 (2), which is then added (read 4, write 4).
    products=Products(
        forward_kernels=1,
        backward_kernels=2,
        accumulation_bytes=8,
        accumulates_in_place=True,
        expert_accumulation_bytes=10,
    ),
    # Torch's own flash attention, in one call, is FlashAttention-2 on Hopper and Blackwell, too: the third must be
    # installed (`attention/flash_kernels.py`). Before Ampere there is only the memory-efficient kernel.
    attention=AttentionCore(
        kernel="flash-attention-2",
        on=(("volta", "memory-efficient"), ("turing", "memory-efficient")),
        forward_kernels=1,
        backward_kernels=1,
        keeps_keys=True,
        # Sums in fp32, read and written, and the gradients that this token slice found; keys and values apart.
        prefix=Operator(backward=1, backward_bytes=8, forward_kernels=0, backward_kernels=2),
    ),
    communication=Communication(
        overlaps_transfers=True, overlaps_gradient_reduction=True, sums_at_once=True, overlaps_shared_experts=True
    ),
    runs=WITH_PIPELINES,
    selective_recomputes="norms",
    logits_at_once=LOGITS_AT_ONCE,
    loss_in_place=True,
    bucket_elements=BUCKET_ELEMENTS,
    states=(
        # The step takes the norm of gradients (4), and scales them (8).
        StateBytes("fp32", 0, weights=4, gradients=4, optimizer=8, whole_step=12),
        # DeepSpeedZeroOptimizer keeps copies and moments, and gradients of its own part.
        StateBytes("fp32", 1, weights=4, gradients=4, optimizer=12, step=4, divided=("optimizer", "step"), bucket=4),
        # FP16_Optimizer: gradients in fp32, and again as one tensor.
        StateBytes("fp16", 0, weights=2, gradients=2, optimizer=12, step=8),
        StateBytes("fp16", 1, weights=2, gradients=2, optimizer=12, step=4, divided=("optimizer", "step"), bucket=2),
        # BF16_Optimizer divides its state at stage 0, too; there gradients add up in bf16. But each rank takes the norm
        # of all gradients, which are cast for it (2 + 4 + 4), and zeroes them twice (4).
        StateBytes(
            "bf16", 0, weights=2, gradients=2, optimizer=12, step=4, divided=("optimizer", "step"), whole_step=14
        ),
        # Products add to the sums, so no gradient of a micro-batch is kept. The norm reads
        # them (4), and they are zeroed twice (8).
        StateBytes("bf16", 1, weights=2, gradients=4, optimizer=12, divided=("optimizer",), bucket=4, whole_step=12),
    ),
)
