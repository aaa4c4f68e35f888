"""One transformer layer."""

from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.block_shape import BlockShape
from megatron_terapipe.model.attention import Past, SelfAttention
from megatron_terapipe.model.dropout import DropoutSite, residual_dropout
from megatron_terapipe.model.mlp import MLP
from megatron_terapipe.model.norm import NORMS
from megatron_terapipe.model.rotary import RotaryTable
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks


class TransformerBlock(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual; either may be left out.

    Args:
        model: the model section.
        block: shape of the layer.
        ranks: ranks that share its matrices.
        recompute_cheap: compute the outputs of norms and activation again in the backward instead of keeping them.
        rotary: the table that all layers of this rank share, where positions are rotary; None for one of its own.
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
        self.dropout = model.hidden_dropout
        self.attention = self.mlp = None
        norm = NORMS[model.normalization]
        if block.num_key_value_heads:
            self.attention_norm = norm(model, ranks)
            self.attention = SelfAttention(model, block, ranks, rotary)
        if block.ffn_hidden_size:
            self.mlp_norm = norm(model, ranks)
            self.mlp = MLP(model, block, ranks)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the output of the layer: [B, n, hidden].

        Args:
            hidden: [B, n, hidden] of the tokens that this rank has between the matrices.
            past: the tokens before.
        """
        dropout = self.dropout if self.training else 0.0
        if self.attention is not None:
            attended = (
                self.attention(hidden, past, self.attention_norm)
                if self.recompute_cheap
                else self.attention(self.attention_norm(hidden), past)
            )
            hidden = residual_dropout(attended, dropout, DropoutSite.ATTENTION, past, self.ranks, residual=hidden)
        if self.mlp is not None:
            widened = self.mlp(hidden, self.mlp_norm) if self.recompute_cheap else self.mlp(self.mlp_norm(hidden))
            hidden = residual_dropout(widened, dropout, DropoutSite.MLP, past, self.ranks, residual=hidden)
        return hidden
