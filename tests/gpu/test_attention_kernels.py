"""Every attention kernel of CUDA beside attention written out, over sizes, prefixes and groups, there and back."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.attention.flash_kernels import (
    CudaFlash,
    MemoryEfficient,
    activate_flash_attention,
    kernel_for,
    kernel_of_runs_for,
)
from deepspeed_ext.runtime.attention.kernels import (
    Attended,
    AttentionKernel,
    PlainAttention,
    gradient_of_sinks,
    with_sinks,
)
from deepspeed_ext.runtime.state import sequence_state
from deepspeed_ext.runtime.state.sequence_state import SequenceState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS = 4
SHAPES = [(1, 0), (1, 32768), (7, 33), (128, 0), (128, 4096), (1000, 1000), (2048, 0), (2048, 32768)]
"""Queries, and keys before them."""
HEAD_SIZES = [64, 128, 256]
GROUPS = [4, 2, 1]
TOLERANCES = {torch.bfloat16: (1e-2, 2e-2), torch.float16: (2e-3, 4e-3), torch.float32: (1e-5, 2e-5)}
"""Relative errors of outputs and of gradients."""


@pytest.fixture(params=["torch", "newer"])
def flash(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch's own flash attention, and the newer one that a run on this device uses."""
    if request.param == "torch":
        yield
        return
    query, key = (torch.randn(1, tokens, HEADS, 64, device="cuda").bfloat16() for tokens in (128, 256))
    choice = activate_flash_attention([(query, key, window) for window in (None, 100)])
    if torch_attention.current_flash_attention_impl() is None:
        pytest.skip(f"no newer one is here:{' '.join(choice)}")
    yield
    torch_attention.restore_flash_attention_impl()


def compare(
    kernel: AttentionKernel,
    dtype: torch.dtype,
    num_queries: int,
    prefix_len: int,
    size: int,
    groups: int,
    window: int | None = None,
):
    """Hold a kernel against attention written out in fp32, in fp64 for a kernel of fp32; with windows also sinks."""
    generator = torch.Generator("cuda").manual_seed(num_queries + prefix_len + size + groups)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, size, device="cuda", generator=generator).to(dtype)

    query, output_gradient = random(num_queries, HEADS), random(num_queries, HEADS)
    # As the state hands them out: views of the beginning of longer buffers.
    key, value = (random(prefix_len + num_queries + 5, groups)[:, :-5] for _ in range(2))
    scale = size**-0.5
    attended = kernel.forward(query, key, value, scale)
    sinks = None if window is None else torch.linspace(-2, 4, HEADS, device="cuda")
    if sinks is not None:
        attended = Attended(*with_sinks(*attended, sinks))
    found = kernel.backward(output_gradient, query, key, value, attended, scale)
    reference = torch.float64 if dtype is torch.float32 else torch.float32
    plain = PlainAttention(window=window)
    exact = [each.to(reference) for each in (query, key, value)]
    expected = plain.forward(*exact, scale)
    if sinks is not None:
        expected = Attended(*with_sinks(*expected, sinks))
        of_sinks = [gradient_of_sinks(output_gradient, *each, sinks) for each in (attended, expected)]
        assert error(*of_sinks) < 10 * TOLERANCES[dtype][1]
    gradients = plain.backward(output_gradient.to(reference), *exact, expected, scale)
    of_output, of_gradients = TOLERANCES[dtype]
    assert error(attended.output, expected.output) < of_output
    assert float((attended.log_sum_exp - expected.log_sum_exp).abs().max()) < max(of_output / 10, 1e-5)
    for got, wanted in zip(
        (found.query, *found.own, *found.prefix), (gradients.query, *gradients.own, *gradients.prefix), strict=True
    ):
        assert got.shape == wanted.shape
        # One query on one key has weight 1 whatever the scores: its true gradients are 0.
        scale_of_error = max(float(wanted.norm()), float(gradients.own[1].norm()) / 10)
        assert not wanted.numel() or float((got.to(reference) - wanted).norm()) < of_gradients * scale_of_error


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.to(expected.dtype) - expected).norm() / expected.norm())


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize(("num_queries", "prefix_len"), SHAPES)
def test_flash_in_bf16(flash: None, num_queries: int, prefix_len: int, size: int, groups: int) -> None:
    compare(CudaFlash(), torch.bfloat16, num_queries, prefix_len, size, groups)


