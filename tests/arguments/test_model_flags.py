"""Flags that say what the model is only together with others."""

import pytest

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "activation"),
    [
        ("", "gelu"),
        ("--disable-bias-linear", "gelu-exact"),
        ("--no-bias-gelu-fusion", "gelu-exact"),
        ("--disable-bias-linear --add-qkv-bias", "gelu-exact"),
        ("--no-bias-gelu-fusion --activation gelu", "gelu"),
        ("--disable-bias-linear --activation relu", "relu"),
        ("--disable-bias-linear --openai-gelu", "gelu"),
        ("--no-bias-gelu-fusion --disable-bias-linear --swiglu", "swiglu"),
        ("--disable-bias-linear --model-preset gpt3-125m", "gelu"),
        ("--no-bias-gelu-fusion --model-preset gpt3-125m", "gelu"),
    ],
)
def test_the_form_of_gelu_is_megatrons(words: str, activation: str) -> None:
    sizes = "" if "preset" in words else "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128"
    line = f"{sizes} --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data {words}"
    assert parse_arguments(line.split()).model.activation == activation


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--position-embedding-type mrope",
            "--position-embedding-type mrope is not in this trainer: this model cannot be",
        ),
        ("--optimizer muon", "--optimizer muon is not in this trainer: this training cannot be run here"),
        (
            "--position-embedding-type rop",
            "--position-embedding-type rop is not known: choose learned_absolute, rope or",
        ),
    ],
)
def test_a_value_that_makes_another_model_is_not_to_be_replaced(words: str, line: str) -> None:
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2"
    with pytest.raises(ConfigError) as caught:
        parse_arguments(f"{sizes} --train-iters 10 --lr 1e-3 --mock-data {words}".split())
    assert str(caught.value).startswith(line)


def test_rows_of_the_vocabulary() -> None:
    line = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --train-iters 9"
    )
    words = f"{line} --lr 1e-3 --mock-data --padded-vocab-size 300".split()
    assert parse_arguments([*words, "--vocab-size", "299"]).model.padded_vocab_size(4) == 300
    with pytest.raises(ConfigError, match="--vocab-rows 300 has no room for the 301 tokens of --vocab-size: give 301"):
        parse_arguments([*words, "--vocab-size", "301"])
    with pytest.raises(ConfigError, match="--vocab-rows 300 is not a multiple of --tensor-model-parallel-size 8"):
        parse_arguments([*words, "--num-attention-heads", "8", "--tensor-model-parallel-size", "8"])
