"""Deferred weight gradients: the same bits as a whole backward, for ordinary layers."""

import copy
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.runtime.gradients.weight_gradients import Product, WeightGradients, compute, linear

ROWS, TOKENS, WIDTH = 2, 3, 8


class Layer(nn.Module):
    """Ordinary layers: linear ones, a norm, an embedding, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Parameter(torch.randn(11, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        hidden = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        return linear(hidden, self.head)


def layer(dtype: torch.dtype = torch.float64) -> Layer:
    torch.manual_seed(0)
    return Layer().to(dtype)


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 11, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}


def attached(module: nn.Module) -> WeightGradients:
    weight_gradients = WeightGradients()
    weight_gradients.attach(module)
    return weight_gradients


def deferred_by(module: nn.Module, weight_gradients: WeightGradients, step: int) -> list[Product]:
    loss = module(tokens_of(step)).logsumexp(-1).sum()
    with weight_gradients.deferring() as deferred:
        loss.backward()
    return deferred


def train(module: nn.Module, steps: int) -> None:
    for step in range(steps):
        module(tokens_of(step)).logsumexp(-1).sum().backward()


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    assert gradients(found).keys() == gradients(expected).keys()
    for name, gradient in gradients(expected).items():
        assert torch.equal(found.get_parameter(name).grad, gradient), name


@pytest.mark.parametrize("way", ["all deferred", "in turns", "repeated forward"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_deferred_products_have_the_bits_of_whole_backwards(dtype: torch.dtype, way: str) -> None:
    whole, apart = layer(dtype), layer(dtype)
    train(whole, 3)
    weight_gradients, waiting = attached(apart), []
    for step in range(3):
        if way == "in turns" and step % 2:
            apart(tokens_of(step)).logsumexp(-1).sum().backward()
            continue
        repeated = way == "repeated forward"
        output = checkpoint(apart, tokens_of(step), use_reentrant=False) if repeated else apart(tokens_of(step))
        with weight_gradients.deferring() as deferred:
            output.logsumexp(-1).sum().backward()
        assert len(deferred) == 3
        waiting.append(deferred)
        if way == "in turns":
            compute(deferred)
    for deferred in waiting:
        compute(deferred)
        assert deferred == []
    assert_equal(apart, whole)


def test_input_gradients_add_no_gradients_of_products() -> None:
    module = layer()
    deferred_by(module, attached(module), 0)
    assert gradients(module).keys() == {"words.weight", "up.bias", "norm.weight", "norm.bias"}


def test_between_the_parts_a_product_keeps_its_input_and_the_gradient_of_its_output() -> None:
    module = nn.Linear(WIDTH, 4 * WIDTH)
    weight_gradients = attached(module)
    inputs = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)
    widened = module(inputs)
    squared = widened.square()
    gone = weakref.ref(widened)  # kept by the square
    del widened
    assert gone() is not None
    with weight_gradients.deferring() as deferred:
        squared.sum().backward()
    del squared
    assert gone() is None
    kept = {each.data_ptr(): each.numel() for each in tensors_kept_by(deferred)} | {module.weight.data_ptr(): 0}
    assert sum(kept.values()) == ROWS * TOKENS * (WIDTH + 4 * WIDTH)


def test_products_run_in_their_order_and_are_freed_at_once() -> None:
    """Else the last one would still hold the memory of all."""
    tensors = [torch.tensor(number) for number in range(3)]
    alive = [weakref.ref(each) for each in tensors]
    seen: list[tuple[int, int]] = []

    def product(tensor: Tensor) -> Callable[[], None]:
        def run() -> None:
            seen.append((int(tensor), sum(each() is not None for each in alive)))

        return run

    deferred = [product(each) for each in tensors]
    tensors.clear()
    compute(deferred)
    assert seen == [(0, 3), (1, 2), (2, 1)]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_with_hooks_gets_its_gradient_at_once(register: str) -> None:
    module = layer()
    calls: list[Tensor] = []
    getattr(module.up.weight, register)(calls.append)
    deferred = deferred_by(module, attached(module), 0)
    assert len(calls) == 1
    assert len(deferred) == 2
    assert module.up.weight.grad is not None


def test_weights_of_other_modules_and_frozen_or_computed_ones_are_left_to_torch() -> None:
    weight_gradients = attached(layer())
    other, frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    weight_gradients.attach(frozen)
    computed = nn.Parameter(torch.randn(WIDTH, WIDTH))
    inputs = torch.randn(ROWS, WIDTH, requires_grad=True)
    output = linear(frozen(other(inputs)), computed * 2)
    with weight_gradients.deferring() as deferred:
        output.sum().backward()
    assert deferred == []
    assert frozen.weight.grad is None
    assert other.weight.grad is not None
    assert computed.grad is not None


class Doubling(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * 2


def test_other_products_are_computed_at_once() -> None:
    bare, own, wrapped = nn.Parameter(torch.randn(WIDTH, WIDTH)), Doubling(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    wrapped.forward = lambda inputs: F.linear(inputs, wrapped.weight)
    weight_gradients = attached(nn.ModuleList([nn.ParameterList([bare]), own, wrapped]))
    loss = F.linear(own(torch.ones(ROWS, WIDTH)), bare).sum() + wrapped(torch.ones(ROWS, WIDTH)).sum()
    with weight_gradients.deferring() as deferred:
        loss.backward()
    assert deferred == []
    assert bare.grad is not None and wrapped.weight.grad is not None and wrapped.bias.grad is None
    torch.testing.assert_close(own.weight.grad, (2 * ROWS * bare.sum(0)).unsqueeze(1).expand(WIDTH, WIDTH))


def test_attached_layers_compute_and_copy_as_before() -> None:
    module = layer()
    weight_gradients = attached(module)
    weight_gradients.attach(module)  # twice has the same effect
    twin = copy.deepcopy(module)
    twin.up.weight.data.zero_()
    assert module.state_dict().keys() == layer().state_dict().keys()
    with torch.no_grad():
        assert torch.equal(module(tokens_of(0)), layer()(tokens_of(0)))
        assert not torch.equal(module(tokens_of(0)), twin(tokens_of(0)))


def test_autocast_is_left_to_torch() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    weight_gradients = attached(module)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(torch.randn(ROWS, WIDTH))
    with weight_gradients.deferring() as deferred:
        output.float().sum().backward()
    assert deferred == []
    assert module.weight.grad.dtype is torch.float32


def test_after_an_error_products_are_not_deferred() -> None:
    weight_gradients = WeightGradients()
    with pytest.raises(ValueError, match="broken"), weight_gradients.deferring():
        assert weight_gradients.collecting
        raise ValueError("broken")
    assert not weight_gradients.collecting


def tensors_kept_by(products: list[Product]) -> list[Tensor]:
    """Tensors that products close over, in functions and arguments of functions."""
    found: list[Tensor] = []
    left: list[object] = [*products]
    while left:
        each = left.pop()
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, partial):
            left += each.func, *each.args
        elif isinstance(each, FunctionType):
            left += (cell.cell_contents for cell in each.__closure__ or ())
    return found
