"""Gradients of bf16 weights that are summed in fp32: the sums, and their cost."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.one_rank import as_deepspeed_does
from deepspeed_ext.runtime.gradients import weight_gradients as accumulated_gradients
from deepspeed_ext.runtime.gradients.weight_gradients import (
    AccumulatedGradient,
    AccumulatedGradients,
    WeightGradients,
    compute,
    linear,
)
from megatron_terapipe.model import tensor_parallel
from megatron_terapipe.training import build_engine as trainer_engine
from tests.distributed import run_distributed
from tests.runtime.gradients.test_weight_gradients import gradients, layer, tokens_of
from tests.runtime.training import Setup as RuntimeSetup
from tests.runtime.training import build, feed, weights
from tests.training.gpt_runs import Setup, batches, run_of

aten = torch.ops.aten
ROWS, OUT, IN, TOKEN_SLICES = 24, 40, 16, 6


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def accumulated(*weights: nn.Parameter) -> tuple[AccumulatedGradients, list[Tensor]]:
    totals = [torch.zeros(weight.numel()) for weight in weights]
    return AccumulatedGradients(zip(weights, totals, strict=True)), totals


# ---------------------------------------------------------------------- the sums


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "deferred"])
@pytest.mark.parametrize("multiply", [linear, tensor_parallel.linear], ids=["linear", "products.linear"])
def test_the_sum_over_token_slices_is_that_of_their_products_in_fp32(
    multiply: Callable[..., Tensor], apart: bool
) -> None:
    weight = nn.Parameter(drawn(OUT, IN, seed=0))
    weight_gradients = WeightGradients()
    weight_gradients.attach(nn.ParameterList([weight]))
    sums, (total,) = accumulated(weight)
    expected, rounded, waiting = torch.zeros(OUT, IN), torch.zeros(OUT, IN).bfloat16(), []
    for step in range(TOKEN_SLICES):
        inputs, gradient = drawn(1, ROWS, IN, seed=2 * step + 1), drawn(1, ROWS, OUT, seed=2 * step + 2)
        output = multiply(inputs, weight)
        if apart:
            with weight_gradients.deferring() as deferred:
                output.backward(gradient)
            waiting.append(deferred)
        else:
            output.backward(gradient)
        sums.collect()
        assert weight.grad is None
        product = gradient[0].t() @ inputs[0]
        expected += product.float()
        rounded += product
    for deferred in waiting:
        compute(deferred)
    torch.testing.assert_close(total.view(OUT, IN), expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(rounded.float(), expected, rtol=1e-3, atol=1e-3), "bf16 would do as well"


def test_look_ups_touch_the_rows_they_used_and_in_fp32() -> None:
    weight = nn.Parameter(drawn(8, IN, seed=0))
    sums, (total,) = accumulated(weight)
    tokens = torch.tensor([[1, 1, 4], [1, 7, 1]])
    gradient = drawn(2, 3, IN, seed=1)
    tensor_parallel.embedding(tokens, weight).backward(gradient)
    sums.collect()
    expected = torch.zeros(8, IN).index_add_(0, tokens.flatten(), gradient.flatten(0, 1).float())
    assert torch.equal(total.view(8, IN), expected)


def test_gradients_of_autograd_are_moved_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulated_gradients, "_SMALL", 10)
    small, large, unused = (nn.Parameter(drawn(size, seed=size)) for size in (3, 20, 4))
    sums, (of_small, of_large, of_unused) = accumulated(small, large, unused)
    of_unused.fill_(torch.nan)
    for _ in range(2):
        ((small * 2).sum() + (large * 3).sum()).backward()
        sums.collect()
    assert small.grad is None and large.grad is None
    assert of_small.tolist() == [4.0] * 3
    assert of_large.tolist() == [6.0] * 20


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_get_each_gradient_and_the_sum_has_them(register: str) -> None:
    seen = []
    for watched in (False, True):
        module, calls = layer(torch.bfloat16), []
        if watched:
            getattr(module.up.weight, register)(lambda gradient, calls=calls: calls.append(gradient))
        WeightGradients().attach(module)
        sums, totals = accumulated(*module.parameters())
        for step in range(2):
            module(tokens_of(step)).logsumexp(-1).sum().backward()
            sums.collect()
        assert len(calls) == (2 if watched else 0)
        assert gradients(module) == {}
        seen.append(totals)
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


# ---------------------------------------------------------------------- the optimizer's norm, clipping and step


def _steps(way: str) -> tuple[list[float], dict[str, Any]]:
    setup = RuntimeSetup(cut=(24,), micro_batches=1, dtype="bf16", zero=1, accumulate="fp32", tied=False)
    config: dict[str, Any] = {"gradient_clipping": 0.1}
    if way == "hooks":
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
    engine = build(setup, config=config, optimizer=lambda each: torch.optim.SGD(each, lr=0.5))
    if way == "pass":
        as_deepspeed_does(engine)
    found = []
    for step in range(2):
        found.append(engine.train_batch(feed(engine, setup, step=step)).item())
        found.append(float(engine.get_global_grad_norm()))
    return found, weights(engine)


def _on_one() -> dict[str, Any]:
    return {
        "steps": [_steps(way) for way in ("pass", "hooks", "products")],
        "written": [_written(token_slices, fused) for token_slices, fused in ((1, True), (4, True), (4, False))],
    }


@pytest.fixture(scope="module")
def on_one() -> dict[str, Any]:
    return run_distributed(_on_one, 1)[0]


def test_norm_clipping_and_step_are_those_of_both_of_deepspeeds_own_ways(on_one) -> None:
    """Of one token slice to the bit: a sum of one product is not rounded."""
    (found, updated), *others = on_one["steps"]
    assert found[1] > 0.1, "the gradient was not clipped"
    for other_found, other_updated in others:
        assert other_found == found
        assert all((other_updated[name] == updated[name]).all() for name in updated)


# ---------------------------------------------------------------------- cost


class FusedProducts(TorchDispatchMode):
    """Gives CPUs the operation that CUDA has, and counts numbers of weights that other operations write.

    Args:
        shapes: of the weights.
    """

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self._shapes, self.written, self.products = shapes, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, positional: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function is aten.addmm.dtype_out:
            total, left, right, dtype = positional
            assert keywords.pop("out") is total and not keywords and dtype is torch.float32
            self.products += 1
            return total.add_(left @ right)
        result = function(*positional, **keywords)
        written = [positional[0], result] if "_foreach" in str(function) else [result]
        if not function.is_view and function is not aten.index_add_.default:
            self.written += sum(
                each.numel() for each in tree_leaves(written) if isinstance(each, Tensor) and each.shape in self._shapes
            )
        return result


def _written(token_slices: int, fused: bool) -> tuple[int, int]:
    """Numbers of weights written in a step by other operations than products, and fused products."""
    flags = f"--bf16 --zero-stage 1 --num-token-slices {token_slices} --position-embedding-type rope"
    setup = Setup(flags=flags, micro_batches=1)
    with patch.object(accumulated_gradients, "_adds_products", lambda *_: fused):
        engine = trainer_engine.build_engine(run_of(setup))
    shapes = {weight.shape for weight in engine.module.parameters() if weight.dim() > 1}
    for _ in range(2):  # the first one allocates
        with FusedProducts(shapes) as counted:
            engine.train_batch(iter(batches(setup, 0)))
    return counted.written, counted.products


def test_only_products_write_the_weights_for_each_token_slice(on_one) -> None:
    (once, few), (often, many), (apart, none) = on_one["written"]
    assert (few, many, none) == (4 * 4 + 1, 4 * (4 * 4 + 1), 0)
    assert often == once
    assert apart > once, "the sums of CPUs, which are apart from their products, must count"


def test_a_device_that_adds_products_gets_the_sum() -> None:
    """On tensors without numbers: the arguments fit the operation of this torch."""
    with patch.object(accumulated_gradients, "_adds_products", lambda *_: True):
        gradient = AccumulatedGradient(torch.zeros(2, OUT, IN, device="meta"), torch.bfloat16)
    output_gradient, inputs = (torch.zeros(ROWS, width, dtype=torch.bfloat16, device="meta") for width in (2 * OUT, IN))
    gradient.add_product(output_gradient, inputs)
    assert gradient.total.shape == (2, OUT, IN)


class Operators(TorchDispatchMode):
    """Names of the operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, positional: Any = (), keywords: Any = None) -> Any:
        if not function.is_view:
            self.names.append(str(function))
        return function(*positional, **(keywords or {}))


