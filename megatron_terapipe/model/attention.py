"""Multi-head self-attention with grouped keys and values."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.block_shape import BlockShape
from megatron_terapipe.model.initialization import normal, scaled_normal
from megatron_terapipe.model.rotary import RotaryTable, rotated_heads
from megatron_terapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks

Made = TypeVar("Made")


class Past(Protocol):
    """What came before the tokens that a layer is given, and where they are; whoever runs the layers provides it."""

    prefix_len: int
    """Tokens before these."""

    @property
    def positions_restart(self) -> bool:
        """Whether positions restart within a row; if not, they count on from `prefix_len`."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Positions of these N tokens: [1, N], or [B, N] where they restart."""

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What all layers need of these tokens: made by the first that asks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, dropout: float, first_head: int) -> Tensor:
        """Causal attention of these tokens to themselves and to those before: query [B, N, H, D] in, the same out."""

    def dropout(
        self, inputs: Tensor, probability: float, *, site: int, first_token: int, residual: Tensor | None
    ) -> Tensor:
        """Dropout on [B, n, C] of some of these tokens, whose masks depend on their place alone; then the residual."""


class SelfAttention(nn.Module):
    """Queries, keys and values in one product, attention, projection.

    The rows of the product are grouped: for each key head its query heads, then it, then its value head. So ranks
    share the groups, and each holds whole ones.

    Args:
        model: the model section.
        block: shape of the layer.
        ranks: ranks that share the groups.
        rotary: the table that all layers of this rank share, where positions are rotary; None for one of its own.
    """

    def __init__(
        self,
        model: ModelConfig,
        block: BlockShape,
        ranks: TensorParallelRanks,
        rotary: RotaryTable | None = None,
    ) -> None:
        super().__init__()
        num_heads, num_groups = model.num_attention_heads, block.num_key_value_heads
        self.head_size, self.heads_of_group = model.kv_channels, num_heads // num_groups
        self.first_head = ranks.rank * num_heads // ranks.size
        self.dropout = model.attention_dropout
        self.rotary = rotary or rotary_table(model)
        bias = not model.disable_bias_linear
        self.query_key_value = ColumnParallelLinear(
            model.hidden_size,
            (num_heads + 2 * num_groups) * self.head_size,
            ranks,
            normal(model.init_method_std),
            bias=bias,
        )
        self.projection = RowParallelLinear(
            num_heads * self.head_size,
            model.hidden_size,
            ranks,
            scaled_normal(model.init_method_std, model.num_layers),
            bias=bias,
        )

    def forward(self, hidden: Tensor, past: Past, recomputed: nn.Module | None = None) -> Tensor:
        """Attend: [B, n, hidden] of the tokens this rank has between the matrices in, the same out.

        Args:
            hidden: of this layer, or of the norm before.
            past: what came before these tokens.
            recomputed: the norm before, if its output is computed again in the backward instead of kept.
        """
        groups = self.query_key_value(hidden, recomputed).unflatten(-1, (-1, self.heads_of_group + 2, self.head_size))
        if self.rotary is None:
            heads = groups.split([self.heads_of_group, 1, 1], dim=3)
            query, key, value = (each.flatten(2, 3) for each in heads)
        else:
            query, key, value = rotated_heads(groups, *past.once("rotation", lambda: self._turns(past, groups)))
        dropout = self.dropout if self.training else 0.0
        attended = past.attend(query, key, value, dropout=dropout, first_head=self.first_head)
        return self.projection(attended.flatten(2))

    def _turns(self, past: Past, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for the tokens [B, N, ...] of a product."""
        end = past.prefix_len + like.shape[1]
        if past.positions_restart:
            return self.rotary.at(past.positions(like.shape[1], like.device), end, like)
        return self.rotary.between(past.prefix_len, end, like)


def rotary_table(model: ModelConfig) -> RotaryTable | None:
    """The rotations of a model's positions; None if they are not rotary."""
    if model.position_embedding_type != "rope":
        return None
    return RotaryTable(model.rotary_channels, model.rotary_base, model.seq_length)
