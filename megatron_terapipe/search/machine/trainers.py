"""Descriptions of trainers, by name.

- `terapipe`: this trainer, without options that change kernels, on a GPU with triton. Kernels and bytes are counted by
  `benchmarks.kernel_counts`, and again by `tests/search/machine/test_terapipe.py`: the reads and writes of autograd's
  operators and compiled functions (`pointwise.py`), in the middle of a sequence, with four query heads to a key head.
  `--compile-pointwise never` launches more.
- `megatron-lm`: Megatron-LM as it was when most published tables were measured. Narayanan et al., arXiv 2104.04473
  sections 4.1 (scatter and gather of messages) and 4.2 (fused kernels); Korthikanti et al., arXiv 2205.05198 section 4
  (activations of a layer).
- `deepspeed`: DeepSpeed's pipeline engine with Megatron-LM's layers. `runtime/pipe/engine.py`,
  `runtime/pipe/schedule.py`, `runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py` of DeepSpeed 0.19.8. Sums
  of bf16 travel in fp32, all-reduced even at ZeRO stage 1. GPT-NeoX's rotation is written in Python.
- `fsdp`: PyTorch's fully sharded data parallelism with FlashAttention-2 and layers fused by torch.compile (Zhao et al.,
  arXiv 2304.11277 sections 3 and 4), with tensor-parallel and context ranks as in torchtitan (arXiv 2410.06511).
  Weights of a layer are gathered before its forward and again before its backward, one layer ahead, and gradients are
  reduced in fp32 under the layer before.
- `alst`: DeepSpeed's ZeRO 3 with sequence-parallel ranks, transformers' layers and Liger's kernels (arXiv 2410.10989),
  which has no pipeline: `answer/other_trainers.py` prices it. Bekman et al., arXiv 2506.13996; ArcticTraining,
  `projects/sequence-parallelism` and `monkey_patches.py`; DeepSpeed 0.19.8, `runtime/sequence_parallel/ulysses_sp.py`.
- `megatron-core`: Megatron-core with Transformer Engine as NVIDIA runs it since 2024. Its user guide (overlaps), the
  guide of Transformer Engine 2.x (LayerNormLinear, attention by cuDNN), NeMo's guide (tensor-parallel overlap).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from megatron_terapipe.config.deepspeed import BUCKET_ELEMENTS
from megatron_terapipe.config.flops import LOGITS_AT_ONCE
from megatron_terapipe.devices import EIGHT_BITS
from megatron_terapipe.search.machine.software import (
    ELEMENT_BYTES,
    NOTHING,
    ONLY_OURS,
    WITH_PIPELINES,
    AttentionCore,
    Communication,
    MeasuredRun,
    Operator,
    Operators,
    Products,
    Software,
    StateBytes,
)

TERAPIPE_OPERATORS = Operators(
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
    # Queries out of the product, keys and values into their buffers (1 kernel). Back: gradients put together (1),
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
    operators=TERAPIPE_OPERATORS,
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
        overlaps_transfers=True,
        overlaps_gradient_reduction=True,
        sums_at_once=True,
        overlaps_shared_experts=True,
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


PIPELINE = (
    *ONLY_OURS,
    *WITH_PIPELINES,
    ("schedule", ("gpipe", "1f1b", "interleaved")),
    ("num_token_slices", (1,)),
    ("stage_partition", ("uniform",)),
)
"""Values of dimensions that Megatron's pipelines run."""

