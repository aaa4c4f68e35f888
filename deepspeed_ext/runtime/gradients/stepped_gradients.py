"""The gradients that an optimizer steps with, once all sums over ranks are there."""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn


def stepped_gradients(engine: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The gradients [...] that this rank's optimizer is about to step with: whole, or under ZeRO 1 of its partition."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        for weights, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
            yield from zip(weights, gradients, strict=True)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for group, weights in enumerate(optimizer.params_in_partition):
            # Behind the last weight the partition is filled up.
            parts = (part for part in optimizer.averaged_gradients[group] if not hasattr(part, "_zero_padding"))
            yield from zip(weights, parts, strict=False)
    else:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                yield parameter, parameter.grad


def count_bad_copies(engine: Any) -> None:
    """Let a gradient that is no number count in the norm on each tensor-parallel rank.

    The norm leaves out all copies but the first of what tensor parallelism does not cut, and each rank steps its own.
    Here 0 times those that are left out is added to one that counts: nothing, or NaN.
    """
    if engine.grid.get_slice_parallel_rank() == 0:
        return
    counted, left_out = None, []
    for parameter, gradient in stepped_gradients(engine):
        if is_model_parallel_parameter(parameter):
            counted = gradient if counted is None else counted
        elif gradient.numel():
            left_out.append(gradient)
    if counted is not None and left_out:
        largest = torch.stack([each.to(counted.dtype) for each in torch._foreach_norm(left_out, float("inf"))])
        counted.view(-1)[:1].add_(largest.sum() * 0)
