"""The feed-forward part of a layer."""

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.initialization import normal, scaled_normal
from megatron_terapipe.model.linear import Linear


class MLP(nn.Module):
    """Up, GELU, down. The GELU is the tanh form of GPT-2."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(model.hidden_size, model.ffn_hidden_size, normal(model.init_method_std))
        self.down = Linear(
            model.ffn_hidden_size, model.hidden_size, scaled_normal(model.init_method_std, model.num_layers)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, the same out."""
        return self.down(F.gelu(self.up(hidden), approximate="tanh"))