MEGATRON_OPERATORS = Operators(
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

MEGATRON_LM = Software(
    name="megatron-lm",
    title="Megatron-LM of 2021 to 2023",
    measured=(
        MeasuredRun("A100-SXM4", "dense", 22e9, (8, 8), "GPT 22B", "arXiv 2205.05198, table 5"),
        MeasuredRun("A100-SXM4", "dense", 39e9, (512, 512), "GPT 39B", "arXiv 2104.04473, table 1"),
        MeasuredRun("A100-SXM4", "dense", 175e9, (256, 1024), "GPT 175B", "MegaScale, NSDI 24, tables 1 and 2"),
        MeasuredRun("A100-SXM4", "dense", 530e9, (280, 2520), "GPT 530B", "arXiv 2205.05198, table 5"),
    ),
    operators=MEGATRON_OPERATORS,
    products=Products(forward_kernels=3, backward_kernels=6, accumulation_bytes=8),
    attention=AttentionCore(
        kernel="scores", skips_masked=False, forward_kernels=8, backward_kernels=16, keeps_dropped=True
    ),
    communication=Communication(shares_transfers=True, reduction_bytes=2),
    runs=PIPELINE,
    residual_dropout=True,
    bucket_elements=500_000_000,
    states=(
        StateBytes("fp32", 0, weights=4, gradients=4, optimizer=8),
        StateBytes("fp32", 1, weights=4, gradients=4, optimizer=12, step=4, divided=("optimizer", "step"), bucket=4),
        # At stage 0 gradients add up in fp32.
        StateBytes("fp16", 0, weights=2, gradients=4, optimizer=12),
        StateBytes("fp16", 1, weights=2, gradients=2, optimizer=12, step=4, divided=("optimizer", "step"), bucket=2),
        StateBytes("bf16", 0, weights=2, gradients=4, optimizer=12),
        # A gradient of a micro-batch, and sums in fp32.
        StateBytes("bf16", 1, weights=2, gradients=6, optimizer=12, divided=("optimizer",), bucket=2),
    ),
)


DEEPSPEED = replace(
    MEGATRON_LM,
    name="deepspeed",
    title="DeepSpeed's pipeline engine with Megatron's layers",
    measured=(
        MeasuredRun("A100-SXM4", "dense", 18e9, (256, 256), "GPT 18B", "vTrain"),
        MeasuredRun("A100-SXM4", "dense", 176e9, (384, 384), "BLOOM 176B", "arXiv 2211.05100, section 3.4"),
    ),
    operators=replace(
        MEGATRON_LM.operators,
        # Halves are swapped and put together, for queries and for keys.
        rotary=Operator(forward=10, backward=10, forward_kernels=10, backward_kernels=10),
    ),
    communication=replace(MEGATRON_LM.communication, reduction_bytes=None),
    runs=(
        *ONLY_OURS,
        *WITH_PIPELINES,
        ("schedule", ("1f1b",)),
        ("num_token_slices", (1,)),
        ("stage_partition", ("uniform", "parameters")),
    ),
)


DGXC, BRIDGE = "NVIDIA dgxc-benchmarking", "Megatron-Bridge's tables"

MEGATRON_CORE = Software(
    name="megatron-core",
    title="Megatron-core with Transformer Engine",
    measured=(
        MeasuredRun("H100-SXM5", "dense", 8e9, (8, 128), "Llama 3.1 8B", DGXC),
        MeasuredRun("H100-SXM5", "dense", 15.6e9, (16, 2048), "Nemotron-4 15B", DGXC),
        MeasuredRun("H100-SXM5", "dense", 70.6e9, (64, 2048), "Llama 3.1 70B", DGXC),
        MeasuredRun("H100-SXM5", "dense", 406e9, (512, 2304), "Llama 3.1 405B", DGXC),
        MeasuredRun("H100-SXM5", "experts", 30.5e9, (16, 16), "Qwen3-30B-A3B", BRIDGE),
        MeasuredRun("H100-SXM5", "experts", 117e9, (64, 64), "gpt-oss 120B", BRIDGE),
        MeasuredRun("H100-SXM5", "experts", 316e9, (512, 2048), "Grok-1 314B", DGXC),
        MeasuredRun("B200", "dense", 17.1e9, (8, 8), "Llama 3.1 405B cut to 4 layers", "SimuMax 1.2"),
        MeasuredRun("GB200", "dense", 406e9, (128, 512), "Llama 3.1 405B", DGXC),
        MeasuredRun("GB200", "experts", 316e9, (128, 512), "Grok-1 314B", DGXC),
        *(
            MeasuredRun(device, "experts", parameters, (number, number), model, BRIDGE)
            for device in ("B200", "B300", "GB200", "GB300")
            for parameters, number, model in ((30.5e9, 8, "Qwen3-30B-A3B"), (117e9, 64, "gpt-oss 120B"))
        ),
    ),
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
        exchange=NOTHING,
        # `_apply_bias` of megatron/core/transformer/moe/experts.py, expert by expert in fp32: bias times weight (4) and
        # sum (10), then all put together (8) and cast (6). Back the cast (6); of each expert products with weight and
        # bias (16), their sums (8), a cast of the rows (6), one of the bias, and both biases added to their gradients;
        # rows put together (4).
        expert_bias=Operator(forward_bytes=28, backward_bytes=40, forward_kernels=2, backward_kernels=8),
        # `weighted_bias_quick_geglu_impl` of megatron/core/fusions/fused_bias_geglu.py, before its kernel: both halves
        # clamped (4) and put together (4). Back each gradient with its input (6), put together (4).
        expert_clamp=Operator(forward=8, backward=10, forward_kernels=3, backward_kernels=3),
        # Transformer Engine's kernel takes no factor (`_apply_rotary_pos_emb_bshd` of
        # megatron/core/models/common/embeddings/rope_utils.py). For queries and for keys six kernels on positions, a
        # half negated (1), halves put together (2), both products (4), sum (3), a copy (2). Back both products (4), a
        # half negated (1), halves put together (2), sum (3), and gradients of slices of all and of no channels: zeros
        # (2), a copy (2) and a sum (3).
        scaled_rotary=Operator(forward=12, backward=17, forward_kernels=24, backward_kernels=18),
        # Maximum, sum of exponentials and probability in one pass each over fp32 copies, as the shared loss does it.
        loss=Operator(forward_bytes=22, backward_bytes=14, forward_kernels=8, backward_kernels=4),
        embedding=Operator(forward=2, backward=2, forward_kernels=4, backward_kernels=4),
    ),
    # Products add weight gradients to sums in fp32 themselves.
    # Transformer Engine's GroupedLinear launches the product of each expert.
    products=Products(
        forward_kernels=1,
        backward_kernels=2,
        accumulation_bytes=8,
        accumulates_in_place=True,
        groups_experts=False,
        # Scores in fp32 are products of bf16, and TF32 back (`RouterGatingLinearFunction` of
        # megatron/core/transformer/moe/moe_utils.py; `cublaslt_gemm.cu` of Transformer Engine).
        router_precision="bf16",
    ),
    attention=AttentionCore(
        kernel="flash-attention-2",
        on=(("hopper", "cudnn"), ("blackwell", "cudnn")),
        forward_kernels=2,
        backward_kernels=4,
    ),
    communication=Communication(
        overlaps_transfers=True,
        shares_transfers=True,
        ring=True,
        overlaps_gradient_reduction=True,
        overlaps_weight_gather=True,
        # Share of collectives that products hide, less their slowdown: chosen by published runs of NVIDIA, with values
        # between 0 and 0.5.
        tensor_parallel_overlap=0.5,
        reduction_bytes=2,
    ),
    # Its distributed optimizer may have several instances, and context ranks share tokens.
    runs=tuple(each for each in PIPELINE if each[0] not in ("zero_shard_size", "sequence_parallel_size")),
    # `DistributedDataParallelConfig` of megatron/core/distributed: at least a million elements for each rank.
    bucket_elements=40_000_000,
    bucket_elements_per_rank=1_000_000,
    # The distributed optimizer divides copies and moments, not the gradients that products add to. Weights in 8 bits
    # are there twice, by rows and by columns.
    states=tuple(
        StateBytes(name, stage, weights=size, gradients=4, optimizer=step, divided=divided, bucket=size * (stage == 3))
        for name, size, step in (("fp32", 4, 8), *((each, 2, 12) for each in ("fp16", "bf16", *EIGHT_BITS)))
        for stage, divided in ((0, ()), (1, ("optimizer",)), (3, ("weights", "gradients", "optimizer")))
    ),
)


