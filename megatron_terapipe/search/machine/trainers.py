"""Descriptions of other trainers, all descriptions by name, and descriptions that users write.

- `megatron-lm`: Megatron-LM as it was when most published tables were measured. Narayanan et al., arXiv 2104.04473
  sections 4.1 (scatter and gather of messages) and 4.2 (fused kernels); Korthikanti et al., arXiv 2205.05198 section 4
  (activations of a layer).
- `deepspeed`: DeepSpeed's pipeline engine with Megatron-LM's layers. `runtime/pipe/engine.py`,
  `runtime/pipe/schedule.py`, `runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py` of DeepSpeed 0.19.8. Sums
  of bf16 travel in fp32, all-reduced even at ZeRO stage 1. GPT-NeoX's rotation is written in Python.
- `fsdp`: PyTorch's fully sharded data parallelism with FlashAttention-2 and layers fused by torch.compile (Zhao et al.,
  arXiv 2304.11277 sections 3 and 4; torchtitan). Weights of a layer are gathered before its forward and again before
  its backward, one layer ahead, and gradients are reduced in fp32 under the layer before.
- `alst`: DeepSpeed's ZeRO 3 with sequence-parallel ranks, transformers' layers and Liger's kernels (arXiv 2410.10989),
  which has no pipeline: `answer/other_trainers.py` prices it. Bekman et al., arXiv 2506.13996; ArcticTraining,
  `projects/sequence-parallelism` and `monkey_patches.py`; DeepSpeed 0.19.8, `runtime/sequence_parallel/ulysses_sp.py`.
- `megatron-core`: Megatron-core with Transformer Engine as NVIDIA runs it since 2024. Its user guide (overlaps), the
  guide of Transformer Engine 2.x (LayerNormLinear, attention by cuDNN), NeMo's guide (tensor-parallel overlap).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.documents import read_document, short, suggestion
from megatron_terapipe.search.machine.entries import fault, place
from megatron_terapipe.search.machine.software import (
    ELEMENT_BYTES,
    NOTHING,
    ONLY_OURS,
    WITH_PIPELINES,
    AttentionCore,
    Communication,
    Operator,
    Operators,
    Products,
    Software,
    StateBytes,
)
from megatron_terapipe.search.machine.terapipe import TERAPIPE

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

PIPELINE = (
    *ONLY_OURS,
    *WITH_PIPELINES,
    ("schedule", ("gpipe", "1f1b", "interleaved")),
    ("num_token_slices", (1,)),
    ("stage_partition", ("uniform",)),
)
"""Values of dimensions that Megatron's pipelines run."""

