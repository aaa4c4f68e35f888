"""A product that recomputes the layer before it in the backward: the same bits.

`test_activation_bytes.py` counts what is kept.
"""

import pytest
import torch
from torch import Tensor, nn

from megatron_terapipe.model import tensor_parallel
from megatron_terapipe.model.mlp import Activation
from megatron_terapipe.model.norm import LayerNorm, RMSNorm
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import model_config

WIDTH = 12
ALONE = TensorParallelRanks()
BEFORE = {
    "layernorm": lambda: LayerNorm(model_config(hidden_size=WIDTH), ALONE),
    "rmsnorm": lambda: RMSNorm(model_config(hidden_size=WIDTH), ALONE),
    **{name: lambda name=name: Activation(name) for name in ("gelu", "relu", "squared-relu", "swiglu")},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def inputs_of(name: str, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return drawn(2, 5, 2 * WIDTH if name == "swiglu" else WIDTH, seed=seed, dtype=dtype)


def layers_of(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    before = BEFORE[name]().to(dtype)
    for seed, parameter in enumerate(before.parameters()):
        parameter.data = drawn(WIDTH, seed=20 + seed, dtype=dtype).detach()
    return before, drawn(8, WIDTH, seed=1, dtype=dtype), drawn(8, seed=2, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BEFORE)
def test_outputs_and_gradients_are_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Over four backwards, of which all but the first add to the weight's gradient in place."""
    seen = []
    for recompute in (False, True):
        before, weight, bias = layers_of(name, dtype)
        results = []
        for step in range(4):
            inputs = inputs_of(name, 30 + step, dtype)
            if recompute:
                output = tensor_parallel.linear(inputs, weight, bias, before=before)
            else:
                output = tensor_parallel.linear(before(inputs), weight, bias)
            output.square().sum().backward()
            parameters = [weight, bias, *before.parameters()]
            results += [output.detach(), inputs.grad, *(each.grad.clone() for each in parameters)]
        seen.append(results)
    for kept, recomputed in zip(*seen, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_norm_weights_get_gradients_where_their_input_needs_none(name: str) -> None:
    """As in a first layer after frozen embeddings."""
    before, weight, bias = layers_of(name)
    inputs, parameters = inputs_of(name, 3).detach(), list(before.parameters())
    found = tensor_parallel.linear(inputs, weight, bias, before=before)
    of_found = torch.autograd.grad(found.square().sum(), [weight, *parameters])
    of_expected = torch.autograd.grad((before(inputs) @ weight.T + bias).square().sum(), [weight, *parameters])
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_norm_weights_get_no_gradient_and_stop_no_other(frozen: int) -> None:
    before, weight, bias = layers_of("layernorm")
    inputs = inputs_of("layernorm", 3)
    for parameter in list(before.parameters())[:frozen]:
        parameter.requires_grad_(False)
    tensor_parallel.linear(inputs, weight, bias, before=before).square().sum().backward()
    expected = inputs.detach().requires_grad_()
    (before(expected) @ weight.detach().T + bias.detach()).square().sum().backward()
    torch.testing.assert_close(inputs.grad, expected.grad, rtol=1e-12, atol=1e-12)
    for index, parameter in enumerate(before.parameters()):
        assert (parameter.grad is None) == (index < frozen)


def test_a_frozen_product_passes_the_gradient_on() -> None:
    before, weight, bias = layers_of("rmsnorm")
    inputs = inputs_of("rmsnorm", 3)
    tensor_parallel.linear(inputs, weight.detach(), bias.detach(), before=before).square().sum().backward()
    found = inputs.grad, before.weight.grad
    expected = torch.autograd.grad((before(inputs) @ weight.T + bias).square().sum(), [inputs, before.weight])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert weight.grad is None
