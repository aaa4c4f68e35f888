"""How many parameters each pipeline rank holds, and which of them another one holds, too."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_terapipe.search.workload.workload import Workload


class HeldParameters(NamedTuple):
    """Parameters by pipeline rank, on one tensor-parallel rank.

    Attributes:
        total: [P] that a rank holds; a weight that two of its layers share is there once.
        shared: [P] of them those of a weight that another pipeline rank holds, too (tied embedding).
    """

    total: list[float]
    shared: list[float]


def held_parameters(
    workload: Workload, stages: Sequence[range], num_ranks: int, tensor_parallel_size: int
) -> HeldParameters:
    """Count them.

    Args:
        workload: the layers.
        stages: indices of the layers of each stage; stages are dealt round and round to pipeline ranks.
        num_ranks: P.
        tensor_parallel_size: ranks that divide a layer.
    """
    total, shared = [0.0] * num_ranks, [0.0] * num_ranks
    each: dict[int, float] = {}  # blocks of a GPT are one object many times
    holders: dict[str, dict[int, float]] = {}
    for stage, indices in enumerate(stages):
        rank = stage % num_ranks
        for index in indices:
            layer = workload.layers[index]
            count = each.get(id(layer))
            if count is None:
                count = each[id(layer)] = layer.parameters_per_rank(tensor_parallel_size)
            total[rank] += count
            if layer.shared_weight is not None:
                weight = layer.shared_parameters / tensor_parallel_size
                if rank in holders.setdefault(layer.shared_weight, {}):
                    total[rank] -= weight
                holders[layer.shared_weight][rank] = weight
    for places in holders.values():
        if len(places) > 1:
            for rank, weight in places.items():
                shared[rank] += weight
    return HeldParameters(total, shared)