MEGATRON_LM = Software(
    name="megatron-lm",
    title="Megatron-LM of 2021 to 2023",
    measured_on=("ampere",),
    operators=OPERATORS,
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


MEGATRON_CORE = Software(
    name="megatron-core",
    title="Megatron-core with Transformer Engine",
    measured_on=("ampere", "hopper", "blackwell"),
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
    # Its distributed optimizer may have several instances.
    runs=tuple(each for each in PIPELINE if each[0] != "zero_shard_size"),
    # `DistributedDataParallelConfig` of megatron/core/distributed: at least a million elements for each rank.
    bucket_elements=40_000_000,
    bucket_elements_per_rank=1_000_000,
    # The distributed optimizer divides copies and moments, not the gradients that products add to.
    states=tuple(
        StateBytes(name, stage, weights=size, gradients=4, optimizer=step, divided=divided, bucket=size * (stage == 3))
        for name, size, step in (("fp32", 4, 8), ("fp16", 2, 12), ("bf16", 2, 12), ("fp8", 2, 12))
        for stage, divided in ((0, ()), (1, ("optimizer",)), (3, ("weights", "gradients", "optimizer")))
    ),
)


_RMSNORM = Operator(forward=4, backward=8, forward_bytes=28, backward_bytes=76, forward_kernels=8, backward_kernels=16)

FUSED_RMSNORM = Operator(forward=2, backward=4, backward_kernels=2)

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
    measured_on=("ampere", "hopper"),
    operators=replace(MEGATRON_CORE.operators, loss=EAGER.loss),
    # Gradients of a micro-batch are put into one tensor, cast to fp32 and divided before they are reduced.
    products=Products(forward_kernels=1, backward_kernels=2, accumulation_bytes=18),
    attention=AttentionCore(kernel="flash-attention-2", forward_kernels=2, backward_kernels=4),
    communication=Communication(overlaps_gradient_reduction=True, overlaps_weight_gather=True, reduction_bytes=4),
    runs=(
        ("pipeline_parallel_size", (1,)),
        ("tensor_parallel_size", (1,)),
        ("num_token_slices", (1,)),
        ("schedule", ("1f1b",)),
        ("stage_partition", ("uniform",)),
        ("zero_stage", (3,)),
        ("sequence_parallel_size", (1,)),
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
    measured_on=(),
    # A gradient in bf16 is copied into a tensor, and its part out of it.
    products=replace(FSDP.products, accumulation_bytes=8),
    communication=replace(FSDP.communication, reduction_bytes=2),
    runs=tuple(each for each in FSDP.runs if each[0] != "sequence_parallel_size"),
    operators=replace(
        EAGER,
        rmsnorm=FUSED_RMSNORM,
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

LIKE = "like"
"""Field of a file: the name of the description that it changes."""


def find_software(name: str) -> Software:
    """Return a description by its name, or from a JSON or YAML file.

    A file names the description that it is `like`, and the differences: `{"like": "megatron-core", "name": "ours",
    "communication": {"tensor_parallel_overlap": 0.8}}`. Lists are replaced whole.
    """
    if name in SOFTWARE:
        return SOFTWARE[name]
    if not Path(name).suffix:
        raise ConfigError(f"--software {name} is neither a file nor a known trainer: {suggestion(name, SOFTWARE)}")
    document = read_document(name)
    if not isinstance(document, dict):
        raise ConfigError(f"{name} is not an object: write one with the field {LIKE} and the differences")
    return described_software({"name": Path(name).stem, **document}, name)


def described_software(
    document: Mapping[str, Any], file: str, *path: str, known: Mapping[str, Software] = SOFTWARE
) -> Software:
    """Return the trainer of an object at a place of a file, `like` a known one; `gradients`: `keeping_gradients`."""
    differences = dict(document)
    like, gradients = differences.pop(LIKE, None), differences.pop("gradients", None)
    if not isinstance(like, str) or like not in known:
        raise fault(place(file, *path, LIKE), like, "is not a known trainer", suggestion(str(like), known))
    software = known[like]
    if gradients is not None:
        if gradients not in ("bf16", "fp16", "fp32"):
            raise fault(place(file, *path, "gradients"), gradients, "is not known", "choose among bf16, fp16, fp32")
        software = software.keeping_gradients(gradients)
    if not differences:
        return software
    changed = _changed(asdict(software), differences, file, *path)
    try:
        software = TypeAdapter(Software).validate_python(changed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = place(file, *path, *first["loc"])
        raise ConfigError(f"{at} {short(first['input'])} is wrong ({first['msg']}): correct it") from None
    hidden = software.communication.tensor_parallel_overlap
    if hidden > 1:
        at = place(file, *path, "communication", "tensor_parallel_overlap")
        raise fault(at, hidden, "is not a share up to 1", "give one")
    return software


def _changed(known: Any, given: Any, file: str, *way: str) -> Any:
    """Return known fields with those that are given, objects within objects likewise."""
    if isinstance(known, dict):
        if not isinstance(given, dict):
            raise fault(place(file, *way), given, "is not an object", f"give fields of it: {', '.join(known)}")
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"{place(file, *way, str(unknown))} is not known: {suggestion(str(unknown), known)}")
        return {
            name: _changed(value, given[name], file, *way, name) if name in given else value
            for name, value in known.items()
        }
    if isinstance(given, int | float) and not (math.isfinite(given) and given >= 0):
        raise fault(place(file, *way), given, "is not a number from 0", "give one")
    return given
