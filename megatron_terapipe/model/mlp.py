"""Activation functions, and the MLP of a transformer layer."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.pointwise import Pointwise
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelRanks


class Activation(nn.Module):
    """The activation of a model. It has no weights; a module so that it can be recomputed."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.name, self.gate = model.activation, gate_of(model)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., ffn] in, the same out; with a gate, the gate and then the gated half, [..., 2 ffn] in."""
        return _FUNCTIONS[self.name](inputs) if self.gate is None else _Gated.apply(inputs, self.gate)


class Gate(NamedTuple):
    """A gate: function(min(gate, limit)) * (clamp(up, -limit, limit) + offset)."""

    function: str
    """`silu`, `quick-gelu`, or the form of GELU."""
    limit: float | None = None
    offset: float = 0.0


def gate_of(model: ModelConfig) -> Gate | None:
    """Return the gate of a model's MLPs; None if they have none."""
    function = _GATE_FUNCTIONS.get(model.activation)
    return None if function is None else Gate(function, model.activation_func_clamp_value, model.glu_linear_offset)


class _Gated(torch.autograd.Function):
    """A gate times the gated half (Shazeer, arXiv 2002.05202); keeps its inputs, where autograd would keep more."""

    @staticmethod
    def forward(ctx, inputs, kind: Gate):
        ctx.save_for_backward(inputs)
        ctx.kind = kind
        return _gated(inputs, kind)

    @staticmethod
    def backward(ctx, output_gradient):
        return _gated_backward(output_gradient, *ctx.saved_tensors, ctx.kind), None


@Pointwise
def _gated(inputs: Tensor, kind: Gate) -> Tensor:
    gate, up = _halves(inputs, kind)
    return _gate_output(gate, kind) * up


@Pointwise
def _gated_backward(output_gradient: Tensor, inputs: Tensor, kind: Gate) -> Tensor:
    gate, up = _halves(inputs, kind)
    gradient = torch.empty_like(inputs)
    of_gate, of_up = gradient.chunk(2, dim=-1)
    of_up.copy_(_gate_output(gate, kind).mul_(output_gradient))
    of_gate.copy_(_gate_gradient(output_gradient * up, gate, kind))
    return _through_clamps(gradient, inputs, kind)


def _halves(inputs: Tensor, kind: Gate) -> tuple[Tensor, Tensor]:
    """The clamped gate, and the clamped other half with its offset."""
    gate, up = inputs.chunk(2, dim=-1)
    if kind.limit is not None:
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return gate, up + kind.offset if kind.offset else up


def _through_clamps(gradient: Tensor, inputs: Tensor, kind: Gate) -> Tensor:
    """The gradient of the inputs [..., 2 ffn], in place of the gradient of the clamped halves."""
    if kind.limit is not None:
        (gate, up), (of_gate, of_up) = inputs.chunk(2, dim=-1), gradient.chunk(2, dim=-1)
        of_gate.masked_fill_(gate > kind.limit, 0)
        of_up.masked_fill_(up.abs() > kind.limit, 0)
    return gradient


_QUICK = 1.702
"""Slope of the sigmoid of the quick form of GELU (Hendrycks and Gimpel, arXiv 1606.08415 section 2)."""


def _gate_output(gate: Tensor, kind: Gate) -> Tensor:
    if kind.function == "silu":
        return F.silu(gate)
    if kind.function == "quick-gelu":
        return gate * (_QUICK * gate).sigmoid()
    return F.gelu(gate, approximate=kind.function)


def _gate_gradient(output_gradient: Tensor, gate: Tensor, kind: Gate) -> Tensor:
    if kind.function == "silu":
        return torch.ops.aten.silu_backward(output_gradient, gate)
    if kind.function == "quick-gelu":
        return torch.ops.aten.silu_backward(output_gradient, _QUICK * gate)
    return torch.ops.aten.gelu_backward(output_gradient, gate, approximate=kind.function)


class WeightedActivation:
    """An activation times a weight of each row; its backward computes the output again with the gradients.

    With a gate all of this is one pass over the rows where a compiler makes one kernel of it.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._gate, self._activation = gate_of(model), Activation(model)

    def __call__(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """Return [R, ffn] of inputs [R, ffn], [R, 2 ffn] with a gate, and weights [R]."""
        if self._gate is not None and not torch.is_grad_enabled():
            return _weighted_gated(inputs, weights, self._gate)
        activated = self._activation(inputs)
        return activated * weights.to(activated.dtype).unsqueeze(-1)

    def backward(self, output_gradient: Tensor, inputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output again, and the gradients of inputs and weights, for an output gradient [R, ffn]."""
        if self._gate is not None:
            return _weighted_gated_backward(output_gradient, inputs, weights, self._gate)
        with torch.enable_grad():
            inputs, weights = inputs.detach().requires_grad_(), weights.detach().requires_grad_()
            output = self(inputs, weights)
        return output.detach(), *torch.autograd.grad(output, (inputs, weights), output_gradient)


@Pointwise
def _weighted_gated(inputs: Tensor, weights: Tensor, kind: Gate) -> Tensor:
    gate, up = _halves(inputs, kind)
    return _gate_output(gate, kind).mul_(up).mul_(weights.to(inputs.dtype).unsqueeze(-1))


@Pointwise
def _weighted_gated_backward(
    output_gradient: Tensor, inputs: Tensor, weights: Tensor, kind: Gate
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = _halves(inputs, kind)
    factors = weights.to(inputs.dtype).unsqueeze(-1)
    activated = _gate_output(gate, kind)
    output = activated * up
    of_weights = torch.linalg.vecdot(output_gradient.to(weights.dtype), output.to(weights.dtype))
    output.mul_(factors)
    weighted = output_gradient * factors
    gradient = torch.empty_like(inputs)
    of_gate, of_up = gradient.chunk(2, dim=-1)
    of_up.copy_(activated.mul_(weighted))
    of_gate.copy_(_gate_gradient(weighted.mul_(up), gate, kind))
    return output, _through_clamps(gradient, inputs, kind), of_weights


_GATE_FUNCTIONS = {"swiglu": "silu", "geglu": "tanh", "geglu-exact": "none", "quick-geglu": "quick-gelu"}
"""The function of each activation with a gate."""

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu-exact": F.gelu,
    "relu": F.relu,
    "squared-relu": lambda inputs: F.relu(inputs).square(),  # So et al., Primer, arXiv 2109.08668
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
        self.activation = Activation(model)
        self.down = RowParallelLinear(width, model.hidden_size, ranks, normal(model.output_layer_init_std), bias=bias)

    def forward(self, hidden: Tensor, recomputed: nn.Module | None = None, *, completed: bool = True) -> Tensor:
        """Return the output [B, n, hidden] for the tokens that this rank has between the matrices.

        `recomputed` and `completed` are as in `RowParallelLinear`, of the norm before and of `down`.
        """
        widened = self.up(hidden, recomputed)
        if self.recompute_activation:
            return self.down(widened, self.activation, completed=completed)
        return self.down(self.activation(widened), completed=completed)