def test_a_device_without_it_gets_one_product_and_one_sum_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(accumulated_gradients, "log_dist", lambda line, **_: lines.append(line))
    monkeypatch.setattr(torch, "addmm", Mock(side_effect=RuntimeError("self and mat2 must have the same dtype\nat x")))
    accumulated_gradients._adds_products.cache_clear()
    gradients = [AccumulatedGradient(torch.zeros(4096, 512, device="meta"), torch.bfloat16) for _ in range(2)]
    accumulated_gradients._adds_products.cache_clear()
    rows, inputs = (torch.zeros(ROWS, width, dtype=torch.bfloat16, device="meta") for width in (4096, 512))
    with Operators() as found:
        gradients[0].add_product(rows, inputs)
    assert found.names == ["aten.mm.default", "aten.add_.Tensor"]
    (line,) = lines
    assert line.endswith(
        "meta adds no products of torch.bfloat16 to torch.float32 (self and mat2 must have the same dtype)"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_adds_products_of_bf16_to_fp32_unrounded() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert accumulated_gradients._adds_products(device, torch.bfloat16, torch.float32), "this torch is too old"
    gradient = AccumulatedGradient(torch.zeros(2, OUT, IN, device=device), torch.bfloat16)
    kept, expected = gradient.total.data_ptr(), torch.zeros(2 * OUT, IN, dtype=torch.float64)
    for step in range(TOKEN_SLICES):
        output_gradient, inputs = drawn(ROWS, 2 * OUT, seed=step), drawn(ROWS, IN, seed=100 + step)
        gradient.add_product(output_gradient.to(device), inputs.to(device))
        expected += output_gradient.double().t() @ inputs.double()
    assert gradient.total.data_ptr() == kept
    torch.testing.assert_close(gradient.total.view(2 * OUT, IN).cpu().double(), expected, rtol=1e-5, atol=1e-5)
