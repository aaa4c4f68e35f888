"""Multi-head self-attention with grouped keys and values."""

from typing import Protocol

from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.initialization import normal, scaled_normal
from megatron_terapipe.model.linear import Linear


class Past(Protocol):
    """What came before the tokens that a layer is given; whoever runs the layers provides it."""

    @property
    def prefix_len(self) -> int:
        """Tokens before these: the position of the first one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of these tokens to themselves and to those before: query [B, N, H, D] in, the same out."""


class SelfAttention(nn.Module):
    """Queries, keys and values in one product, attention, projection."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_groups = model.num_attention_heads, model.num_key_value_heads
        self.head_size = model.kv_channels
        query_size, key_value_size = self.num_heads * self.head_size, self.num_groups * self.head_size
        self.query_key_value = Linear(model.hidden_size, query_size + 2 * key_value_size, normal(model.init_method_std))
        self.projection = Linear(query_size, model.hidden_size, scaled_normal(model.init_method_std, model.num_layers))

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Attend: [B, N, hidden] in, the same out."""
        heads = self.query_key_value(hidden).unflatten(-1, (-1, self.head_size))
        query, key, value = heads.split([self.num_heads, self.num_groups, self.num_groups], dim=2)
        return self.projection(past.attend(query, key, value).flatten(2))
