"""How many parameters each pipeline rank holds, and which of them another one holds, too."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.partition import StagePartition
from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.layer import Layer

__all__ = ["Workload"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model by its layers.

    A stage partition counts the layers from `first_dealt` to `last_dealt`. Of a GPT those are its transformer layers:
    the embedding goes with the first stage, the last norm and the head with the last. Of other models they are all.
    """

    name: str
    layers: tuple[Layer, ...]
    seq_length: int
    """Tokens of one training sequence."""
    first_dealt: int
    """First layer that a stage partition counts."""
    end_dealt: int
    """Layer behind the last one that it counts."""
    config: ModelConfig | None = None
    """The model section of the trainer; None = a model that the trainer cannot build."""

    @property
    def num_dealt_layers(self) -> int:
        """Layers that a stage partition counts."""
        return self.end_dealt - self.first_dealt

    @cached_property
    def parameters(self) -> int:
        """All parameters; those of a shared weight once."""
        total, seen = 0, set()
        for layer in self.layers:
            total += layer.parameters
            if layer.shared_weight is not None:
                if layer.shared_weight in seen:
                    total -= layer.shared_parameters
                seen.add(layer.shared_weight)
        return total

    @cached_property
    def can_cut_tokens(self) -> bool:
        """Whether sequences can be cut into token slices: every layer sees the same tokens, and none a later one."""
        return all(
            layer.tokens == self.seq_length
            and (layer.attention is None or (layer.attention.causal and layer.attention.separate_window is None))
            for layer in self.layers
        )

    def partition(self, stage_partition: str | tuple[int, ...], num_stages: int) -> StagePartition:
        """Layers of each stage, counted among the layers that a partition distributes.

        Raises:
            ConfigError: if they do not fit the model or the stages.
        """
        try:
            if isinstance(stage_partition, str):
                if stage_partition in ("uniform", "auto"):
                    return StagePartition.uniform(self.num_dealt_layers, num_stages)
                if stage_partition == "parameters":
                    weights = [layer.parameters for layer in self.layers[self.first_dealt : self.end_dealt]]
                    return StagePartition.balanced(weights, num_stages)
                parsed = StagePartition.parse(stage_partition)
            else:
                parsed = StagePartition(stage_partition)
            return parsed.covering(self.num_dealt_layers, num_stages)
        except PlanError as error:
            raise ConfigError(f"strategy: stage_partition: {error}") from None

    def stages(self, partition: StagePartition) -> list[range]:
        """Indices of the layers of each stage, those at both ends included."""
        bounds = [self.first_dealt + bound for bound in partition.bounds]
        bounds[0], bounds[-1] = 0, len(self.layers)
        return [range(*pair) for pair in pairwise(bounds)]
