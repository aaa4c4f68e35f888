"""Shares that are fitted to tables of kernels."""

import numpy as np
import pytest

from benchmarks.kernel_efficiency import _attention_columns, _fit_attention, _fit_products, _memory_share
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.price.efficiency import GENERATIONS
from megatron_terapipe.search.price.roofline import TILE

A100 = device("A100-SXM4-80GB")
SIZES = np.array([512.0, 1024, 2048, 4096, 8192, 16384])


def test_fits_find_the_constants_of_the_forms() -> None:
    rows, outputs, inputs = (each.ravel() for each in np.meshgrid(SIZES, SIZES, SIZES))
    seconds = 2 * (inputs + 200) * (rows * outputs + 3e5) / (0.8 * A100.half_flops)
    # A row above the peak is refused.
    rows, outputs, inputs = (np.append(each, 4096) for each in (rows, outputs, inputs))
    fit = _fit_products(A100, rows, outputs, inputs, np.append(seconds, 1e-6))
    assert fit.constants == pytest.approx([0.8, 200, 3e5], rel=1e-3)
    assert (fit.refused, round(fit.error, 6)) == (1, 0)

    heads, tokens = (each.ravel() for each in np.meshgrid(np.array([8.0, 64, 512]), SIZES))
    processors = GENERATIONS["ampere"].processors
    pairs = tokens * (tokens + 1) / 2 + 150 * tokens
    filling = 1 + 1.5 * processors / (heads * tokens / TILE)
    fit = _fit_attention(A100, heads, tokens, 4 * heads * 128 * pairs * filling / (0.6 * A100.half_flops))
    assert fit.constants == pytest.approx([0.6, 150, 1.5], rel=1e-3)


def test_memory_is_what_reading_a_large_weight_reaches() -> None:
    one = np.array([1.0, 16384.0])
    outputs = inputs = np.array([32768.0, 16384.0])
    seconds = 2 * outputs * inputs / (0.7 * A100.memory_bandwidth) * np.array([1.0, 100.0])
    assert _memory_share(A100, one, outputs, inputs, seconds) == pytest.approx(0.7, rel=1e-3)


def test_attention_in_windows_and_behind_a_prompt_is_left_out() -> None:
    row = {
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "head_dim": 128,
        "batch_size": 2,
        "num_heads": 8,
        "isl": 4096,
        "step": 0,
        "window_size": 0,
        "latency": 1.0,
        "kernel_source": "fa",
    }
    others = [{"window_size": 128}, {"step": 4096}, {"kv_cache_dtype": "fp8"}, {"head_dim": 64}, {"latency": 0.01}]
    rows = [row] * 1001 + [row | other for other in others] * 300
    heads, tokens, seconds = _attention_columns(rows)["fa"]
    assert len(heads) == 1001
    assert (heads[0], tokens[0], seconds[0]) == (16, 4096, 1e-3)
