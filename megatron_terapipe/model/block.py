"""One transformer layer."""

from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.model.block_shape import BlockShape
from megatron_terapipe.model.attention import Past, SelfAttention
from megatron_terapipe.model.dropout import DropoutSite, residual_dropout
from megatron_terapipe.model.mlp import MLP
from megatron_terapipe.model.norm import NORMS
from megatron_terapipe.model.rotary import RotaryTable
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks


class TransformerBlock(nn.Module):
    """Attention and MLP with their norms, added to the residual; either may be left out.

        pre         h += A(N(h));     h += M(N(h))          norms of inputs
        post        h += N(A(h));     h += N(M(h))          norms of outputs
        both        h += N(A(N(h)));  h += N(M(N(h)))
        parallel    h += A(N(h)) + M(N(h))                  both norms of one input, or one norm for both

    In the last form tensor-parallel ranks sum their parts of both at once, unless each has a mask of dropout.

    Args:
        ranks: ranks that share its matrices.
        recompute_cheap: compute the outputs of norms and activation again in the backward instead of keeping them.
        rotary: the table of this layer's rotation, which layers of this rank share; None for one of its own.
    """

    def __init__(
        self,
        model: ModelConfig,
        block: BlockShape,
        ranks: TensorParallelRanks,
        *,
        recompute_cheap: bool = False,
        rotary: RotaryTable | None = None,
    ) -> None:
        super().__init__()
        self.ranks, self.recompute_cheap = ranks, recompute_cheap
        self.dropout, self.multiplier = model.hidden_dropout, model.residual_multiplier
        has_both = bool(block.num_key_value_heads and block.ffn_hidden_size)
        self.parallel, self.shares_norm = model.parallel_residual, model.shared_block_norm and has_both
        norm = NORMS[model.normalization]
        before, behind = model.norm_placement != "post", model.norm_placement != "pre"
        self.attention = self.mlp = None
        self.attention_norm = self.attention_post_norm = self.mlp_norm = self.mlp_post_norm = None
        if block.num_key_value_heads:
            self.attention_norm = norm(model, ranks) if before else None
            self.attention = SelfAttention(model, block, ranks, rotary)
            self.attention_post_norm = norm(model, ranks) if behind else None
        if block.ffn_hidden_size:
            self.mlp_norm = norm(model, ranks) if before and not self.shares_norm else None
            self.mlp = MLP(model, block, ranks, recompute_activation=recompute_cheap)
            self.mlp_post_norm = norm(model, ranks) if behind else None

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the output of the layer: [B, n, hidden].

        Args:
            hidden: [B, n, hidden] of the tokens that this rank has between the matrices.
        """
        entering, attention_norm = hidden, self.attention_norm
        mlp_norm = self.attention_norm if self.shares_norm else self.mlp_norm
        if self.shares_norm and not self.recompute_cheap:
            # Computed once, and kept once.
            entering, attention_norm, mlp_norm = attention_norm(hidden), None, None
        if self._sums_at_once:
            parts = self._behind(attention_norm, self.attention, entering, past, completed=False)
            parts = parts + self._behind(mlp_norm, self.mlp, entering, completed=False)
            projection, down = self.attention.projection, self.mlp.down
            both = projection.complete(parts, projection.bias, down.bias)
            return residual_dropout(both, 0.0, DropoutSite.MLP, past, self.ranks, hidden, self.multiplier)
        if self.attention is not None:
            attended = self._behind(attention_norm, self.attention, entering, past)
            hidden = self._added(attended, self.attention_post_norm, DropoutSite.ATTENTION, past, hidden)
        if self.mlp is not None:
            widened = self._behind(mlp_norm, self.mlp, entering if self.parallel else hidden)
            hidden = self._added(widened, self.mlp_post_norm, DropoutSite.MLP, past, hidden)
        return hidden

    @property
    def _sums_at_once(self) -> bool:
        """Whether ranks sum their parts of attention and MLP in one reduction."""
        has_both = self.attention is not None and self.mlp is not None
        masked = self.training and self.dropout > 0
        return self.parallel and has_both and self.ranks.size > 1 and not masked

    def _behind(
        self, norm: nn.Module | None, layer: nn.Module, inputs: Tensor, *more: Past, completed: bool = True
    ) -> Tensor:
        """The output of attention or MLP behind its norm, whose own output is kept or computed again."""
        if norm is not None and self.recompute_cheap:
            return layer(inputs, *more, recomputed=norm, completed=completed)
        return layer(inputs if norm is None else norm(inputs), *more, completed=completed)

    def _added(self, output: Tensor, norm: nn.Module | None, site: DropoutSite, past: Past, residual: Tensor) -> Tensor:
        """The residual plus the output of attention or MLP, behind the norm after it."""
        output = output if norm is None else norm(output)
        dropout = self.dropout if self.training else 0.0
        return residual_dropout(output, dropout, site, past, self.ranks, residual, self.multiplier)