_RMSNORM = Operator(forward=4, backward=8, forward_bytes=28, backward_bytes=76, forward_kernels=8, backward_kernels=16)

EAGER = Operators(
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
    loss=Operator(forward=1, backward=1, forward_bytes=12, backward_bytes=20, forward_kernels=3, backward_kernels=4),
    embedding=Operator(forward=2, backward=2, backward_kernels=10),
)

FSDP = Software(
    name="fsdp",
    title="PyTorch FSDP with torch.compile",
    measured=(
        MeasuredRun("A100-SXM4", "dense", 6.7e9, (128, 128), "Llama 2 7B", "IBM's fms-fsdp"),
        MeasuredRun("A100-SXM4", "dense", 69e9, (128, 128), "Llama 2 70B", "IBM's fms-fsdp"),
        MeasuredRun("H100-SXM5", "dense", 8e9, (64, 64), "Llama 3.1 8B", "torchtitan"),
        MeasuredRun("H100-SXM5", "dense", 70.6e9, (256, 256), "Llama 3.1 70B", "torchtitan"),
    ),
    operators=replace(MEGATRON_CORE.operators, loss=EAGER.loss, expert_clamp=NOTHING, scaled_rotary=None),
    # Gradients of a micro-batch are put into one tensor, cast to fp32 and divided before they are reduced (18).
    # Gathered weights are copied into those of a layer (2 + 2), for the forward and again for the backward
    # (`foreach_all_gather_copy_out` of torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    products=Products(forward_kernels=1, backward_kernels=2, accumulation_bytes=26),
    attention=AttentionCore(kernel="flash-attention-2", forward_kernels=2, backward_kernels=4),
    # `all_gather_tensor` and `reduce_scatter_tensor` of torch/distributed/_functional_collectives.py copy parts of
    # sequences; github.com/pytorch/torchtitan/pull/437 does without.
    communication=Communication(
        overlaps_gradient_reduction=True, overlaps_weight_gather=True, ring=True, copies_parts=True, reduction_bytes=4
    ),
    runs=(
        ("pipeline_parallel_size", (1,)),
        ("num_token_slices", (1,)),
        ("schedule", ("1f1b",)),
        ("stage_partition", ("uniform",)),
        ("zero_stage", (3,)),
        ("recompute", ("none", "full")),
        ("offload", (False,)),
    ),
    bucket_elements=0,
    states=tuple(
        StateBytes(
            name, 3, weights=4, gradients=4, optimizer=8, divided=("weights", "gradients", "optimizer"), bucket=size
        )
        for name, size in ELEMENT_BYTES.items()
    ),
)


