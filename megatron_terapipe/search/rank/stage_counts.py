"""How many layers of each kind stand on each pipeline rank."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.partition import StagePartition
from megatron_terapipe.search.inputs.workload import Workload, parameters_per_rank

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StageCounts:
    """Layers of a stage partition, dealt round and round to pipeline ranks.

    Attributes:
        per_rank: [P, K] layers of each kind.
        first_stage: [P, K] those of the first stage of each rank, which the first token slice passes.
        parameters: [P] that a tensor-parallel rank holds; a shared weight once.
        shared_parameters: [P] of them those of a weight that several pipeline ranks hold.
        last_layers: [stages - 1] index of the layer before each boundary.
        per_stage: [stages, K] layers of each kind.
    """

    per_rank: Floats
    first_stage: Floats
    parameters: Floats
    shared_parameters: Floats
    last_layers: NDArray[np.int64]
    per_stage: Floats


def stage_counts(
    workload: Workload, partition: StagePartition, num_ranks: int, tensor_parallel_size: int, kind_of: Mapping[int, int]
) -> StageCounts:
    """Count.

    Args:
        workload: the layers.
        partition: the layers of each stage.
        num_ranks: pipeline ranks.
        tensor_parallel_size: ranks that share a layer.
        kind_of: number of the kind of a layer, by its `id`.
    """
    stages = workload.stages(partition)
    num_kinds = max(kind_of.values()) + 1
    per_stage = np.zeros((len(stages), num_kinds))
    for stage, indices in enumerate(stages):
        for index in indices:
            per_stage[stage, kind_of[id(workload.layers[index])]] += 1
    held = parameters_per_rank(workload, stages, num_ranks, tensor_parallel_size)
    return StageCounts(
        per_rank=per_stage.reshape(-1, num_ranks, num_kinds).sum(axis=0),
        first_stage=per_stage[:num_ranks],
        parameters=np.array(held.total),
        shared_parameters=np.array(held.shared),
        last_layers=np.array([indices[-1] for indices in stages[:-1]], dtype=np.int64),
        per_stage=per_stage,
    )
