"""Formulas of the model against published numbers and closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model import flops


def gpt(
    layers: int, hidden: int, heads: int, seq_length: int = 2048, vocab_size: int = 51200, **given: int
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
    ("layers", "hidden", "heads", "parameters"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ],
)
def test_gpt2_parameters(layers: int, hidden: int, heads: int, parameters: int) -> None:
    """The released GPT-2 small, medium, large and XL, counted from their checkpoints."""
    assert flops.model_parameters(gpt(layers, hidden, heads, 1024, 50257)) == parameters


def test_gpt3_parameters() -> None:
    """GPT-3 175B (arXiv 2005.14165 table 2.1)."""
    assert flops.model_parameters(gpt(96, 12288, 96, 2048, 50257)) / 1e9 == pytest.approx(175, abs=0.5)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions"),
    [
        (24, 2304, 24, 1.7),
        (30, 3072, 32, 3.6),
        (36, 4096, 32, 7.5),
        (40, 6144, 48, 18.4),
        (48, 8192, 64, 39.1),
        (60, 10240, 80, 76.1),
        (80, 12288, 96, 145.6),
        (96, 16384, 128, 310.1),
        (105, 20480, 128, 529.6),
        (128, 25600, 160, 1008.0),
    ],
)
def test_sc21_table_1_parameters(layers: int, hidden: int, heads: int, billions: float) -> None:
    """The models of arXiv 2104.04473 table 1, to the digit printed."""
    assert flops.model_parameters(gpt(layers, hidden, heads)) / 1e9 == pytest.approx(billions, abs=0.06)


@given(layers=draw.integers(1, 100), heads=draw.integers(1, 64), width=draw.integers(1, 128), batch=draw.integers(1, 9))
def test_closed_forms(layers: int, heads: int, width: int, batch: int) -> None:
    """SC'21 equations 2 and 3, and Korthikanti appendix A, hold exactly for h = heads x width and f = 4h."""
    h, s, v = heads * width, 256, 1000
    model = gpt(layers, h, heads, s, v)
    assert flops.block_parameters(model) == 12 * h**2 + 13 * h
    assert flops.embedding_parameters(model) == (v + s) * h
    shared = batch * layers * s * h**2
    useful = 72 * shared * (1 + s / (6 * h) + v / (12 * h * layers))
    assert flops.iteration_flops(model, batch) == pytest.approx(useful, rel=1e-12)
    executed = 96 * shared * (1 + s / (6 * h) + v / (16 * layers * h))
    assert flops.iteration_flops(model, batch, recompute=True) == pytest.approx(executed, rel=1e-12)


@given(draw.lists(draw.integers(1, 40), min_size=1, max_size=6))
def test_token_slices_add_up_to_the_sequence(lengths: list[int]) -> None:
    model = gpt(2, 32, 4, sum(lengths), 100)
    prefixes = [sum(lengths[:index]) for index in range(len(lengths))]
    parts = sum(flops.block_forward_flops(model, *part) for part in zip(lengths, prefixes, strict=True))
    assert parts == flops.block_forward_flops(model, sum(lengths))
    assert parts == sum(flops.token_forward_flops(model, position) for position in range(sum(lengths)))


def test_causal_attention_is_about_half() -> None:
    model = gpt(1, 64, 4, 1024, 1)
    attention = flops.attention_flops_per_position(model)
    saved = flops.iteration_flops(model, 1) - flops.iteration_flops(model, 1, causal=True)
    assert saved == 3 * attention * (1024 * 1023 // 2)


def test_activation_bytes_are_korthikantis_less_dropout_and_scores() -> None:
    model = gpt(1, 64, 4)
    assert flops.block_activation_bytes_per_token(model, 2) == (34 - 2) * 64 + 4 * 4
    assert flops.key_value_bytes_per_token(model, 2) == 4 * 64


def test_grouped_query_attention_and_untied_output() -> None:
    full, grouped = gpt(1, 64, 4), gpt(1, 64, 4, num_key_value_heads=1)
    fewer = 2 * 3 * 16  # three heads less of keys and of values, 16 wide
    assert flops.block_parameters(full) - flops.block_parameters(grouped) == fewer * 64 + fewer
    assert flops.key_value_bytes_per_token(grouped, 4) == 2 * 16 * 4
    untied = gpt(1, 64, 4, untie_embeddings_and_output_weights=True)
    assert flops.model_parameters(untied) - flops.model_parameters(full) == 51200 * 64
