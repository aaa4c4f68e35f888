"""Op times from shapes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.terapipe import TERAPIPE
from megatron_terapipe.search.machine.trainers import MEGATRON_LM
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, reachable_bandwidth
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes
from megatron_terapipe.search.price.roofline import Roofline, fused_attention
from megatron_terapipe.search.price.workload import Layer
from tests.search.cost.machines import A100, GPT

BLOCK, HEAD = GPT.layers[1], GPT.layers[-1]


def times(software: Software = TERAPIPE, efficiency: HardwareEfficiency | None = None, **changes: object) -> LayerTimes:
    values: dict[str, object] = {
        "tensor_parallel_size": 1.0,
        "micro_batch_size": 2.0,
        "start": 0.0,
        "end": 2048.0,
    }
    return Roofline(efficiency or HardwareEfficiency(), software)(LayerQuery(BLOCK, A100, **(values | changes)))  # type: ignore[arg-type]


def test_large_products_reach_the_efficiency_and_small_ones_do_not() -> None:
    roofline = Roofline(HardwareEfficiency(), TERAPIPE)

    def reached(rows: float, inputs: float, outputs: float) -> float:
        seconds = float(roofline.product_s(A100, rows, inputs, outputs))
        return 2 * rows * inputs * outputs / seconds / A100.half_flops

    assert reached(32768, 16384, 16384) == pytest.approx(HardwareEfficiency().gemm_efficiency, rel=0.01)
    assert reached(128, 1024, 1024) < 0.5 * HardwareEfficiency().gemm_efficiency
    # One row reads all of the weight: memory, not FLOPs.
    seconds = float(roofline.product_s(A100, 1, 16384, 16384))
    assert seconds == pytest.approx(
        2 * 16384**2 / (A100.memory_bandwidth * HardwareEfficiency().memory_efficiency), rel=1e-3
    )


def test_a_cpu_core_has_no_wave_of_tiles() -> None:
    roofline = Roofline(HardwareEfficiency(), TERAPIPE)
    core = replace(A100, is_gpu=False, half_flops=1e11, memory_bandwidth=1e10)
    seconds = {on: float(roofline.product_s(replace(core, is_gpu=on), 512, 256, 256)) for on in (True, False)}
    ideal = 2 * 512 * 256 * 256 / (core.half_flops * HardwareEfficiency().gemm_efficiency)
    assert seconds[True] > 5 * ideal
    assert ideal < seconds[False] < 1.2 * ideal


def test_gradients_of_keys_that_are_kept_in_bf16_move_half_the_bytes_of_sums() -> None:
    later = {"start": 1024.0, "end": 2048.0}
    kept, rounded = times(**later), times(**later, key_value_gradients="bf16")
    attention = BLOCK.attention
    assert attention is not None
    channels = 2 * attention.key_value_heads * attention.head_size
    # The sum of each earlier token is read and written: 4 bytes in place of 8, of two sequences.
    saved = 2 * 1024 * channels * 4 / (reachable_bandwidth(A100) * HardwareEfficiency().memory_efficiency)
    assert kept.input_gradient - rounded.input_gradient == pytest.approx(saved)
    assert rounded._replace(input_gradient=kept.input_gradient) == kept
    assert times(key_value_gradients="bf16") == times()


def test_full_recompute_runs_the_forward_again() -> None:
    without, full = times(MEGATRON_LM), times(MEGATRON_LM, recompute="full")
    assert full.input_gradient == pytest.approx(without.input_gradient + without.forward)
    assert (full.forward, full.weight_gradient) == (without.forward, without.weight_gradient)


def test_selective_recompute_is_of_attention_or_of_norms() -> None:
    def more(software: Software) -> float:
        return float(
            times(software, recompute="selective").input_gradient - times(software, recompute="none").input_gradient
        )

    assert 0 < more(TERAPIPE) < more(MEGATRON_LM) < float(times(MEGATRON_LM).forward)


def test_scores_cost_more_than_flash_and_odd_heads_more_than_even_ones() -> None:
    assert times(MEGATRON_LM).forward > times(TERAPIPE).forward
    assert BLOCK.attention is not None
    odd = replace(BLOCK, attention=replace(BLOCK.attention, head_size=127, query_heads=16))
    roofline = Roofline(HardwareEfficiency(), TERAPIPE)
    grid = {"tensor_parallel_size": 1.0, "micro_batch_size": 1.0, "start": 0.0, "end": 2048.0}
    assert roofline(LayerQuery(odd, A100, **grid)).forward > roofline(LayerQuery(BLOCK, A100, **grid)).forward  # type: ignore[arg-type]


def test_later_token_slices_attend_to_more() -> None:
    grid = times(start=np.array([0.0, 1024.0]), end=np.array([1024.0, 2048.0]))
    assert np.all(np.diff(np.asarray(grid.forward)) > 0)
    # Cutting a sequence computes nothing less.
    assert np.sum(grid.forward) > times().forward


def attending(**settings: object) -> Layer:
    assert BLOCK.attention is not None
    return replace(BLOCK, attention=replace(BLOCK.attention, **settings))


def of(layer: Layer, **grid: object) -> LayerTimes:
    sizes = {"tensor_parallel_size": 1.0, "micro_batch_size": 1.0, "start": 0.0, "end": 2048.0} | grid
    return Roofline(HardwareEfficiency(), TERAPIPE)(LayerQuery(layer, A100, **sizes))  # type: ignore[arg-type]


def test_token_slices_behind_a_full_window_take_as_long_as_each_other() -> None:
    starts = np.array([0.0, 512.0, 1024.0, 1536.0])
    for software_reads in ({}, {"written_out": True}):
        layer = attending(sliding_window=400, **software_reads)
        grid = of(layer, start=starts, end=starts + 512)
        first, *others = np.asarray(grid.forward)
        assert others == pytest.approx([others[0]] * 3, rel=1e-12)
        assert (
            first < others[0] < np.asarray(of(attending(**software_reads), start=starts, end=starts + 512).forward)[3]
        )


def test_a_window_costs_what_its_pairs_do() -> None:
    """Of a whole sequence, a window of a quarter has 7/16 of the pairs; each row has its fixed time beside them."""
    small = replace(HardwareEfficiency(), memory_efficiency=1.0)
    roofline = Roofline(small, TERAPIPE)
    device = replace(A100, memory_bandwidth=1e30)

    def attention_s(layer: Layer) -> float:
        def forward(what: Layer) -> float:
            sizes = {"tensor_parallel_size": 1.0, "micro_batch_size": 1.0, "start": 0.0, "end": 2048.0}
            return float(roofline(LayerQuery(what, device, **sizes)).forward)  # type: ignore[arg-type]

        return forward(layer) - forward(replace(layer, attention=None))

    pairs = {window: sum(min(token + 1, window) for token in range(2048)) for window in (512, 2048)}
    fixed = 2048 * fused_attention("flash-attention-2", A100, "bf16", 128).fixed
    assert attention_s(attending(sliding_window=512)) / attention_s(BLOCK) == pytest.approx(
        (pairs[512] + fixed) / (pairs[2048] + fixed), rel=1e-9
    )


def test_attention_that_is_written_out_costs_more() -> None:
    flash, written = of(BLOCK), of(attending(written_out=True))
    assert written.forward > 1.2 * flash.forward
    assert written.input_gradient > 1.2 * flash.input_gradient
    assert written.weight_gradient == flash.weight_gradient


def test_norms_of_queries_and_keys_take_time_and_launches() -> None:
    plain, normed = of(BLOCK), of(attending(normed=True))
    assert normed.forward > plain.forward
    assert normed.launch_forward > plain.launch_forward


def test_windows_and_scores_in_grids_are_as_their_numbers() -> None:
    starts, lengths = np.array([[0.0], [700.0]]), np.array([64.0, 300.0, 1000.0])
    for settings_of_attention in ({"sliding_window": 400}, {"sliding_window": 400, "written_out": True}):
        layer = attending(**settings_of_attention)
        grid = of(layer, start=starts, end=starts + lengths)
        for row, start in enumerate(starts[:, 0].tolist()):
            for column, length in enumerate(lengths.tolist()):
                one = of(layer, start=start, end=start + length)
                for part, whole in zip(one[:3], grid[:3], strict=True):
                    assert np.asarray(whole)[row, column] == pytest.approx(part, rel=1e-12)


def test_grids_are_as_their_numbers() -> None:
    sizes, ranks = np.array([[1.0], [4.0]]), np.array([1.0, 2.0, 8.0])
    grid = times(MEGATRON_LM, micro_batch_size=sizes, tensor_parallel_size=ranks, recompute="full")
    for row, size in enumerate(sizes[:, 0]):
        for column, rank in enumerate(ranks):
            one = times(MEGATRON_LM, micro_batch_size=float(size), tensor_parallel_size=float(rank), recompute="full")
            for part, whole in zip(one[:3], grid[:3], strict=True):
                assert np.asarray(whole)[row, column] == pytest.approx(part, rel=1e-12)


FASTER = {
    "memory_bandwidth": lambda device, factor: replace(device, memory_bandwidth=device.memory_bandwidth * factor),
    "half_flops": lambda device, factor: replace(device, half_flops=device.half_flops * factor),
}


@settings(max_examples=30, deadline=None)
@given(
    what=st.sampled_from(sorted(FASTER)),
    factor=st.floats(1, 10),
    size=st.integers(1, 64),
    ranks=st.sampled_from([1, 2, 4, 8, 16]),
    software=st.sampled_from([TERAPIPE, MEGATRON_LM]),
    layer=st.sampled_from([GPT.layers[0], BLOCK, GPT.layers[-2], HEAD]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_a_faster_device_is_never_slower(
    what: str, factor: float, size: int, ranks: int, software: Software, layer: object, recompute: str
) -> None:
    roofline = Roofline(HardwareEfficiency(), software)
    grid = {
        "tensor_parallel_size": float(ranks),
        "micro_batch_size": float(size),
        "start": 0.0,
        "end": 2048.0,
        "recompute": recompute,
    }
    slow = roofline(LayerQuery(layer, A100, **grid))  # type: ignore[arg-type]
    fast = roofline(LayerQuery(layer, FASTER[what](A100, factor), **grid))  # type: ignore[arg-type]
    for one, other in zip(fast, slow, strict=True):
        assert one <= other * (1 + 1e-12)


def test_full_precision_has_the_other_peak_and_twice_the_bytes() -> None:
    grid = {"tensor_parallel_size": 1.0, "micro_batch_size": 2.0, "start": 0.0, "end": 2048.0}
    half = Roofline(HardwareEfficiency(), TERAPIPE)(LayerQuery(BLOCK, A100, **grid))  # type: ignore[arg-type]
    single = Roofline(HardwareEfficiency(), TERAPIPE, "fp32")(LayerQuery(BLOCK, A100, **grid))  # type: ignore[arg-type]
    assert 8 * half.forward < single.forward < 16 * half.forward
