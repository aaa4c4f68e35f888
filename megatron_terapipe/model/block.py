"""One transformer layer.

Activation functions, the MLP, dropout on the residual stream, then the block of attention and MLP.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.pointwise import Pointwise
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.model.attention import Past, SelfAttention
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.norm import NORMS, Sum
from megatron_terapipe.model.rotary import RotaryTable
from megatron_terapipe.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelRanks


class Activation(nn.Module):
    """An activation by its name in the model section. It has no weights; a module so that it can be recomputed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., ffn] in, the same out; with a gate, the gate and then the gated half, [..., 2 ffn] in."""
        return _FUNCTIONS[self.name](inputs)


class _Gated(torch.autograd.Function):
    """`gate function(gate) * up` (Shazeer, arXiv 2002.05202); keeps only its inputs, while autograd would keep more."""

    @staticmethod
    def forward(ctx, inputs, gate_function: str):
        ctx.save_for_backward(inputs)
        ctx.gate_function = gate_function
        return _gated(inputs, gate_function)

    @staticmethod
    def backward(ctx, output_gradient):
        return _gated_backward(output_gradient, *ctx.saved_tensors, ctx.gate_function), None


@Pointwise
def _gated(inputs: Tensor, gate_function: str) -> Tensor:
    gate, up = inputs.chunk(2, dim=-1)
    return _gate_output(gate, gate_function) * up


@Pointwise
def _gated_backward(output_gradient: Tensor, inputs: Tensor, gate_function: str) -> Tensor:
    gate, up = inputs.chunk(2, dim=-1)
    gradient = torch.empty_like(inputs)
    of_gate, of_up = gradient.chunk(2, dim=-1)
    of_up.copy_(_gate_output(gate, gate_function).mul_(output_gradient))
    of_gate.copy_(_gate_gradient(output_gradient * up, gate, gate_function))
    return gradient


def _gate_output(gate: Tensor, gate_function: str) -> Tensor:
    return F.silu(gate) if gate_function == "silu" else F.gelu(gate, approximate=gate_function)


def _gate_gradient(output_gradient: Tensor, gate: Tensor, gate_function: str) -> Tensor:
    if gate_function == "silu":
        return torch.ops.aten.silu_backward(output_gradient, gate)
    return torch.ops.aten.gelu_backward(output_gradient, gate, approximate=gate_function)


def _with_gate(gate_function: str) -> Callable[[Tensor], Tensor]:
    """Return an activation with a gate: `silu`, or the form of GELU, `tanh` or `none`."""
    return lambda inputs: _Gated.apply(inputs, gate_function)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu-exact": F.gelu,
    "relu": F.relu,
    "squared-relu": lambda inputs: F.relu(inputs).square(),  # So et al., Primer, arXiv 2109.08668
    "swiglu": _with_gate("silu"),
    "geglu": _with_gate("tanh"),
    "geglu-exact": _with_gate("none"),
}


class MLP(nn.Module):
    """Up, activation, down. With a gate, its matrix and the gated one are one parameter [2, ffn, hidden].

    Args:
        recompute_activation: compute the output of the activation again in the backward instead of keeping it.
    """

    def __init__(
        self, model: ModelConfig, block: BlockShape, ranks: TensorParallelRanks, *, recompute_activation: bool = False
    ) -> None:
        super().__init__()
        self.recompute_activation = recompute_activation
        width, bias = block.ffn_hidden_size, model.has_mlp_bias
        self.up = ColumnParallelLinear(
            model.hidden_size, (2, width) if model.gated else width, ranks, normal(model.init_method_std), bias=bias
        )
        self.activation = Activation(model.activation)
        self.down = RowParallelLinear(width, model.hidden_size, ranks, normal(model.output_layer_init_std), bias=bias)

    def forward(self, hidden: Tensor, recomputed: nn.Module | None = None, *, completed: bool = True) -> Tensor:
        """Return the output [B, n, hidden] for the tokens that this rank has between the matrices.

        Args:
            recomputed: the norm before, if its output is computed again in the backward instead of kept.
            completed: whether ranks sum their parts; if not, this is the part [B, N, hidden] of this rank.
        """
        widened = self.up(hidden, recomputed)
        if self.recompute_activation:
            return self.down(widened, self.activation, completed=completed)
        return self.down(self.activation(widened), completed=completed)


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
    """Attention and MLP with their norms, added to the residual; either may be left out.

        pre         h += A(N(h));     h += M(N(h))          norms of inputs
        post        h += N(A(h));     h += N(M(h))          norms of outputs
        both        h += N(A(N(h)));  h += N(M(N(h)))
        parallel    h += A(N(h)) + M(N(h))                  both norms of one input, or one norm for both

    In the last form tensor-parallel ranks sum their parts of both at once, unless each has a mask of dropout.

    Args:
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
        before, after = model.norm_placement != "post", model.norm_placement != "pre"
        self.attention = self.mlp = None
        self.attention_norm = self.attention_post_norm = self.mlp_norm = self.mlp_post_norm = None
        if block.num_key_value_heads:
            self.attention_norm = norm(model, ranks) if before else None
            self.attention = SelfAttention(model, block, ranks, rotary)
            self.attention_post_norm = norm(model, ranks) if after else None
        if block.ffn_hidden_size:
            self.mlp_norm = norm(model, ranks) if before and not self.shares_norm else None
            self.mlp = MLP(model, block, ranks, recompute_activation=recompute_cheap)
            self.mlp_post_norm = norm(model, ranks) if after else None

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
        return self.parallel and has_both and self.ranks.size > 1 and not masked

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
