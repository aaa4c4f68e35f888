"""Gradients that lie in parts on several ranks of one replica of the model, summed once a step.

All sums come before DeepSpeed's own reduction over replicas, and find a gradient wherever DeepSpeed accumulates it.
Gradients of one dtype that go the same way travel together: a message for each costs more than its bytes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SUM_BUCKET_BYTES = 1 << 26
"""A message of 64 MiB keeps any network busy, and its copy is small beside the gradients."""


def sum_over_sharing_ranks(weights_and_groups: Iterable[tuple[nn.Parameter, dist.ProcessGroup]]) -> None:
    """Sum the gradients of weights that several ranks of a pipeline hold together: tied layers, and shared modules.

    Args:
        weights_and_groups: each weight, with the group of its ranks; in one order on all of them.
    """
    gradients: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for weight, group in weights_and_groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        if weight.requires_grad and len(ranks) > 1:
            groups.setdefault(ranks, group)
            gradients[ranks].append(accumulated_gradient(weight))
    # In one order on all ranks: where three pairs of three ranks share, each would otherwise wait for another.
    for ranks in sorted(groups):
        sum_in_buckets(gradients[ranks], groups[ranks])


def sum_over_tensor_parallel_ranks(module: nn.Module, grid: Any) -> None:
    """Sum the gradients of weights that every tensor-parallel rank holds whole, but applies to its part of the tokens.

    Such a weight has an attribute `sequence_parallel`, as Megatron's do: norms, and the biases after a reduction. So do
    norms of queries and keys, which a rank applies to its part of the heads, with sequence parallelism or without.

    Args:
        grid: process groups of this rank.
    """
    weights = _applied_to_a_part(module, grid)
    if weights:
        sum_in_buckets(map(accumulated_gradient, weights), grid.get_slice_parallel_group())


def summed_before_replicas(module: Any, grid: Any) -> set[nn.Parameter]:
    """Weights whose gradients the two functions above complete, before anybody may sum them over replicas."""
    groups = module.get_tied_weights_and_groups()
    return {weight for weight, group in groups if dist.get_world_size(group) > 1} | {*_applied_to_a_part(module, grid)}


def _applied_to_a_part(module: nn.Module, grid: Any) -> list[nn.Parameter]:
    if grid.get_slice_parallel_world_size() == 1:
        return []
    weights = module.parameters()
    return [weight for weight in weights if getattr(weight, "sequence_parallel", False) and weight.requires_grad]


def sum_in_buckets(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, *, bucket_bytes: int = SUM_BUCKET_BYTES
) -> None:
    """Sum tensors [...] in place over the ranks of a group, in few messages.

    Args:
        tensors: tensors of the same shapes and dtypes, in the same order, on every rank.
        bucket_bytes: largest size of a message that copies tensors together; larger tensors are not copied.
    """
    for bucket in buckets(tensors, bucket_bytes):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
            continue
        message = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(message, group=group)
        for tensor, summed in zip(bucket, message.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def buckets(tensors: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Group tensors by dtype, in their order, so that no group of several tensors is larger than a bucket.

    Args:
        tensors: tensors of any shape [...].
        bucket_bytes: largest size of a group, in bytes.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for of_one_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in of_one_dtype:
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def accumulated_gradient(weight: nn.Parameter) -> Tensor:
    """Tensor [...] in which the gradient of a weight is summed; zeros on a rank without a gradient."""
    for attribute in ("_hp_grad", "grad_accum", "grad"):
        if getattr(weight, attribute, None) is not None:
            return getattr(weight, attribute)
    weight.grad = torch.zeros_like(weight)
    return weight.grad