@pytest.mark.parametrize(("num_queries", "prefix_len"), SHAPES)
def test_flash_in_fp16(flash: None, num_queries: int, prefix_len: int) -> None:
    compare(CudaFlash(), torch.float16, num_queries, prefix_len, 64, 2)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize(("num_queries", "prefix_len"), SHAPES)
def test_memory_efficient_in_fp32(num_queries: int, prefix_len: int, size: int, groups: int) -> None:
    compare(MemoryEfficient(), torch.float32, num_queries, prefix_len, size, groups)


WINDOWS = [1, 100, 4096]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("num_queries", "prefix_len"), SHAPES)
def test_windows_of_flash(flash: None, num_queries: int, prefix_len: int, window: int) -> None:
    compare(CudaFlash(window), torch.bfloat16, num_queries, prefix_len, 128, 2, window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("num_queries", "prefix_len"), SHAPES)
def test_windows_of_memory_efficient(num_queries: int, prefix_len: int, window: int) -> None:
    compare(MemoryEfficient(window), torch.float32, num_queries, prefix_len, 128, 2, window)


@pytest.mark.parametrize("size", [264, 512])
def test_memory_efficient_takes_heads_that_are_too_large_for_flash(size: int) -> None:
    compare(MemoryEfficient(), torch.bfloat16, 100, 300, size, 2)


STARTS = ((0, 700, 1500, 1501, 1990, 3000), (0, 1600))


def through(documents: Documents, dtype: torch.dtype, window: int | None = None) -> list[Tensor]:
    """Output and gradients of attention across token slices; the same numbers in every dtype."""
    cut = TokenSlices((1000, 900, 1600))
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, cut.seq_length, heads, 64) for heads in (HEADS, 2, 2, HEADS)]
    query, key, value, weight = (
        torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16).to(dtype) for shape in shapes
    )
    tensors = [each.requires_grad_() for each in (query, key, value)]
    state = SequenceState(cut, documents=documents)
    outputs = [
        state.past(0, number).attend(*(each[:, start:end] for each in tensors), window=window)
        for number, (start, end) in enumerate(cut.bounds())
    ]
    for output, (start, end) in reversed(list(zip(outputs, cut.bounds(), strict=True))):
        output.backward(weight[:, start:end])
    return [torch.cat([output.detach() for output in outputs], 1), *(each.grad for each in tensors)]


@pytest.mark.parametrize("window", [None, 300])
def test_documents_in_one_call_a_row(flash: None, window: int | None) -> None:
    documents = Documents(STARTS)
    assert kernel_of_runs_for(torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)) is not None
    exact = through(documents, torch.float64, window)
    for found, expected in zip(through(documents, torch.bfloat16, window), exact, strict=True):
        assert error(found, expected) < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_documents_piece_by_piece(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_state, "kernel_of_runs_for", lambda *_: None)
    exact = through(Documents(STARTS), torch.float64)
    for found, expected in zip(through(Documents(STARTS), dtype), exact, strict=True):
        assert error(found, expected) < TOLERANCES[dtype][1]


def test_documents_move_to_the_device_without_a_wait() -> None:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        seen = Documents(STARTS).seen(1000, 1900, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [row.runs.queries.tolist() for row in seen] == [[0, 500, 501, 900], [0, 600, 900]]
    assert [row.first_key for row in seen] == [700, 0]


def test_the_best_kernel_is_chosen() -> None:
    bf16 = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    if torch.cuda.get_device_capability() >= (8, 0):
        assert isinstance(kernel_for(bf16), CudaFlash)
    assert isinstance(kernel_for(bf16.float()), MemoryEfficient)
