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
        """[..., ffn] in, the same out; for `swiglu` the gate and then what it gates, [..., 2 ffn] in."""
        return _FUNCTIONS[self.name](inputs)


def _squared_relu(inputs: Tensor) -> Tensor:
    """So et al., Primer, arXiv 2109.08668."""
    return F.relu(inputs).square()


class _SwiGLU(torch.autograd.Function):
    """`silu(gate) * up` (Shazeer, arXiv 2002.05202); keeps its inputs alone, and not silu(gate) as autograd would."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return _swiglu(inputs)

    @staticmethod
    def backward(ctx, output_gradient):
        return _swiglu_backward(output_gradient, *ctx.saved_tensors)


@Pointwise
def _swiglu(inputs: Tensor) -> Tensor:
    gate, up = inputs.chunk(2, dim=-1)
    return F.silu(gate) * up


@Pointwise
def _swiglu_backward(output_gradient: Tensor, inputs: Tensor) -> Tensor:
    gate, up = inputs.chunk(2, dim=-1)
    gradient = torch.empty_like(inputs)
    of_gate, of_up = gradient.chunk(2, dim=-1)
    of_up.copy_(F.silu(gate).mul_(output_gradient))
    of_gate.copy_(torch.ops.aten.silu_backward(output_gradient * up, gate))
    return gradient


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu-exact": F.gelu,
    "relu": F.relu,
    "squared-relu": _squared_relu,
    "swiglu": _SwiGLU.apply,
}
