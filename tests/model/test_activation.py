"""Activations by name against formulas written out."""

from collections.abc import Callable
from math import pi, sqrt
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.block import Activation

WRITTEN_OUT = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),
    "gelu-exact": lambda x: 0.5 * x * (1 + torch.erf(x / sqrt(2))),
    "relu": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "squared-relu": lambda x: torch.where(x > 0, x * x, 0.0),
}
"""From the whole input."""
GATES = {
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": WRITTEN_OUT["gelu"],
    "geglu-exact": WRITTEN_OUT["gelu-exact"],
}
"""From the gate, the first half of the input."""


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


WRITTEN_OUT |= {name: _gated(function) for name, function in GATES.items()}


def inputs_of(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(2, 5, 16, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def test_every_activation_of_the_model_section_is_tested() -> None:
    assert set(get_args(get_type_hints(ModelConfig)["activation"])) == set(WRITTEN_OUT)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_values_and_gradients(name: str) -> None:
    inputs = inputs_of()
    found, expected = Activation(name)(inputs), WRITTEN_OUT[name](inputs)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    coefficients = torch.linspace(-1, 2, found.numel(), dtype=torch.float64).view_as(found)
    of_found, of_expected = (torch.autograd.grad((each * coefficients).sum(), inputs) for each in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_gradients_are_those_of_the_values(name: str) -> None:
    assert torch.autograd.gradcheck(Activation(name), inputs_of())


@pytest.mark.parametrize("name", GATES)
def test_the_gradient_behind_a_gate_where_the_input_is_a_view(name: str) -> None:
    columns_first = inputs_of().detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not columns_first.is_contiguous()
    assert torch.autograd.gradcheck(Activation(name), columns_first)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_bf16_stays_bf16(name: str) -> None:
    inputs = inputs_of(torch.bfloat16)
    output = Activation(name)(inputs)
    output.sum().backward()
    assert output.dtype is inputs.grad.dtype is torch.bfloat16
    # Two roundings of the value, of relative size 2^-8 or less each, and one of what it multiplies.
    torch.testing.assert_close(output.double(), WRITTEN_OUT[name](inputs.double()), rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("name", GATES)
def test_a_gate_keeps_its_input_alone(name: str) -> None:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda tensor: tensor):
        inputs = inputs_of()
        Activation(name)(inputs)
    assert [each.data_ptr() for each in kept] == [inputs.data_ptr()]
