"""A strategy with what its layout makes of the cluster and the model, looked up once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.search.cost.layer_counts import LayerCounts
from megatron_terapipe.search.cost.links.rank_groups import RankGroups
from megatron_terapipe.search.cost.stage_ops import OpSizes
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PlacedStrategy:
    """A strategy with what its layout makes of the cluster and the model, looked up once."""

    strategy: Strategy
    """The strategy."""
    groups: RankGroups
    """Links and devices of its ranks."""
    counts: LayerCounts
    """Layers and parameters of its stages."""
    shares: Floats
    """[S + 1] bounds of its token slices, as shares of the sequence."""

    @property
    def key(self) -> tuple[object, ...]:
        """What the times of layers depend on, beside token slices, devices and links."""
        one = self.strategy
        sizes = one.micro_batch_size, one.sequence_parallel_size
        return *sizes, one.recompute, one.sequence_parallel, one.key_value_gradients

    def sizes(self, start: Floats, end: Floats) -> OpSizes:
        """Return what the ops of token slices depend on.

        Args:
            start: [T] where they begin, as shares of the sequence.
            end: [T] where they end.
        """
        return OpSizes(
            tensor_parallel_size=float(self.strategy.tensor_parallel_size),
            sequence_parallel_size=float(self.strategy.sequence_parallel_size),
            micro_batch_size=float(self.strategy.micro_batch_size),
            start=start,
            end=end,
            recompute=self.strategy.recompute,
            sequence_parallel=self.strategy.sequence_parallel,
            key_value_gradients=self.strategy.key_value_gradients,
        )


def pipeline_shape(strategy: Strategy) -> PipelineShape:
    """Extent of a strategy's pipeline."""
    return PipelineShape(
        strategy.pipeline_parallel_size * strategy.stages_of_a_rank,
        strategy.num_micro_batches,
        strategy.num_token_slices,
        strategy.stages_of_a_rank,
    )
