"""Activation functions between the two matrices of an MLP."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.pointwise import Pointwise


class Activation(nn.Module):
    """An activation by its name in the model section. It has no weights; a module so that it can be recomputed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., ffn] in, the same out; with a gate, the gate and then what it gates, [..., 2 ffn] in."""
        return _FUNCTIONS[self.name](inputs)


def _squared_relu(inputs: Tensor) -> Tensor:
    """So et al., Primer, arXiv 2109.08668."""
    return F.relu(inputs).square()


class _Gated(torch.autograd.Function):
    """`gate function(gate) * up` (Shazeer, arXiv 2002.05202); keeps its inputs alone, as autograd would not."""

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
    return _opened(gate, gate_function) * up


@Pointwise
def _gated_backward(output_gradient: Tensor, inputs: Tensor, gate_function: str) -> Tensor:
    gate, up = inputs.chunk(2, dim=-1)
    gradient = torch.empty_like(inputs)
    of_gate, of_up = gradient.chunk(2, dim=-1)
    of_up.copy_(_opened(gate, gate_function).mul_(output_gradient))
    of_gate.copy_(_gate_gradient(output_gradient * up, gate, gate_function))
    return gradient


def _opened(gate: Tensor, gate_function: str) -> Tensor:
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
    "squared-relu": _squared_relu,
    "swiglu": _with_gate("silu"),
    "geglu": _with_gate("tanh"),
    "geglu-exact": _with_gate("none"),
}
