"""Weights of experts that ranks share: copied, reduced, and partitioned over the ranks with the same experts.

Expert-parallel ranks are ranks of one stage, which for DeepSpeed are data- or tensor-parallel:

    rank of the stage      0   1   2   3   4   5   6   7      two expert-parallel ranks: rank 0 has experts 0 and 1
    experts               01  23  01  23  01  23  01  23      copies of them: ranks 0, 2, 4 and 6

A rank computes its experts for the tokens of all ranks of its block, so the gradient of a replica-averaged loss is the
sum over the copies, divided by the number of copies of the other weights: data x sequence. Such weights have an
attribute `expert_parallel`.

DeepSpeed's own groups of experts are not used: its norm under ZeRO is a mean over the ranks with the same experts,
each with another partition; in bf16 a stage without experts leaves the others waiting for its part of the norm.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn


def is_of_experts(parameter: nn.Parameter) -> bool:
    """Whether a parameter has experts of which other expert-parallel ranks have others."""
    return getattr(parameter, "expert_parallel", False)


def has_copies(engine: Any) -> bool:
    """Whether other ranks have the same weights, or the same experts."""
    copies = engine.module.expert_ranks.copies
    return engine.dp_world_size > 1 or (copies is not None and dist.get_world_size(copies) > 1)


def broadcast_weights(engine: Any) -> None:
    """Copy the weights of the first rank to all ranks with the same weights."""
    for parameter in engine.module.parameters():
        group = engine.module.expert_ranks.copies if is_of_experts(parameter) else engine.seq_data_parallel_group
        # As bytes, since not every backend has all types.
        dist.broadcast(parameter.data.view(torch.uint8), group=group, group_src=0)


@contextmanager
def experts_apart(engine: Any, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around the construction of DeepSpeed's optimizer: it partitions experts over the ranks with the same ones."""
    copies = engine.module.expert_ranks.copies
    if not any(map(is_of_experts, engine.module.parameters())):
        yield
        return
    for group in list(optimizer.param_groups):
        experts = [weight for weight in group["params"] if is_of_experts(weight)]
        if 0 < len(experts) < len(group["params"]):
            group["params"] = [weight for weight in group["params"] if not is_of_experts(weight)]
            optimizer.param_groups.append({**group, "params": experts})

    def configure(made: Any) -> None:
        for number, group in enumerate(optimizer.param_groups):
            if is_of_experts(group["params"][0]):
                made.real_dp_process_group[number] = copies
                if isinstance(made, DeepSpeedZeroOptimizer):
                    made.partition_count[number] = dist.get_world_size(copies)
        made.has_moe_layers = False  # For all that follows.

    # Constructors with experts call it before they partition weights.
    originals = {kind: kind._configure_moe_settings for kind in (BF16_Optimizer, DeepSpeedZeroOptimizer)}
    engine.has_moe_layers = True
    for kind in originals:
        kind._configure_moe_settings = configure
    try:
        yield
    finally:
        engine.has_moe_layers = False
        for kind, original in originals.items():
            kind._configure_moe_settings = original
