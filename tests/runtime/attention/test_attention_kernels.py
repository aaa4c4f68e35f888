"""Each kernel against attention written out with autograd, on queries at the end of the keys."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ext.runtime.attention.flash_kernels import (
    CpuFlash,
    CudaFlash,
    MemoryEfficient,
    cpu_flash,
    kernel_for,
    kernel_of_runs_for,
)
from deepspeed_ext.runtime.attention.kernels import AttentionKernel, PlainAttention

KERNELS = (cpu_flash, PlainAttention)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; a query attends to the keys up to its own place, counted from the end."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(repeats, dim=2) for tensor in (key, value))
    scores = torch.einsum("bnhd,behd->bhne", query, key) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    num_queries, num_keys = scores.shape[-2:]
    places = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
    scores = scores.masked_fill(torch.arange(num_keys) > places, float("-inf"))
    if window is not None:
        scores = scores.masked_fill(torch.arange(num_keys) <= places - window, float("-inf"))
    return torch.einsum("bhne,behd->bnhd", scores.softmax(-1), value), scores.logsumexp(-1)


def error(found: Tensor, expected: Tensor) -> float:
    expected = expected.detach()
    return float((found.double() - expected).norm() / expected.norm())


WINDOWS = st.one_of(st.none(), st.integers(1, 50))


@st.composite
def kernels(draw: st.DrawFn) -> tuple[AttentionKernel, dict[str, float | None]]:
    """A kernel for CPUs, and its settings for attention written out."""
    window = draw(WINDOWS)
    if draw(st.booleans()):
        return cpu_flash(window), {"window": window}
    softcap = draw(st.sampled_from([None, 0.7, 50.0]))
    at_once = draw(st.sampled_from([2**27, 1, 300]))
    return PlainAttention(window=window, softcap=softcap, scores_at_once=at_once), {
        "window": window,
        "softcap": softcap,
    }


@settings(deadline=None, max_examples=120)
@given(
    case=kernels(),
    num_queries=st.integers(1, 9),
    prefix_len=st.integers(0, 40),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    head_dim=st.sampled_from([4, 8, 16]),
    dtype=st.sampled_from(list(TOLERANCE)),
    temperature=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_forward_and_backward_are_exact(
    case: tuple[AttentionKernel, dict[str, float | None]],
    num_queries: int,
    prefix_len: int,
    groups: int,
    repeats: int,
    head_dim: int,
    dtype: torch.dtype,
    temperature: float,
    seed: int,
) -> None:
    kernel, settings_of_kernel = case
    scale = head_dim**-0.5 / temperature  # scores of order 1: the error of exp(x) in fp32 is |x| times its precision
    are_exact(kernel, settings_of_kernel, (num_queries, prefix_len, groups, repeats, head_dim), dtype, scale, seed)


@pytest.mark.parametrize("window", [1, 3, 128, 300, 700, None], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_windows_over_several_tiles_are_exact(kernel: type, window: int | None) -> None:
    """Tiles of 128 queries and more, each with the keys in reach."""
    are_exact(kernel(window=window), {"window": window}, (300, 400, 2, 2, 8), torch.float64, 0.3, 0)


def are_exact(
    kernel: AttentionKernel,
    settings_of_kernel: dict[str, float | None],
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    scale: float,
    seed: int,
) -> None:
    num_queries, prefix_len, groups, repeats, head_dim = sizes
    generator = torch.Generator().manual_seed(seed)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(2, tokens, heads, head_dim, generator=generator).to(dtype)

    query, output_gradient = random(num_queries, groups * repeats), random(num_queries, groups * repeats)
    key, value = random(prefix_len + num_queries, groups), random(prefix_len + num_queries, groups)
    attended = kernel.forward(query, key, value, scale)
    found = kernel.backward(output_gradient, query, key, value, attended, scale)

    exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    output, log_sum_exp = written_out(*exact, scale, **settings_of_kernel)
    of_query, of_key, of_value = torch.autograd.grad(output, exact, output_gradient.double())
    assert error(attended.output, output) <= TOLERANCE[dtype]
    # Of a logarithm the absolute error counts: that is the relative error of the sum.
    assert float((attended.log_sum_exp - log_sum_exp).detach().abs().max()) <= TOLERANCE[dtype]
    # One query on one key has weight 1 whatever the scores, so true gradients of both are 0: measure against the rest.
    whole = max(of_query.norm(), of_key.norm(), of_value.norm())
    for part, expected in (
        (found.query, of_query),
        (found.own[0], of_key[:, prefix_len:]),
        (found.own[1], of_value[:, prefix_len:]),
        (found.prefix[0], of_key[:, :prefix_len]),
        (found.prefix[1], of_value[:, :prefix_len]),
    ):
        assert part.shape == expected.shape
        assert part.dtype == dtype
        assert float((part.double() - expected).norm() / whole) <= TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kernel", [cpu_flash, PlainAttention, partial(PlainAttention, scores_at_once=1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_an_fp32_log_sum_exp(
    kernel: type, dtype: torch.dtype, window: int | None
) -> None:
    torch.manual_seed(0)
    kernel = kernel(window=window)
    query, output_gradient = torch.randn(2, 2, 5, 4, 8).to(dtype)
    key, value = torch.randn(2, 2, 12, 2, 8).to(dtype)
    attended = kernel.forward(query, key, value, 0.35)
    gradients = kernel.backward(output_gradient, query, key, value, attended, 0.35)
    assert attended.log_sum_exp.dtype == torch.float32
    assert {attended.output.dtype, gradients.query.dtype, gradients.own[0].dtype, gradients.prefix[1].dtype} == {dtype}
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    output, _ = written_out(*exact, 0.35, window)
    of_query, of_key, _ = torch.autograd.grad(output, exact, output_gradient.double())
    assert error(attended.output, output) < 1e-2
    assert error(gradients.query, of_query) < 3e-2
    assert error(gradients.own[0], of_key[:, 7:]) < 3e-2


class OnCuda(torch.Tensor):
    """A tensor with a CUDA device as attribute."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("dtype", "head_size", "capability", "expected"),
    [
        (torch.bfloat16, 128, (8, 0), CudaFlash),
        (torch.float16, 256, (9, 0), CudaFlash),
        (torch.bfloat16, 8, (12, 0), CudaFlash),
        (torch.bfloat16, 264, (9, 0), MemoryEfficient),  # larger than flash attention takes
        (torch.bfloat16, 224, (8, 9), MemoryEfficient),  # too large for the shared memory of these devices
        (torch.bfloat16, 256, (8, 9), CudaFlash),
        (torch.float16, 64, (7, 5), MemoryEfficient),
        (torch.bfloat16, 64, (7, 5), PlainAttention),
        (torch.float16, 12, (9, 0), PlainAttention),
        (torch.float32, 12, (8, 0), MemoryEfficient),
        (torch.float32, 6, (8, 0), PlainAttention),
        (torch.float64, 64, (9, 0), PlainAttention),
        (torch.bfloat16, 64, (0, 0), PlainAttention),  # not a device of NVIDIA's
    ],
)
def test_kernel_is_chosen_by_device_dtype_and_head_size(
    dtype: torch.dtype, head_size: int, capability: tuple[int, int], expected: type
) -> None:
    query = torch.zeros(1, 1, 1, head_size, dtype=dtype)
    assert isinstance(kernel_for(query), CpuFlash)
    assert kernel_of_runs_for(query) is None
    on_cuda = query.as_subclass(OnCuda)
    assert isinstance(kernel_for(on_cuda, capability=lambda device: capability), expected)
    assert (kernel_of_runs_for(on_cuda, capability=lambda device: capability) is not None) is (expected is CudaFlash)


