"""Activation functions, and the MLP of a transformer layer."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.pointwise import Pointwise
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelRanks


class Activation(nn.Module):
    """An activation by its name in the model section. It has no weights; a module so that it can be recomputed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., ffn] in, the same out; with a gate, the gate and then the gated half, [..., 2 ffn] in."""
        gate_function = _GATE_FUNCTIONS.get(self.name)
        return _FUNCTIONS[self.name](inputs) if gate_function is None else _Gated.apply(inputs, gate_function)


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


class WeightedActivation:
    """An activation times a weight of each row; its backward computes the output again with the gradients.

    With a gate all of this is one pass over the rows where a compiler makes one kernel of it.
    """

    def __init__(self, name: str) -> None:
        self._gate_function = _GATE_FUNCTIONS.get(name)
        self._activation = Activation(name)

    def __call__(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """Return [R, ffn] of inputs [R, ffn], [R, 2 ffn] with a gate, and weights [R]."""
        if self._gate_function is not None and not torch.is_grad_enabled():
            return _weighted_gated(inputs, weights, self._gate_function)
        activated = self._activation(inputs)
        return activated * weights.to(activated.dtype).unsqueeze(-1)

    def backward(self, output_gradient: Tensor, inputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output again, and the gradients of inputs and weights, for an output gradient [R, ffn]."""
        if self._gate_function is not None:
            return _weighted_gated_backward(output_gradient, inputs, weights, self._gate_function)
        with torch.enable_grad():
            inputs, weights = inputs.detach().requires_grad_(), weights.detach().requires_grad_()
            output = self(inputs, weights)
        return output.detach(), *torch.autograd.grad(output, (inputs, weights), output_gradient)


@Pointwise
def _weighted_gated(inputs: Tensor, weights: Tensor, gate_function: str) -> Tensor:
    gate, up = inputs.chunk(2, dim=-1)
    return _gate_output(gate, gate_function).mul_(up).mul_(weights.to(inputs.dtype).unsqueeze(-1))


@Pointwise
def _weighted_gated_backward(
    output_gradient: Tensor, inputs: Tensor, weights: Tensor, gate_function: str
) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = inputs.chunk(2, dim=-1)
    factors = weights.to(inputs.dtype).unsqueeze(-1)
    activated = _gate_output(gate, gate_function)
    output = activated * up
    of_weights = torch.linalg.vecdot(output_gradient.to(weights.dtype), output.to(weights.dtype))
    output.mul_(factors)
    weighted = output_gradient * factors
    gradient = torch.empty_like(inputs)
    of_gate, of_up = gradient.chunk(2, dim=-1)
    of_up.copy_(activated.mul_(weighted))
    of_gate.copy_(_gate_gradient(weighted.mul_(up), gate, gate_function))
    return output, gradient, of_weights


_GATE_FUNCTIONS = {"swiglu": "silu", "geglu": "tanh", "geglu-exact": "none"}
"""The function of each activation with a gate: `silu`, or the form of GELU."""

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
        self.activation = Activation(model.activation)
        self.down = RowParallelLinear(width, model.hidden_size, ranks, normal(model.output_layer_init_std), bias=bias)

    def forward(self, hidden: Tensor, recomputed: nn.Module | None = None, *, completed: bool = True) -> Tensor:
        """Return the output [B, n, hidden] for the tokens that this rank has between the matrices.

        `recomputed` and `completed` are as in `RowParallelLinear`, of the norm before and of `down`.
        """
        widened = self.up(hidden, recomputed)
        if self.recompute_activation:
            return self.down(widened, self.activation, completed=completed)
        return self.down(self.activation(widened), completed=completed)
