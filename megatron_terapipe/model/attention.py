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
    """The tokens before those that a layer is given, and the positions of both. The engine provides it.

    B sequences, N tokens of the token slice, n of them on this rank, H heads of D elements, C channels.
    """

    prefix_len: int
    """Tokens before these."""

    @property
    def positions_restart(self) -> bool:
        """Whether positions restart within a row; if not, they count on from `prefix_len`."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of these N tokens: [1, N], or [B, N] where they restart at documents.

        Args:
            length: N.
            device: device of the result.
        """

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """Return something that all layers need of these tokens; the first layer that asks makes it.

        Args:
            name: its name.
            make: function that makes it.
        """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, dropout: float, first_head: int) -> Tensor:
        """Return causal attention of these tokens to themselves and to those before: [B, N, H, D].

        Args:
            query: [B, N, H, D].
            key: [B, N, key heads, D].
            value: [B, N, key heads, D].
            dropout: probability with which an attention weight is dropped.
            first_head: number of the first of these heads among the heads of all ranks.
        """

    def dropout(
        self, inputs: Tensor, probability: float, *, site: int, first_token: int, residual: Tensor | None
    ) -> Tensor:
        """Return `inputs` after dropout, plus the residual: [B, n, C]. Masks depend on positions alone.

        Args:
            inputs: [B, n, C], for some of these tokens.
            probability: probability with which an element is dropped.
            site: number of the place in the layer.
            first_token: number of the first of these n tokens in the token slice.
            residual: [B, n, C] to add; None to add nothing.
        """


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
            hidden: input of this layer, or of the norm before.
            past: the tokens before.
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
