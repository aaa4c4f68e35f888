"""Products of layers: gradients add up in place, as by plain autograd, with the same bits however they are computed.

The backward may compute the layer before again, and weight gradients may be deferred. `test_activation_bytes.py` counts
what is kept.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.gradients.weight_gradients import Product, WeightGradients, compute, set_queue
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from deepspeed_ext.runtime.topology import Pending
from megatron_terapipe.model import tensor_parallel
from megatron_terapipe.model.gpt import gpt_layers
from megatron_terapipe.model.mlp import Activation
from megatron_terapipe.model.norm import LayerNorm, RMSNorm
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import model_config
from tests.runtime.gradients.test_weight_gradients import tensors_kept_by

WIDTH = 12
ALONE = TensorParallelRanks()
BEFORE = {
    "layernorm": lambda: LayerNorm(model_config(hidden_size=WIDTH), ALONE),
    "rmsnorm": lambda: RMSNorm(model_config(hidden_size=WIDTH), ALONE),
    **{
        name: lambda name=name: Activation(model_config(activation=name))
        for name in ("gelu", "relu", "squared-relu", "swiglu")
    },
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


def deferred_by(loss: Tensor, weight_gradients: WeightGradients) -> list[Product]:
    with weight_gradients.deferring() as deferred:
        loss.backward()
    return deferred


def attached(*weights: Tensor) -> WeightGradients:
    weight_gradients = WeightGradients()
    for weight in weights:
        set_queue(weight, weight_gradients)
    return weight_gradients


@pytest.mark.parametrize("name", BEFORE)
def test_of_a_recomputed_layer_only_the_result_is_kept(name: str) -> None:
    before, weight, bias = layers_of(name)
    weight_gradients = attached(weight)
    inputs = inputs_of(name, 3)
    middle = inputs * 1  # only the product has it
    output = tensor_parallel.linear(middle, weight, bias, before=before)
    raw = weakref.ref(middle)
    del middle
    loss = output.square().sum()
    del output
    assert raw() is not None
    deferred = deferred_by(loss, weight_gradients)
    del loss
    assert raw() is None
    assert _numbers_kept(deferred, weight) == 10 * (weight.shape[-1] + weight.shape[0])
    compute(deferred)
    assert weight.grad is not None


@dataclass(frozen=True)
class TwoRanks:
    """The first of two sequence-parallel ranks, the other of which has the same tokens: no process group needed."""

    sequence_parallel: bool = True

    def start_gather(self, part: Tensor) -> Pending:
        return lambda: torch.cat([part, part], dim=1)

    def start_complete(self, partial: Tensor) -> Pending:
        return lambda: partial.chunk(2, dim=1)[0]


def test_sequence_parallel_ranks_keep_their_own_tokens_and_gather_later() -> None:
    seen = []
    for apart in (False, True):
        weight, inputs = drawn(8, 5, seed=1), drawn(2, 3, 5, seed=2)
        weight_gradients = attached(weight)
        loss = tensor_parallel.linear(inputs, weight, ranks=TwoRanks()).square().sum()
        if apart:
            deferred = deferred_by(loss, weight_gradients)
            assert _numbers_kept(deferred, weight) == 2 * 3 * 5 + 2 * 6 * 8
            compute(deferred)
        else:
            loss.backward()
        seen.append((weight.grad, inputs.grad))
    assert all(torch.equal(whole, parts) for whole, parts in zip(*seen, strict=True))


def test_every_matrix_of_the_model_can_be_deferred() -> None:
    """But the learned positions, which are few."""
    model = model_config(hidden_size=16, num_attention_heads=4, num_layers=1)
    layers = [spec.build() for spec in gpt_layers(model)]
    weight_gradients, past = WeightGradients(), SequenceState(TokenSlices((3,))).past(0, 0)
    for layer in layers:
        weight_gradients.attach(layer)
    embedding, positions, transformer, norm, _ = layers
    hidden = norm(transformer(positions(embedding(torch.tensor([[1, 2, 3]])), past), past))
    deferred = deferred_by(tensor_parallel.linear(hidden, embedding.weight).logsumexp(-1).sum(), weight_gradients)
    assert len(deferred) == 4 + 2
    assert embedding.weight.grad is None
    assert positions.weight.grad is not None


def _numbers_kept(deferred: list[Product], weight: Tensor) -> int:
    """Numbers in the tensors that products close over, but for their weight."""
    tensors = [each for each in tensors_kept_by(deferred) if each is not weight]
    assert all(tensor.grad_fn is None for tensor in tensors), "a graph would keep earlier tensors"
    storages = {each.untyped_storage().data_ptr(): each for each in tensors}
    return sum(each.untyped_storage().nbytes() // each.element_size() for each in storages.values())


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


CASES = {
    "linear": (lambda weight: tensor_parallel.linear(drawn(2, 3, 5, seed=3), weight), "addmm_"),
    "embedding": (lambda weight: tensor_parallel.embedding(TOKENS, weight), "index_add_"),
}


@pytest.mark.parametrize(("compute", "in_place"), CASES.values(), ids=CASES)
def test_only_the_first_gradient_is_a_new_tensor(compute: Callable[[Tensor], Tensor], in_place: str) -> None:
    """From the second on, no operator makes a tensor of the weight's shape but the addition to `weight.grad`."""
    weight = drawn(8, 5, seed=1)

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
    weight = drawn(8, 5, seed=1)
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
    weight = drawn(8, 5, seed=1)
    compute(weight).sum().backward()
    once, weight.grad = weight.grad, None
    for _ in range(2):
        compute(weight * 2).sum().backward()
    torch.testing.assert_close(weight.grad, 4 * once)
