"""Norms against torch's own."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatron_terapipe.model.norm import AllHeadsRMSNorm, LayerNorm, RMSNorm
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import model_config

MODEL = model_config(hidden_size=12, layernorm_epsilon=1e-3)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def norm_of(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    norm = kind(MODEL, TensorParallelRanks()).to(dtype)
    for seed, parameter in enumerate(norm.parameters(), start=10):
        parameter.data = drawn(12, seed=seed, dtype=dtype).detach()
    return norm


def torchs(norm: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    if isinstance(norm, LayerNorm):
        return F.layer_norm(hidden, (12,), norm.weight, norm.bias, 1e-3)
    return F.rms_norm(hidden, (12,), norm.weight, 1e-3)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=str)
def test_values_and_gradients_are_torchs(kind: type[nn.Module], dtype: torch.dtype, tolerance: float) -> None:
    norm, hidden, coefficients = norm_of(kind, dtype), drawn(2, 3, 12, dtype=dtype), drawn(2, 3, 12, seed=1)
    found, expected = norm(hidden), torchs(norm, hidden)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    inputs = [hidden, *norm.parameters()]
    of_found, of_expected = (
        torch.autograd.grad((output * coefficients.detach().to(dtype)).sum(), inputs) for output in (found, expected)
    )
    # Sums of at most twelve numbers of order 1.
    torch.testing.assert_close(of_found, of_expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_weights_less_1_are_the_same_norm(kind: type[nn.Module]) -> None:
    whole = norm_of(kind)
    less = kind(replace(MODEL, apply_layernorm_1p=True), TensorParallelRanks()).double()
    less.load_state_dict(whole.state_dict() | {"weight": whole.weight.detach() - 1})
    hidden, coefficients = drawn(2, 3, 12), drawn(2, 3, 12, seed=1).detach()
    outputs = whole(hidden), less(hidden)
    torch.testing.assert_close(*outputs, rtol=1e-13, atol=1e-13)
    gradients = [
        torch.autograd.grad((output * coefficients).sum(), [hidden, *norm.parameters()])
        for output, norm in zip(outputs, (whole, less), strict=True)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_in_bf16_a_weight_less_1_keeps_digits_that_1_would_swallow() -> None:
    norm = RMSNorm(replace(MODEL, apply_layernorm_1p=True, layernorm_epsilon=1e-12), TensorParallelRanks())
    norm = norm.to(torch.bfloat16)
    norm.weight.data.fill_(2**-10)
    hidden = torch.full((1, 1, 12), 255.0, dtype=torch.bfloat16)
    hidden[..., ::2] *= -1
    assert torch.equal(norm(hidden), hidden / 255)  # 1 + 2^-10 is rounded once, at the end
    norm.weight.data.fill_(2**-7 - 2**-12)
    assert torch.all(norm(hidden).abs() == 1 + 2**-7)


@pytest.mark.parametrize("one_plus", [False, True])
def test_a_norm_over_all_heads_is_one_over_their_channels(one_plus: bool) -> None:
    norm = AllHeadsRMSNorm(
        replace(MODEL, kv_channels=3, apply_layernorm_1p=one_plus), TensorParallelRanks(), 4
    ).double()
    assert torch.all(norm.weight == (0 if one_plus else 1))
    norm.weight.data = drawn(12, seed=3).detach()
    heads = drawn(2, 5, 4, 3)
    weight = norm.weight + one_plus
    expected = F.rms_norm(heads.flatten(-2), (12,), weight, 1e-3).view_as(heads)
    torch.testing.assert_close(norm(heads), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_in_bf16_the_mean_is_taken_in_fp32(kind: type[nn.Module]) -> None:
    """Each result is off by the roundings of its few last steps, however wide the hidden state."""
    model = model_config(hidden_size=4096)
    norm = kind(model, TensorParallelRanks()).to(torch.bfloat16)
    hidden = drawn(2, 4096, dtype=torch.bfloat16)
    exact = kind(model, TensorParallelRanks()).double()(hidden.double())
    found = norm(hidden)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-9)
    found.sum().backward()
    assert norm.weight.grad.dtype is torch.bfloat16


def test_rmsnorm_of_fp16_squares_in_fp32() -> None:
    norm = norm_of(RMSNorm, torch.float16)
    hidden = torch.full((1, 1, 12), 1000.0, dtype=torch.float16)  # its square is no fp16
    torch.testing.assert_close(norm(hidden)[0, 0], norm.weight, rtol=2**-10, atol=0)
