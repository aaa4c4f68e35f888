"""Self-attention: multi-head with grouped keys and values, and latent (MLA)."""

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.runtime.state.sequence_state import Past
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.norm import NORMS, AllHeadsRMSNorm
from megatron_terapipe.model.rotary import RotaryTable, rotary_table, rotated, rotated_heads, writes_heads
from megatron_terapipe.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelRanks,
    linear,
)


class CausalAttention(nn.Module):
    """Settings that layers of attention of either kind have in common.

    Args:
        rotary: the table of this layer's rotation, which layers of this rank share; None for one of its own.
    """

    def __init__(
        self, model: ModelConfig, block: BlockShape, ranks: TensorParallelRanks, rotary: RotaryTable | None = None
    ) -> None:
        super().__init__()
        self.first_head = ranks.rank * model.num_attention_heads // ranks.size
        self.dropout, self.window = model.attention_dropout, block.window
        self.scale, self.softcap = model.softmax_scale, model.attention_softcap
        self.rotary = rotary or rotary_table(model, block)

    @property
    def settings(self) -> dict[str, Any]:
        """Keywords of `Past.attend` and `Past.attend_latent`."""
        return {
            "scale": self.scale,
            "dropout": self.dropout if self.training else 0.0,
            "first_head": self.first_head,
            "window": self.window,
            "softcap": self.softcap,
        }


class SelfAttention(CausalAttention):
    """Queries, keys and values in one product, norms and rotations of queries and keys, attention, projection.

    The rows of the product are grouped: for each key head its query heads, their gates if there are any, then it, then
    its value head. So ranks share the groups, and each holds whole ones.
    """

    def __init__(
        self, model: ModelConfig, block: BlockShape, ranks: TensorParallelRanks, rotary: RotaryTable | None = None
    ) -> None:
        super().__init__(model, block, ranks, rotary)
        num_heads, num_groups = model.num_attention_heads, block.num_key_value_heads
        in_group, self.has_gate = num_heads // num_groups, model.attention_output_gate
        self.head_size, self.parts_of_group = model.kv_channels, [*[in_group] * (1 + self.has_gate), 1, 1]
        self.query_key_value = ColumnParallelLinear(
            model.hidden_size,
            num_groups * sum(self.parts_of_group) * self.head_size,
            ranks,
            normal(model.init_method_std),
            bias=model.has_qkv_bias,
        )
        self.query_norm = self.key_norm = None
        self.norms_rotated = model.qk_norm == "head-rotated"
        if model.qk_norm != "none":
            self.query_norm, self.key_norm = (_heads_norm(model, ranks, heads) for heads in (num_heads, num_groups))
        drawn, learned = normal(model.init_method_std), model.softmax_type == "learnable"
        self.sinks = ranks.parameter(num_heads, cut=0, initialize=drawn) if learned else None
        self.projection = _projection(model, ranks, num_heads * self.head_size)

    def forward(
        self, hidden: Tensor, past: Past, recomputed: nn.Module | None = None, *, completed: bool = True
    ) -> Tensor:
        """Attend: [B, n, hidden] of the tokens this rank has between the matrices in, the same out.

        `recomputed` and `completed` are as in `RowParallelLinear`, of the norm before and of the projection.
        """
        groups = self.query_key_value(hidden, recomputed)
        groups = groups.unflatten(-1, (-1, sum(self.parts_of_group), self.head_size))
        query, key, value, *gate = self._heads(groups, past)
        if self.rotary is not None:
            query = self.rotary.of_queries(query, past)
        attended = past.attend(query, key, value, sinks=self.sinks, **self.settings)
        if gate:
            attended = attended * gate[0].sigmoid()
        return self.projection(attended.flatten(2), completed=completed)

    def _heads(self, groups: Tensor, past: Past) -> tuple[Tensor, ...]:
        """Queries [B, N, H, D], keys and values [B, N, G, D] of a product, as attention takes them, and any gates."""
        turns, interleaved = (None, None), False
        if self.rotary is not None:
            turns, interleaved = self.rotary.of_token_slice(past, groups), self.rotary.rotation.interleaved
        # Where nothing is compiled, torch's own views and copies take less time of the host.
        apart = self.query_norm is not None or self.has_gate
        room = None if apart or not writes_heads(groups.device) else past.room(groups[..., -1, :], self.window)
        if room is not None or (not apart and self.rotary is not None):
            return rotated_heads(groups, *turns, interleaved=interleaved, room=room)
        query, *gate, key, value = (each.flatten(2, 3) for each in groups.split(self.parts_of_group, dim=3))
        if self.query_norm is not None and not self.norms_rotated:
            query, key = self._normed(query, key)
        if self.rotary is not None:
            query, key = (rotated(each, *turns, interleaved=interleaved) for each in (query, key))
        if self.norms_rotated:
            query, key = self._normed(query, key)
        return query, key, value, *gate

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        # A norm keeps its input. A view of the product would also keep the values.
        return self.query_norm(query.contiguous()), self.key_norm(key.contiguous())


