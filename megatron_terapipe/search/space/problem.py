"""The question that a search answers: which model, on which cluster, with which batch."""

from dataclasses import dataclass, field
from functools import cached_property

from deepspeed_ext.plan.partition import StagePartition
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.software.description import Software
from megatron_terapipe.search.software.terapipe import TERAPIPE

__all__ = ["SearchProblem"]

MEMORY_HEADROOM = 0.05
"""Share of a device's memory that is kept free where nobody says otherwise: predictions are a few per cent off."""


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """A model to train on a cluster, with a batch."""

    workload: Workload
    cluster: Cluster
    """The machines, in the order of their hostfile."""
    global_batch_size: int
    """Sequences of one optimizer step."""
    precision: str = "bf16"
    """`fp16`, `bf16` or `fp32`."""
    software: Software = TERAPIPE
    """The trainer that will run the answer."""
    memory_headroom: float = MEMORY_HEADROOM
    """Share of every device's memory that strategies leave free, in [0, 1)."""
    _partitions: dict[tuple[str, int], StagePartition] = field(default_factory=dict, compare=False, repr=False)

    def partition(self, stage_partition: str | tuple[int, ...], num_stages: int) -> StagePartition:
        """Return the layers of each stage; those of a rule are computed once.

        Raises:
            ConfigError: if they do not fit the model or the stages.
        """
        if not isinstance(stage_partition, str):
            return self.workload.partition(stage_partition, num_stages)
        key = (stage_partition, num_stages)
        if key not in self._partitions:
            self._partitions[key] = self.workload.partition(stage_partition, num_stages)
        return self._partitions[key]

    @cached_property
    def has_equal_layers(self) -> bool:
        """Whether all layers that a stage partition counts have the same number of parameters."""
        workload = self.workload
        return len({layer.parameters for layer in workload.layers[workload.first_dealt : workload.end_dealt]}) == 1
