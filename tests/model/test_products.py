"""Gradients accumulated in place against plain autograd."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_terapipe.model import tensor_parallel

TOKENS = torch.tensor([[0, 3, 3, 1, 7], [2, 3, 0, 0, 6]])


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, operator, types, positional=(), keywords=None):
        result = operator(*positional, **(keywords or {}))
        self.seen.append((operator.__name__, tuple(result.shape) if torch.is_tensor(result) else ()))
        return result


@contextmanager
def operators() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Names and result shapes of the operators that run inside."""
    with _Operators() as mode:
        yield mode.seen


def parameters(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 5, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(8, generator=generator, dtype=torch.float64).to(dtype)
    return weight.requires_grad_(), bias.requires_grad_()


def inputs_of(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(step + 1)
    return torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_are_those_of_autograd(with_bias: bool) -> None:
    """Of a weight that is both embedding and output, and so gets two gradients in every backward."""
    given, plain = (parameters() for _ in range(2))
    results = []
    for (weight, bias), look_up, multiply in (
        (given, tensor_parallel.embedding, tensor_parallel.linear),
        (plain, F.embedding, F.linear),
    ):
        seen = []
        for step in range(4):
            inputs = inputs_of(step)
            output = multiply(inputs + look_up((TOKENS[:, :3] + step) % 8, weight), weight, bias if with_bias else None)
            output.square().sum().backward()
            seen += [output.detach(), inputs.grad, weight.grad.clone()]
        results.append([*seen, *([bias.grad] if with_bias else [])])
        assert (bias.grad is None) != with_bias
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


CASES = {
    "linear": (lambda weight: tensor_parallel.linear(inputs_of(0), weight), "addmm_"),
    "embedding": (lambda weight: tensor_parallel.embedding(TOKENS, weight), "index_add_"),
}


@pytest.mark.parametrize(("compute", "in_place"), CASES.values(), ids=CASES)
def test_only_the_first_gradient_is_a_new_tensor(compute: Callable[[Tensor], Tensor], in_place: str) -> None:
    """From the second on, no operator makes a tensor of the weight's shape but the addition to `weight.grad`."""
    weight, _ = parameters()

    def of_weight_shape() -> list[str]:
        output = compute(weight).sum()
        with operators() as seen:
            output.backward()
        return [name.split(".")[0] for name, shape in seen if shape == tuple(weight.shape)]

    assert of_weight_shape() != [in_place]
    first = weight.grad
    once = first.clone()
    assert of_weight_shape() == [in_place]
    assert weight.grad is first
    torch.testing.assert_close(weight.grad, 2 * once)


@pytest.mark.parametrize("compute", [compute for compute, _ in CASES.values()], ids=CASES)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_get_each_gradient(compute: Callable[[Tensor], Tensor], register: str) -> None:
    """ZeRO does: it takes every gradient away as it comes."""
    weight, _ = parameters()
    compute(weight).sum().backward()
    once = weight.grad.clone()
    calls: list[Tensor] = []
    handle = getattr(weight, register)(
        lambda given: calls.append((given if given.grad is None else given.grad).clone())
    )
    compute(weight).sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(calls[0], once if register == "register_hook" else 2 * once)
    torch.testing.assert_close(weight.grad, 2 * once)
    handle.remove()
    compute(weight).sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(weight.grad, 3 * once)


@pytest.mark.parametrize("compute", [compute for compute, _ in CASES.values()], ids=CASES)
def test_a_weight_that_is_computed_passes_its_gradient_on(compute: Callable[[Tensor], Tensor]) -> None:
    weight, _ = parameters()
    compute(weight).sum().backward()
    once, weight.grad = weight.grad, None
    for _ in range(2):
        compute(weight * 2).sum().backward()
    torch.testing.assert_close(weight.grad, 4 * once)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_keep_the_type_of_the_weight(dtype: torch.dtype) -> None:
    weight, bias = parameters(dtype)
    for step in range(2):
        tensor_parallel.linear(inputs_of(step, dtype), weight, bias).sum().backward()
        assert weight.grad.dtype is dtype
        assert bias.grad.dtype is dtype
