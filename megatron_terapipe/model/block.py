"""One transformer layer: attention, an MLP or experts, and dropout on the residual stream."""

from enum import IntEnum

import torch
from torch import Tensor, nn

from deepspeed_ext.runtime.state.sequence_state import Past
from deepspeed_ext.runtime.topology import ExpertParallelRanks
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.model.attention import LatentAttention, SelfAttention
from megatron_terapipe.model.experts import ExpertLayer
from megatron_terapipe.model.mlp import MLP
from megatron_terapipe.model.norm import NORMS, Sum
from megatron_terapipe.model.recurrence import RecurrentMixer
from megatron_terapipe.model.rotary import RotaryTable
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks


class DropoutSite(IntEnum):
    """The uses of dropout in one layer, each with masks of its own. Attention's probabilities are site 0."""

    EMBEDDING = 1
    ATTENTION = 2
    MLP = 3


def residual_dropout(
    hidden: Tensor,
    probability: float,
    site: DropoutSite,
    past: Past,
    ranks: TensorParallelRanks,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Return `hidden` after dropout, plus the residual: [B, n, hidden].

    Args:
        hidden: [B, n, hidden] of the tokens that this rank has between the matrices.
        residual: [B, n, hidden] to add, or None.
        multiplier: factor of `hidden` as it is added to the residual.
    """
    if not probability:
        return hidden if residual is None else torch.add(residual, hidden, alpha=multiplier)
    if multiplier != 1:
        hidden = hidden * multiplier
    first_token = ranks.first_token(hidden.shape[1])
    return past.dropout(hidden, probability, site=site, first_token=first_token, residual=residual)


class TransformerBlock(nn.Module):
    """Attention, or another mixer of tokens, and MLP with their norms, added to the residual; either may be left out.

        pre         h += A(N(h));     h += M(N(h))          norms of inputs
        post        h += N(A(h));     h += N(M(h))          norms of outputs
        both        h += N(A(N(h)));  h += N(M(N(h)))
        parallel    h += A(N(h)) + M(N(h))                  both norms of one input, or one norm for both

    In the last form tensor-parallel ranks sum their parts of both at once, unless each has a mask of dropout.

    Args:
        recompute_cheap: compute the outputs of norms and activation again in the backward instead of keeping them.
        latents_kept: keep latents for later token slices, and not keys and values, where attention has latents.
        rotary: the table of this layer's rotation, which layers of this rank share; None for one of its own.
        expert_ranks: ranks that share experts; None for a single rank.
    """

    def __init__(
        self,
        model: ModelConfig,
        block: BlockShape,
        ranks: TensorParallelRanks,
        *,
        recompute_cheap: bool = False,
        latents_kept: bool = False,
        rotary: RotaryTable | None = None,
        expert_ranks: ExpertParallelRanks | None = None,
    ) -> None:
        super().__init__()
        self.ranks, self.recompute_cheap = ranks, recompute_cheap
        self.dropout, self.multiplier = model.hidden_dropout, model.residual_multiplier
        has_mixer = bool(block.num_key_value_heads or block.recurrence)
        has_both = has_mixer and bool(block.ffn_hidden_size)
        self.parallel, self.shares_norm = model.parallel_residual, model.shared_block_norm and has_both
        norm = NORMS[model.normalization]
        before, after = model.norm_placement != "post", model.norm_placement != "pre"
        self.attention = self.mlp = None
        self.attention_norm = self.attention_post_norm = self.mlp_norm = self.mlp_post_norm = None
        if has_mixer:
            self.attention_norm = norm(model, ranks) if before else None
            if block.recurrence is not None:
                self.attention = RecurrentMixer(model, block.recurrence, ranks)
            elif block.latent is not None:
                self.attention = LatentAttention(model, block, ranks, rotary, latents_kept=latents_kept)
            else:
                self.attention = SelfAttention(model, block, ranks, rotary)
            self.attention_post_norm = norm(model, ranks) if after else None
        if block.ffn_hidden_size:
            self.mlp_norm = norm(model, ranks) if before and not self.shares_norm else None
            if block.num_experts:
                self.mlp = ExpertLayer(model, block, ranks, expert_ranks)
            else:
                self.mlp = MLP(model, block, ranks, recompute_activation=recompute_cheap)
            self.mlp_post_norm = norm(model, ranks) if after else None

        self.has_experts = isinstance(self.mlp, ExpertLayer)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the output of the layer: [B, n, hidden]."""
        completed = not self._sums_at_once
        attended = None
        if self.attention is not None:
            hidden, inputs, recomputed = self._normed(self.attention_norm, hidden, past)
            attended = self.attention(inputs, past, recomputed, completed=completed)
            if self.attention_post_norm is not None:
                attended = self.attention_post_norm(attended)
        if self.mlp is None:
            return hidden if attended is None else self._sum(hidden, attended, DropoutSite.ATTENTION, past)
        if not self.shares_norm:
            before = None if self.parallel else attended
            hidden, inputs, recomputed = self._normed(self.mlp_norm, hidden, past, before)
        if self.has_experts:
            # Router, experts and shared experts read the output of the norm: it is kept once for all.
            widened = self.mlp(inputs if recomputed is None else recomputed(inputs), past)
        else:
            widened = self.mlp(inputs, recomputed, completed=completed)
        if self.mlp_post_norm is not None:
            widened = self.mlp_post_norm(widened)
        if not completed:
            projection, down = self.attention.projection, self.mlp.down
            widened = projection.complete(attended + widened, projection.bias, down.bias)
        elif self.parallel and attended is not None:
            hidden = self._sum(hidden, attended, DropoutSite.ATTENTION, past)
        return self._sum(hidden, widened, DropoutSite.MLP, past)

    @property
    def _sums_at_once(self) -> bool:
        """Whether ranks sum their parts of attention and MLP in one reduction."""
        has_both = self.attention is not None and self.mlp is not None
        masked = self.training and self.dropout > 0
        return self.parallel and has_both and self.ranks.size > 1 and not masked and not self.has_experts

    def _normed(
        self, norm: nn.Module | None, hidden: Tensor, past: Past, attended: Tensor | None = None
    ) -> tuple[Tensor, Tensor, nn.Module | None]:
        """The residual with the output of attention, the inputs of a layer, and the norm that it has to recompute."""
        masked = self.training and self.dropout > 0
        if attended is not None and (masked or norm is None or self.recompute_cheap):
            hidden, attended = self._sum(hidden, attended, DropoutSite.ATTENTION, past), None
        if norm is None or self.recompute_cheap:
            return hidden, hidden, norm
        return *norm(Sum(hidden, attended, self.multiplier)), None

    def _sum(self, hidden: Tensor, output: Tensor, site: DropoutSite, past: Past) -> Tensor:
        """The residual plus the output of attention or MLP."""
        dropout = self.dropout if self.training else 0.0
        return residual_dropout(output, dropout, site, past, self.ranks, hidden, self.multiplier)