def _heads_norm(model: ModelConfig, ranks: TensorParallelRanks, num_heads: int) -> nn.Module:
    """The norm of queries or of keys [B, N, heads, D]."""
    if model.qk_norm == "all-heads":
        return AllHeadsRMSNorm(model, ranks, num_heads)
    return NORMS[model.normalization](model, ranks, model.kv_channels, of_heads=True)


def _projection(model: ModelConfig, ranks: TensorParallelRanks, width: int) -> RowParallelLinear:
    """Return the matrix after attention; the outputs of all heads have this width."""
    drawn = normal(model.output_layer_init_std)
    return RowParallelLinear(width, model.hidden_size, ranks, drawn, bias=model.has_projection_bias)


class LatentAttention(CausalAttention):
    """Keys and values of all heads from one latent vector of each token (DeepSeek-V2, arXiv 2405.04434 section 2.1).

        x [h] --down--> query latent [q] --norm--> query_up  --> queries [H, n | r]   r of them rotated
                   '--> latent [c]       --norm--> up        --> keys [H, n], values [H, v]
                   '--> rotated key [r], which all heads share

    A token leaves c + r numbers to the token slices after it, from which its keys and values are computed again, or H
    times n + r + v numbers: its keys and values themselves (`Past.attend_latent`).

    Tensor-parallel ranks share the heads. Each computes the latents of its own tokens, and the gradients that the heads
    of all ranks have for a latent and for the rotated key are summed there: q + c + r numbers a token, not h.

    Args:
        latents_kept: whether latents are kept for later token slices, and not keys and values.
    """

    def __init__(
        self,
        model: ModelConfig,
        block: BlockShape,
        ranks: TensorParallelRanks,
        rotary: RotaryTable | None = None,
        *,
        latents_kept: bool = False,
    ) -> None:
        super().__init__(model, block, ranks, rotary)
        assert block.latent is not None, "a layer with latent attention has its sizes"
        self.sizes = sizes = block.latent
        self.ranks, self.latents_kept = ranks, latents_kept
        heads, first = model.num_attention_heads, normal(model.init_method_std)
        self.down = ranks.whole(sizes.query_rank + sizes.kept_size, model.hidden_size, initialize=first)
        """Rows of the query latent, of the latent, of the rotated key: [q + c + r, h]."""
        self.query_norm = self.latent_norm = None
        if model.qk_norm != "none":
            norm, epsilon = NORMS[model.normalization], model.latent_norm_epsilon
            self.query_norm = norm(model, ranks, sizes.query_rank, epsilon=epsilon) if sizes.query_rank else None
            self.latent_norm = norm(model, ranks, sizes.rank, epsilon=epsilon)
        self.query_up = ColumnParallelLinear(
            sizes.query_rank or model.hidden_size, heads * sizes.head_size, ranks, first, bias=False
        )
        self.up = ranks.parameter(heads, sizes.key_size + sizes.value_size, sizes.rank, cut=0, initialize=first)
        """Of each head the rows of its keys without rotation, and of its values: [H, n + v, c]."""
        self.projection = _projection(model, ranks, heads * sizes.value_size)

    def forward(
        self, hidden: Tensor, past: Past, recomputed: nn.Module | None = None, *, completed: bool = True
    ) -> Tensor:
        """Attend: [B, n, hidden] of the tokens this rank has between the matrices in, the same out.

        `recomputed` and `completed` are as in `RowParallelLinear`, of the norm before and of the projection.
        """
        sizes = self.sizes
        if recomputed is not None and not sizes.query_rank:
            # Two products read the output of the norm: it is kept once for both.
            hidden, recomputed = recomputed(hidden), None
        latents = linear(hidden, self.down, before=recomputed)
        query_latent, latent, key = latents.split([sizes.query_rank, sizes.rank, sizes.rotated_size], dim=-1)
        if self.latent_norm is not None:
            # A norm keeps its input. A view of the product would also keep the rest of it.
            latent = self.latent_norm(latent.contiguous())
            query_latent = self.query_norm(query_latent.contiguous()) if sizes.query_rank else query_latent
        query = self.query_up(query_latent if sizes.query_rank else hidden).unflatten(-1, (-1, sizes.head_size))
        kept = self.ranks.share(torch.cat((latent, key), dim=-1))
        if self.rotary is not None:
            turns, interleaved = self.rotary.of_token_slice(past, kept), self.rotary.rotation.interleaved
            query = rotated(query, *turns, interleaved=interleaved, after=sizes.key_size)
            query = self.rotary.of_queries(query, past)
            kept = rotated(kept.unsqueeze(2), *turns, interleaved=interleaved, after=sizes.rank).squeeze(2)
        attended = past.attend_latent(query, kept, self.up, keep_latents=self.latents_kept, **self.settings)
        return self.projection(attended.flatten(2), completed=completed)