class AsDeclared(TorchDispatchMode):
    """Does not compute. Torch has compared the arguments with the operator's declaration before."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.windows: list[int | None] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.windows += [value for name, value in (keywords or {}).items() if name.startswith("window_size")]
        # What torch has for this operator on the meta device lacks an argument of its declaration.
        if function is torch.ops.aten._efficient_attention_backward.default:
            given = dict(zip((each.name for each in function._schema.arguments), arguments, strict=False))
            assert given["logsumexp"].stride(1) % 32 == 0
            assert given["custom_mask_type"] == 2
            assert (keywords or {}).get("window_size") == self.window
            assert given["out"].shape == given["grad_out_"].shape
            return (*(torch.empty_like(given[name]) for name in ("query", "key", "value")), torch.empty(0))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", [CudaFlash, MemoryEfficient])
def test_operators_of_cuda_are_called_as_they_are_declared(kernel: type, window: int | None) -> None:
    """Without a device the arguments can still be compared with the declarations of the operators.

    Flash attention counts the keys before a query, the memory-efficient kernel the query's own too.
    """
    before = window if window is None or kernel is MemoryEfficient else window - 1
    kernel = kernel(window=window)
    query = torch.empty(2, 17, 8, 64, dtype=torch.bfloat16, device="meta")
    key = value = torch.empty(2, 49, 4, 64, dtype=torch.bfloat16, device="meta")
    with AsDeclared(window) as declared:
        attended = kernel.forward(query, key, value, 0.125)
        assert (attended.output.shape, attended.log_sum_exp.shape) == (query.shape, (2, 8, 17))
        for log_sum_exp in (attended.log_sum_exp, attended.log_sum_exp.contiguous()):
            given = attended._replace(log_sum_exp=log_sum_exp)
            gradients = kernel.backward(torch.empty_like(query), query, key, value, given, 0.125)
    assert [given for given in declared.windows if given is not None] == [before] * 3 * (window is not None)
    assert gradients.query.shape == query.shape
    assert [tensor.shape for tensor in gradients.own] == [(2, 17, 4, 64)] * 2
    assert [tensor.shape for tensor in gradients.prefix] == [(2, 32, 4, 64)] * 2
