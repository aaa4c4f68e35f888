"""The feed-forward part of a layer."""

from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.model.block_shape import BlockShape
from megatron_terapipe.model.activation import Activation
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks


class MLP(nn.Module):
    """Up, activation, down. With a gate, its matrix and that of what it gates are one parameter [2, ffn, hidden].

    Args:
        ranks: ranks that share the hidden layer.
        recompute_activation: compute the output of the activation again in the backward instead of keeping it.
    """

    def __init__(
        self, model: ModelConfig, block: BlockShape, ranks: TensorParallelRanks, *, recompute_activation: bool = False
    ) -> None:
        super().__init__()
        self.recompute_activation = recompute_activation
        width, bias = block.ffn_hidden_size, model.has_mlp_bias
        self.up = ColumnParallelLinear(
            model.hidden_size, (2, width) if model.gated else width, ranks, normal(model.init_method_std), bias=bias
        )
        self.activation = Activation(model.activation)
        self.down = RowParallelLinear(width, model.hidden_size, ranks, normal(model.output_layer_init_std), bias=bias)

    def forward(self, hidden: Tensor, recomputed: nn.Module | None = None, *, completed: bool = True) -> Tensor:
        """Return the output [B, n, hidden] for the tokens that this rank has between the matrices.

        Args:
            hidden: input of this layer, or of the norm before.
            recomputed: the norm before, if its output is computed again in the backward instead of kept.
            completed: whether ranks sum their parts; if not, this is the part [B, N, hidden] of this rank.
        """
        widened = self.up(hidden, recomputed)
        if self.recompute_activation:
            return self.down(widened, self.activation, completed=completed)
        return self.down(self.activation(widened), completed=completed)
