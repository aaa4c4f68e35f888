"""Gradients that lie in parts on several ranks of one replica of the model, summed once a step.

Both sums come before DeepSpeed's own reduction over replicas, and find a gradient wherever DeepSpeed accumulates it.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn


def sum_over_tied_stages(module: PipelineModule) -> None:
    """Sum the gradients of tied weights over the stages that share them."""
    for weight, group in module.get_tied_weights_and_groups():
        dist.all_reduce(accumulated_gradient(weight), group=group)


def sum_over_tensor_parallel_ranks(module: nn.Module, grid: Any) -> None:
    """Sum the gradients of weights that every tensor-parallel rank holds whole, but applied to its part of the tokens.

    Such a weight says so by an attribute `sequence_parallel`, as Megatron's do: norms, and the biases behind a
    reduction. They are small and many, so they travel together, one message for each dtype.
    """
    if grid.get_slice_parallel_world_size() == 1:
        return
    gradients: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for weight in module.parameters():
        if getattr(weight, "sequence_parallel", False) and weight.requires_grad:
            gradient = accumulated_gradient(weight)
            gradients[gradient.dtype].append(gradient)
    for parts in gradients.values():
        bucket = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(bucket, group=grid.get_slice_parallel_group())
        for part, summed in zip(parts, bucket.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


def accumulated_gradient(weight: nn.Parameter) -> Tensor:
    """Where the gradient of a weight adds up; zeros on a rank that found none, so that every rank can join in."""
    for attribute in ("_hp_grad", "grad_accum", "grad"):
        if getattr(weight, attribute, None) is not None:
            return getattr(weight, attribute)
    weight.grad = torch.zeros_like(weight)
    return weight.grad
