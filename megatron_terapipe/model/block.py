"""One transformer layer."""

from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.attention import Past, SelfAttention
from megatron_terapipe.model.mlp import MLP


class TransformerBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and added to the residual."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.attention = SelfAttention(model)
        self.mlp_norm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.mlp = MLP(model)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """[B, N, hidden] in, the same out."""
        hidden = hidden + self.attention(self.attention_norm(hidden), past)
        return hidden + self.mlp(self.mlp_norm(hidden))
