"""Latent attention (MLA): keys and values of all heads from one latent vector of each token.

    DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434 section 2.1

    x [h] --down--> query latent [q] --norm--> query_up  --> queries [H, n | r]   r of them rotated
               '--> latent [c]       --norm--> up        --> keys [H, n], values [H, v]
               '--> rotated key [r], which all heads share

A token leaves c + r numbers to the token slices after it, from which its keys and values are computed again, or H times
n + r + v numbers: its keys and values themselves (`Past.attend_latent`).
"""

import torch
from torch import Tensor, nn

from deepspeed_ext.runtime.state.sequence_state import Past
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.model.attention import CausalAttention
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.norm import NORMS
from megatron_terapipe.model.rotary import RotaryTable, rotated
from megatron_terapipe.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelRanks,
    linear,
)


class LatentAttention(CausalAttention):
    """Latents of queries and of keys and values, their norms, products of heads, attention, projection.

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
        self.projection = RowParallelLinear(
            heads * sizes.value_size,
            model.hidden_size,
            ranks,
            normal(model.output_layer_init_std),
            bias=model.has_projection_bias,
        )

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
