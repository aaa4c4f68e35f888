"""What fused kernels of attention reach."""

from typing import get_args

import numpy as np
import pytest

from megatron_terapipe.devices import DEVICES, GENERATION_NAMES
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.machine.software import AttentionKernel
from megatron_terapipe.search.price.roofline import FUSED_KERNELS, RUNS_INSTEAD, fused_attention, kernel_that_runs

A100, H100 = "A100-SXM4-80GB", "H100-SXM5-80GB"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
KERNELS = set(get_args(AttentionKernel)) - {"scores"}


def tera_flops(kernel: str, name: str, head_size: int, length: int, *, causal: bool = True) -> tuple[float, float]:
    """Return the TFLOP/s of forward and backward, of 16,384 tokens and 2,048 channels, as papers measure them."""
    one = device(name)
    speed = fused_attention(kernel, one, "bf16", head_size)
    rows, heads = 16384.0, 16384 / length * (2048 // head_size)
    pairs = rows * (length + 1) / 2 if causal else rows * length
    forward, backward = speed.pairs_of_time(pairs, rows, float(length), heads, float(length))
    peak = one.half_flops / 1e12
    return peak * speed.forward * pairs / float(forward), peak * speed.backward * pairs / float(backward)


def test_every_kernel_has_something_that_runs_on_every_generation() -> None:
    assert {kernel for kernel, _ in FUSED_KERNELS} == KERNELS == {*RUNS_INSTEAD, "memory-efficient"}
    for generation in (*GENERATION_NAMES, ""):
        for kernel in KERNELS:
            assert kernel_that_runs(kernel, generation) in KERNELS


@pytest.mark.parametrize(
    ("kernel", "generation", "runs"),
    [
        ("flash-attention-3", "hopper", "flash-attention-3"),
        ("flash-attention-3", "ampere", "flash-attention-2"),
        ("flash-attention-3", "volta", "memory-efficient"),
        ("cudnn", "ada", "flash-attention-2"),
        ("flash-attention-2", "turing", "memory-efficient"),
        ("flash-attention-2", "", "flash-attention-2"),
    ],
)
def test_another_kernel_runs_where_one_does_not(kernel: str, generation: str, runs: str) -> None:
    assert kernel_that_runs(kernel, generation) == runs


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_shares_rise_with_the_length_and_stay_below_the_peak(kernel: str, name: str) -> None:
    if not DEVICES[name].device.is_gpu:
        return
    for head_size in (40, 64, 80, 96, 128, 192, 256):
        reached = np.array([tera_flops(kernel, name, head_size, length) for length in LENGTHS])
        assert np.all(np.diff(reached, axis=0) > 0)
        assert np.all(reached[-1] * 1e12 < 0.85 * DEVICES[name].device.half_flops)


@pytest.mark.parametrize(
    ("kernel", "head_size", "published"),
    [
        ("flash-attention-2", 64, (180, 229, 262, 284, 295, 299)),
        ("flash-attention-2", 128, (191, 260, 298, 319, 333, 335)),
        ("flash-attention-2", 256, (208, 251, 278, 293, 297, 298)),
        ("flash-attention-3", 128, (292, 423, 521, 579, 602, 616)),
        ("flash-attention-3", 256, (286, 427, 537, 612, 628, 642)),
        ("cudnn", 128, (315, 410, 484, 518, 529, 539)),
    ],
)
def test_forwards_on_an_h100_are_those_of_arxiv_2407_08608(
    kernel: str, head_size: int, published: tuple[float, ...]
) -> None:
    """Figure 5, causal: within 15 % from 1,024 tokens."""
    predicted = [tera_flops(kernel, H100, head_size, length)[0] for length in LENGTHS]
    assert predicted[1:] == pytest.approx(published[1:], rel=0.15)
    assert predicted[3:] == pytest.approx(published[3:], rel=0.08)


@pytest.mark.parametrize(
    ("kernel", "published"),
    [
        ("flash-attention-2", (214, 260, 291, 310, 318, 322)),
        ("flash-attention-3", (316, 424, 501, 542, 559, 561)),
        ("cudnn", (305, 408, 465, 499, 518, 516)),
    ],
)
def test_backwards_on_an_h100_are_those_of_arxiv_2407_08608(kernel: str, published: tuple[float, ...]) -> None:
    """Figure 6, heads of 128, not causal."""
    predicted = [tera_flops(kernel, H100, 128, length, causal=False)[1] for length in LENGTHS]
    assert predicted == pytest.approx(published, rel=0.1)


def test_an_a100_reaches_what_arxiv_2307_08691_says() -> None:
    """50 to 73 % of the peak forward, up to 63 % backward; 25 to 40 % with the kernel before it."""
    forward, backward = tera_flops("flash-attention-2", A100, 128, 16384, causal=False)
    assert 0.5 < forward / 312 < 0.73
    assert 0.5 < backward / 312 < 0.63
    for share in tera_flops("flash-attention-1", A100, 128, 16384):
        assert 0.25 < share / 312 < 0.4


def test_head_sizes_without_a_kernel_are_padded() -> None:
    sizes = {size: fused_attention("flash-attention-2", device(A100), "bf16", size).forward for size in (80, 96, 128)}
    assert sizes[80] == pytest.approx(sizes[96] * 80 / 96)
    assert sizes[96] < sizes[128]


def test_few_tiles_leave_multiprocessors_idle_and_short_token_slices_part_of_a_tile() -> None:
    speed = fused_attention("flash-attention-2", device(A100), "bf16", 128)

    def seconds(tokens: float, heads: float) -> float:
        start = 2048 - tokens
        pairs = (2048 * 2049 - start * (start + 1)) / 2
        return float(speed.pairs_of_time(pairs, tokens, tokens, heads, 2048.0)[0])

    # 16 x 5 tiles on 108 multiprocessors.
    assert seconds(2048, 5) > 2 * seconds(2048, 1000)
    # A slice of 16 tokens takes as long as one of 128, but for its mask.
    assert seconds(16, 16) == pytest.approx(seconds(128, 16), rel=0.05)
    tokens = np.array([256.0, 512.0])
    shape = speed.pairs_of_time(tokens * 100, tokens, tokens, np.array([[1.0], [8.0]]), tokens)[0]
    assert np.shape(shape) == (2, 2)


def test_fp32_and_cpus_reach_a_share_whatever_the_length() -> None:
    for name, precision in ((A100, "fp32"), ("cpu-core", "bf16")):
        speed = fused_attention("flash-attention-2", device(name), precision, 64)
        assert speed.pairs_of_time(100.0, 10.0, 10.0, 4.0, 10.0) == (100.0, 100.0)
