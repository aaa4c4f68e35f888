"""Parameters, FLOPs, attended positions and bytes, against the papers and by hand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as draw

from benchmarks.measuring.closed_forms import block_activation_bytes_per_token, key_value_bytes_per_token
from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.config.flops import attended_positions, positions_in_reach
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.config.presets import find_preset


def gpt(
    layers: int, hidden: int, heads: int, seq_length: int = 2048, vocab_size: int = 51200, **given: Any
) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=seq_length,
        vocab_size=vocab_size,
        make_vocab_size_divisible_by=1,
        **given,
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions"),
    [
        *((24, 2304, 24, 1.7), (30, 3072, 32, 3.6), (36, 4096, 32, 7.5), (40, 6144, 48, 18.4), (48, 8192, 64, 39.1)),
        *((60, 10240, 80, 76.1), (80, 12288, 96, 145.6), (96, 16384, 128, 310.1), (105, 20480, 128, 529.6)),
        (128, 25600, 160, 1008.0),
    ],
)
def test_sc21_table_1_parameters(layers: int, hidden: int, heads: int, billions: float) -> None:
    """The models of arXiv 2104.04473 table 1, to the digit printed."""
    assert flops.model_parameters(gpt(layers, hidden, heads)) / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),  # arXiv 2401.04088
        ("qwen3-30b-a3b", 3.3),  # arXiv 2505.09388; 3.353, which the paper cuts off
        ("olmoe-1b-7b", 1.3),  # arXiv 2409.02060
        ("gpt-oss-20b", 3.61 + 0.58),  # arXiv 2508.10925 table 1, which leaves the embedding out
        ("gpt-oss-120b", 5.13 + 0.58),
        ("deepseek-v3", 37.55),  # arXiv 2412.19437: 37
        ("kimi-k2", 32.9),  # arXiv 2507.20534: 32.6
    ],
)
def test_published_active_parameters_of_mixtures(name: str, billions: float) -> None:
    model = ModelConfig(**find_preset(name).settings)
    assert flops.model_parameters(model, active=True) == pytest.approx(1e9 * billions, abs=0.054e9)


def test_flops_of_experts_are_those_of_megatron() -> None:
    """Megatron-LM's `num_floating_point_operations` for SwiGLU, whose `moe_layer_flops` leaves the router out:
    3 x (4 x 1.5 h (K f + f_shared)) a token and layer, beside attention and logits."""
    settings = {"moe_shared_expert_intermediate_size": 512, "make_vocab_size_divisible_by": 1, "seq_length": 4096}
    model = ModelConfig(**{**find_preset("qwen3-30b-a3b").settings, **settings})
    attention = 2 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128) + 4 * 32 * 128 * 4096
    experts, router = 4 * 1.5 * 2048 * (8 * 768 + 512), 2 * 2048 * 128
    each = 48 * (attention + experts + router) + 2 * 2048 * 151936
    assert flops.iteration_flops(model, 2) == 2 * 3 * 4096 * each


@given(layers=draw.integers(1, 100), heads=draw.integers(1, 64), width=draw.integers(1, 128), batch=draw.integers(1, 9))
def test_closed_forms(layers: int, heads: int, width: int, batch: int) -> None:
    """SC'21 equations 2 and 3, and Korthikanti appendix A, hold exactly for h = heads x width and f = 4h."""
    h, s, v = heads * width, 256, 1000
    model = gpt(layers, h, heads, s, v)
    assert flops.block_parameters(model, model.blocks[0]) == 12 * h**2 + 13 * h
    assert flops.embedding_parameters(model) == (v + s) * h
    shared = batch * layers * s * h**2
    useful = 72 * shared * (1 + s / (6 * h) + v / (12 * h * layers))
    assert flops.iteration_flops(model, batch) == pytest.approx(useful, rel=1e-12)
    executed = 96 * shared * (1 + s / (6 * h) + v / (16 * layers * h))
    assert flops.iteration_flops(model, batch, recompute=True) == pytest.approx(executed, rel=1e-12)


@given(draw.lists(draw.integers(1, 40), min_size=1, max_size=6), draw.none() | draw.integers(1, 80))
def test_token_slices_add_up_to_the_sequence(lengths: list[int], window: int | None) -> None:
    model = gpt(2, 32, 4, sum(lengths), 100, sliding_window=window)
    block = model.blocks[0]
    prefixes = [sum(lengths[:index]) for index in range(len(lengths))]
    parts = sum(flops.block_forward_flops(model, block, *part) for part in zip(lengths, prefixes, strict=True))
    assert parts == flops.block_forward_flops(model, block, sum(lengths))
    assert parts == sum(flops.block_forward_flops(model, block, 1, position) for position in range(sum(lengths)))


@pytest.mark.parametrize(
    ("name", "given", "full", "causal"),
    [
        # Printed for one sequence, as the tables of NVIDIA/dgxc-benchmarking compute MFU.
        ("llama3-70b", {"seq_length": 8192}, 3.94e15, None),
        # Checked by hand: 3 passes of 2 FLOPs over 16 layers x 60.8 M and the head, and scores of 32 heads x 64.
        ("llama3-1b", {"seq_length": 32768}, 665.2e12, 454.1e12),
    ],
)
def test_both_readings(name: str, given: dict[str, int], full: float, causal: float | None) -> None:
    settings = dict(find_preset(name).settings) | given | {"max_position_embeddings": given["seq_length"]}
    model = ModelConfig(**settings)
    assert flops.iteration_flops(model, 1) == pytest.approx(full, rel=2e-3)
    if causal is not None:
        assert flops.iteration_flops(model, 1, causal=True) == pytest.approx(causal, rel=2e-4)


