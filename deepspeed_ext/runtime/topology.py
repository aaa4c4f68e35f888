"""DeepSpeed's process topology with a token axis."""

from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.pipe.topology import ProcessTopology

from deepspeed_ext.plan.layout import ParallelLayout


class TokenSliceTopology(ProcessTopology):
    """Axes pipe, token, data and model, where the token axis has one rank and `num_token_slices` steps.

    DeepSpeed multiplies the extents of all axes to the world size, so an axis that costs no rank has extent 1
    (ADR 0001). Pipe comes first and model last because DeepSpeed's checkpoints count ranks in that order.

    Example:
        >>> topology = TokenSliceTopology(ParallelLayout(pipeline_parallel_size=4, num_token_slices=8))
        >>> topology.world_size(), topology.get_dim("token"), topology.num_token_slices
        (4, 1, 8)
    """

    def __init__(self, layout: ParallelLayout) -> None:
        super().__init__(
            axes=["pipe", "token", "data", "model"],
            dims=[layout.pipeline_parallel_size, 1, layout.data_parallel_size, layout.tensor_parallel_size],
        )
        self.layout = layout
        self.num_token_slices = layout.num_token_slices

    def get_rank_repr(self, rank: int, omit_axes: Iterable[str] = ("data", "pipe", "token"), **separators: Any) -> str:
        """Name a rank without its token coordinate, which is always 0.

        DeepSpeed finds a checkpoint's layer files by the name `layer_00-model_00-...`; a token part would hide them.
        """
        return super().get_rank_repr(rank, omit_axes=list(omit_axes), **separators)


def layer_file(layer: int, tensor_parallel_rank: int = 0) -> str:
    """File that DeepSpeed saves a pipeline layer's weights to, given the names of ranks above."""
    return f"layer_{layer:02d}-model_{tensor_parallel_rank:02d}-model_states.pt"