ALST = replace(
    FSDP,
    name="alst",
    title="ZeRO 3 with Ulysses (DeepSpeed's ALST)",
    measured=(MeasuredRun("H100-SXM5", "dense", 8e9, (8, 8), "Llama 3 8B with 3.7M tokens", "arXiv 2506.13996"),),
    # A gradient in bf16 is copied into a tensor, and its part out of it.
    products=replace(FSDP.products, accumulation_bytes=8),
    communication=replace(FSDP.communication, ring=False, reduction_bytes=2),
    runs=(("tensor_parallel_size", (1,)), *FSDP.runs),
    operators=replace(
        EAGER,
        rmsnorm=Operator(forward=2, backward=4, backward_kernels=2),
        gated_activation=Operator(forward=3, backward=5),
        # Queries and keys are turned in place.
        rotary=Operator(forward=2, backward=2),
        # Queries, keys, values and outputs travel one by one; each is copied before and after its exchange.
        exchange=Operator(forward=4, backward=4, forward_kernels=4, backward_kernels=4),
        # The forward writes gradients over the logits, some tokens at a time.
        loss=Operator(forward=3, backward=0, forward_kernels=2, backward_kernels=0),
    ),
    loss_in_place=True,
    # Segments of its allocator can grow (PYTORCH_CUDA_ALLOC_CONF), so little is lost between them.
    allocator_factor=1.03,
)


SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {each.name: each for each in (TERAPIPE, MEGATRON_LM, DEEPSPEED, MEGATRON_CORE, FSDP)}
)
"""By name."""
