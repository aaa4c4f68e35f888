"""The feed-forward part of a layer."""

from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.block_shape import BlockShape
from megatron_terapipe.model.activation import Activation
from megatron_terapipe.model.initialization import normal, scaled_normal
from megatron_terapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks


class MLP(nn.Module):
    """Up, activation, down. With a gate, its matrix and that of what it gates are one parameter [2, ffn, hidden].

    Args:
        model: the model section.
        block: shape of the layer.
        ranks: ranks that share the hidden layer.
    """

    def __init__(self, model: ModelConfig, block: BlockShape, ranks: TensorParallelRanks) -> None:
        super().__init__()
        width, bias = block.ffn_hidden_size, not model.disable_bias_linear
        self.up = ColumnParallelLinear(
            model.hidden_size, (2, width) if model.gated else width, ranks, normal(model.init_method_std), bias=bias
        )
        self.activation = Activation(model.activation)
        self.down = RowParallelLinear(
            width, model.hidden_size, ranks, scaled_normal(model.init_method_std, model.num_layers), bias=bias
        )

    def forward(self, hidden: Tensor, recomputed: nn.Module | None = None) -> Tensor:
        """Return the output [B, n, hidden] for the tokens that this rank has between the matrices.

        Args:
            hidden: input of this layer, or of the norm before.
            recomputed: the norm before, if its output is computed again in the backward instead of kept; so is then
                that of the activation.
        """
        widened = self.up(hidden, recomputed)
        return self.down(self.activation(widened)) if recomputed is None else self.down(widened, self.activation)
