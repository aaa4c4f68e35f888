"""How many layers of each kind, and how many parameters, stand on each stage and pipeline rank."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.partition import StagePartition
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.inputs.workload import Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerCounts:
    """Layers and parameters of a stage partition, whose stages are dealt round and round to pipeline ranks."""

    per_stage: Floats
    """[stages, K] layers of each kind."""
    parameters: Floats
    """[P] parameters that a tensor-parallel rank holds; a weight that two of its layers share counts once."""
    shared_parameters: Floats
    """[P] of them those of a weight that another pipeline rank holds, too (tied embedding)."""
    last_layers: NDArray[np.int64]
    """[stages - 1] index of the layer before each boundary."""

    @property
    def per_rank(self) -> Floats:
        """Layers of each kind on each pipeline rank: [P, K]."""
        ranks = len(self.parameters)
        return np.asarray(self.per_stage.reshape(-1, ranks, self.per_stage.shape[1]).sum(axis=0))

    @property
    def first_stage(self) -> Floats:
        """Layers of each kind on the first stage of each rank, which the first token slice passes: [P, K]."""
        return self.per_stage[: len(self.parameters)]


class LayerCounter:
    """Counts the layers of one model, for many stage partitions."""

    def __init__(self, workload: Workload) -> None:
        """Find the kinds of layers."""
        self._workload = workload
        # Blocks of a GPT are one object many times.
        kinds = {id(layer): layer for layer in workload.layers}
        self.kinds: tuple[Layer, ...] = tuple(kinds.values())
        """The K different layers."""
        place = {key: kind for kind, key in enumerate(kinds)}
        self.kind_of_layer: NDArray[np.int64] = np.array([place[id(layer)] for layer in workload.layers])
        """[layers] number of the kind of each layer."""
        one_hot = np.eye(len(self.kinds))[self.kind_of_layer]
        self._before = np.concatenate([np.zeros((1, len(self.kinds))), np.cumsum(one_hot, axis=0)])
        self._shared: dict[str, list[int]] = {}
        for index, layer in enumerate(workload.layers):
            if layer.shared_weight is not None:
                self._shared.setdefault(layer.shared_weight, []).append(index)
        self._parameters: dict[int, Floats] = {}

    def count(
        self,
        partition: StagePartition,
        num_ranks: int,
        tensor_parallel_size: int,
        *,
        vocabulary_stages: bool = False,
    ) -> LayerCounts:
        """Return the counts of a stage partition.

        Args:
            partition: the layers of each stage.
            tensor_parallel_size: ranks that share a layer.
            vocabulary_stages: whether each rank has one more stage, with its part of the head.

        Raises:
            ConfigError: if the head cannot be cut so.
        """
        bounds = np.array(partition.bounds) + self._workload.first_dealt
        bounds[0], bounds[-1] = 0, len(self._workload.layers)
        per_stage = np.diff(self._before[bounds], axis=0)
        if vocabulary_stages:
            per_stage = self._with_vocabulary_stages(per_stage, num_ranks)
            bounds = np.append(bounds[:-1], [bounds[-1] - 1] * num_ranks + [bounds[-1]])
        if tensor_parallel_size not in self._parameters:
            each = [layer.parameters_per_rank(tensor_parallel_size) for layer in self.kinds]
            self._parameters[tensor_parallel_size] = np.array(each)
        per_rank = (per_stage @ self._parameters[tensor_parallel_size]).reshape(-1, num_ranks).sum(axis=0)
        shared = np.zeros(num_ranks)
        for indices in self._shared.values():
            stages = np.searchsorted(bounds, indices, side="right") - 1
            weights = {}
            for rank, index in zip((stages % num_ranks).tolist(), indices, strict=True):
                weight = self._workload.layers[index].shared_parameters / tensor_parallel_size
                if rank in weights:
                    per_rank[rank] -= weight
                weights[rank] = weight
            if len(weights) > 1:
                for rank, weight in weights.items():
                    shared[rank] += weight
        return LayerCounts(per_stage, per_rank, shared, bounds[1:-1] - 1)

    def _with_vocabulary_stages(self, per_stage: Floats, num_ranks: int) -> Floats:
        """[stages + ranks, K] layers of each kind, the head in equal parts on the last stage of each rank."""
        layers = self._workload.layers
        if layers[-1].kind != "head" or layers[-1].shared_weight is not None:
            raise ConfigError(
                "strategy: vocabulary_stages cuts the head of a model, and the last layer of this one is no head with "
                "a weight of its own: leave vocabulary_stages false"
            )
        head = self.kind_of_layer[-1]
        parts = np.zeros((num_ranks, per_stage.shape[1]))
        parts[:, head] = 1 / num_ranks
        per_stage = per_stage.copy()
        per_stage[-1, head] -= 1
        return np.concatenate([per_stage, parts])
