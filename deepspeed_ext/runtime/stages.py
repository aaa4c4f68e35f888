"""Which layers are on which stage, and what a module asks of them before it is built."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.runtime.batches.forward_arguments import ForwardArguments


def check_world(layout: ParallelLayout) -> None:
    """Refuse a layout for other ranks than there are.

    Raises:
        UserError: if their number is another, or they have not met yet.
    """
    if not dist.is_initialized():
        raise UserError("no process group is there to place stages on: call init_distributed() first")
    if (world_size := dist.get_world_size()) != layout.world_size:
        sequence = f"sequence {layout.sequence_parallel_size} x " if layout.sequence_parallel_size > 1 else ""
        raise UserError(
            f"the layout has {layout.world_size} ranks (data {layout.data_parallel_size} x {sequence}tensor "
            f"{layout.tensor_parallel_size} x pipeline {layout.pipeline_parallel_size}), and {world_size} processes "
            f"run: launch {layout.world_size}, or change the layout"
        )


def trainable_stages(partition: str | StagePartition, layers: Sequence[Any], pipeline: PipelineShape) -> StagePartition:
    """The stage partition that a setting asks for, in which every rank has something to train.

    Raises:
        PlanError: if the setting names no partition, or one of another shape.
        UserError: if a rank has no parameters to train.
    """
    weights = [_trainable_parameters(layer) for layer in layers]
    bounds = stage_partition(partition, weights, pipeline.num_stages)
    for rank in range(pipeline.num_ranks):
        stages = list(pipeline.stages_of(rank))
        if not sum(weights[layer] for stage in stages for layer in bounds.layers(stage)):
            raise UserError(
                f"stage {' and '.join(map(str, stages))} of the partition {bounds} has no parameters to train, and "
                "optimizers cannot do with none: move a layer with parameters to it"
            )
    return bounds


def stage_partition(partition: str | StagePartition, weights: Sequence[float], num_stages: int) -> StagePartition:
    """The stage partition that a setting asks for.

    Args:
        weights: trainable parameters of each layer.

    Raises:
        PlanError: if the setting names no partition, or one of another shape.
    """
    if partition == "uniform":
        return StagePartition.uniform(len(weights), num_stages)
    if partition == "parameters":
        return StagePartition.balanced(weights, num_stages)
    if isinstance(partition, str):
        partition = StagePartition.parse(partition)
    return partition.covering(len(weights), num_stages)


def _trainable_parameters(layer: Any) -> int:
    if isinstance(layer, LayerSpec):
        # DeepSpeed would build every layer on every rank to count; on the meta device that costs no memory.
        with torch.device("meta"):
            layer = layer.build()
    if not isinstance(layer, nn.Module):
        return 0
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def takes_past(function: Callable[..., Any]) -> bool:
    """Whether a layer wants to see what came before its token slice: it then has an argument named `past`."""
    forward = function.forward if isinstance(function, nn.Module) else function
    return ForwardArguments.of("a layer", forward).takes_past