def test_causal_attention_is_about_half() -> None:
    model = gpt(1, 64, 4, 1024, 1)
    attention = flops.attention_flops_per_position(model, model.blocks[0])
    saved = flops.iteration_flops(model, 1) - flops.iteration_flops(model, 1, causal=True)
    assert saved == 3 * attention * (1024 * 1023 // 2)


def test_tokens_in_a_window_attend_to_as_many_as_it_has() -> None:
    model = gpt(2, 64, 4, 1024, 1)
    alternating = gpt(2, 64, 4, 1024, 1, sliding_window=100, window_attn_skip_freq="2")
    attention = flops.attention_flops_per_position(model, model.blocks[0])
    saved = flops.iteration_flops(model, 1) - flops.iteration_flops(alternating, 1)
    assert saved == 3 * attention * 1024 * (1024 - 100)
    saved = flops.iteration_flops(model, 1, causal=True) - flops.iteration_flops(alternating, 1, causal=True)
    assert saved == 3 * attention * sum(max(position + 1 - 100, 0) for position in range(1024))


def test_activation_bytes_are_korthikantis_less_dropout_and_scores() -> None:
    model = gpt(1, 64, 4)
    block = model.blocks[0]
    assert block_activation_bytes_per_token(model, block, 2) == (34 - 2) * 64 + 4 * 4
    assert key_value_bytes_per_token(model, block, 2) == 4 * 64
    # Selective: two outputs of norms (h each) and one of the activation (4h) less.
    assert block_activation_bytes_per_token(model, block, 2, "selective") == (32 - 2 * 6) * 64 + 4 * 4
    # Full: the block's input, keys and values.
    assert block_activation_bytes_per_token(model, block, 2, "full") == (2 + 4) * 64


def test_grouped_query_attention_and_a_gate() -> None:
    full, grouped, gated = gpt(1, 64, 4), gpt(1, 64, 4, num_key_value_heads=1), gpt(1, 64, 4, activation="swiglu")
    assert key_value_bytes_per_token(grouped, grouped.blocks[0], 4) == 2 * 16 * 4
    # Every query head still scores every position.
    assert len({flops.attention_flops_per_position(model, model.blocks[0]) for model in (full, grouped)}) == 1
    plain = gpt(1, 64, 4, ffn_hidden_size=gated.ffn_hidden_size)
    kept = [block_activation_bytes_per_token(model, model.blocks[0], 1) for model in (plain, gated)]
    assert kept[1] - kept[0] == gated.ffn_hidden_size


def test_parts_left_out_count_nothing() -> None:
    """Counts of a block are the sum of those of its attention and its MLP."""
    model = gpt(1, 64, 4, num_key_value_heads=2, activation="swiglu", ffn_hidden_size=100)
    both, attention, mlp, nothing = (
        BlockShape(num_key_value_heads=groups, ffn_hidden_size=width)
        for groups, width in [(2, 100), (2, 0), (0, 100), (0, 0)]
    )
    for count in (
        flops.block_parameters,
        flops.linear_flops_per_token,
        flops.attention_flops_per_position,
        lambda *given: flops.block_forward_flops(*given, 7, 5),
        lambda *given: key_value_bytes_per_token(*given, 2),
        lambda *given: block_activation_bytes_per_token(*given, 2),
        lambda *given: block_activation_bytes_per_token(*given, 2, "selective"),
    ):
        assert count(model, nothing) == 0
        assert count(model, attention) + count(model, mlp) == count(model, both) > 0
    assert key_value_bytes_per_token(model, mlp, 2) == 0


def test_uneven_layers_add_up() -> None:
    given = {"num_key_value_heads": 2, "ffn_hidden_size": 100}
    layers = '{"block_configs": [{}, {"attention": {"no_op": true}}, {"mlp": {"ffn_hidden_size": 40}}]}'
    model = gpt(3, 64, 4, 256, 1000, heterogeneous_layers_config_path=layers, **given)
    even = gpt(3, 64, 4, 256, 1000, **given)
    less = sum(
        flops.block_forward_flops(even, usual, 256) - flops.block_forward_flops(even, block, 256)
        for usual, block in zip(even.blocks, model.blocks, strict=True)
    )
    saved = flops.iteration_flops(even, 2, causal=True) - flops.iteration_flops(model, 2, causal=True)
    assert saved == 2 * 3 * less > 0


tokens = draw.integers(0, 60)


@given(start=tokens, length=tokens, window=draw.none() | draw.integers(1, 80))
def test_every_pair_is_counted_once(start: int, length: int, window: int | None) -> None:
    end = start + length
    seen = [{key for key in range(token + 1) if window is None or key > token - window} for token in range(start, end)]
    assert attended_positions(start, end, window) == sum(map(len, seen))
    if length:
        # Without a window all from the first on, to which later ones attend.
        assert positions_in_reach(start, end, window) == len(set().union(*seen))


@given(
    bounds=draw.lists(draw.tuples(tokens, tokens), min_size=1, max_size=5), window=draw.none() | draw.integers(1, 80)
)
def test_arrays_are_as_their_numbers(bounds: list[tuple[int, int]], window: int | None) -> None:
    starts = np.array([start for start, _ in bounds], dtype=float)
    ends = starts + np.array([length for _, length in bounds])
    for count in (attended_positions, positions_in_reach):
        one_by_one = [count(*pair, window) for pair in zip(starts.tolist(), ends.tolist(), strict=True)]
        assert count(starts, ends, window).tolist() == one_by_one
