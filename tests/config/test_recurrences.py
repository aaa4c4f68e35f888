"""Layers with a state: the patterns that name them, their sizes, and values that are refused."""

from dataclasses import replace

import pytest
import torch

from megatron_terapipe.arguments import read_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.config.flops import balanced_token_slices, model_parameters
from megatron_terapipe.config.layers import Recurrence
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.inference import WholeModel
from tests.arguments.test_foreign_flags import REQUIRED

SIZES = "--hidden-size 64 --mamba-head-dim 16 --mamba-num-groups 4"
LINEAR = "--experimental-attention-variant gdn --linear-attention-freq"
MAMBA = Recurrence(kind="mamba2", num_heads=8, num_groups=4, key_size=128, value_size=16, conv_size=4)
DELTA = Recurrence(kind="gated-delta-net", num_heads=32, num_groups=16, key_size=128, value_size=128, conv_size=4)


def model_of(words: str) -> Config:
    return read_arguments((REQUIRED + words).split()).config


def test_symbols_of_a_pattern_are_layers_with_one_part() -> None:
    config = model_of(f"--num-layers 7 --hybrid-layer-pattern M-*|-GE* {SIZES} --num-experts 4 --ffn-hidden-size 96")
    shapes = [
        (block.recurrence, bool(block.num_key_value_heads), block.ffn_hidden_size, block.num_experts)
        for block in config.model.blocks
    ]
    mlp, attention = (None, False, 96, 0), (None, True, 0, 0)
    assert shapes == [
        *((MAMBA, False, 0, 0), mlp, attention, mlp),
        *((DELTA, False, 0, 0), (None, False, 96, 4), attention),
    ]
    assert config.model.hybrid_layer_pattern == "M-A-GEA", "stages are no part of a model"
    assert (config.parallel.stage_partition, config.parallel.num_model_chunks) == ("0,3,7", 2)


@pytest.mark.parametrize(
    ("pattern", "delta"), [("3", [1, 1, 0, 1, 1, 0]), ("([1]*2+[0])*2", [1, 1, 0, 1, 1, 0]), ("1", [0] * 6)]
)
def test_layers_with_linear_attention(pattern: str, delta: list[int]) -> None:
    words = f"--num-layers 6 {LINEAR} {pattern}"
    blocks = model_of(words).model.blocks
    assert [block.recurrence for block in blocks] == [DELTA if each else None for each in delta]
    assert all(bool(block.num_key_value_heads) is not bool(each) for block, each in zip(blocks, delta, strict=True))
    assert all(block.ffn_hidden_size for block in blocks)


@pytest.mark.parametrize("axis", ["--tensor-model-parallel-size", "--ds-sequence-parallel-size"])
def test_ranks_share_heads_of_attention_only_where_a_layer_has_it(axis: str) -> None:
    words = f"--num-layers 2 {SIZES} --num-attention-heads 1 {axis} 4 --hybrid-layer-pattern"
    assert model_of(f"{words} M-").model.num_attention_heads == 1
    with pytest.raises(ConfigError, match=f"--num-attention-heads 1 is not a multiple of {axis} 4"):
        model_of(f"{words} M*")


@pytest.mark.parametrize(
    "layers",
    [
        "--hybrid-layer-pattern M-*-G --num-layers 5",
        f"--num-layers 3 {LINEAR} 3",
        # With biases, a gate of the shared experts, and layers without experts.
        "--num-experts 4 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate",
    ],
)
def test_parameters_are_those_of_the_model(layers: str) -> None:
    model = model_of(f"{layers} {SIZES} --linear-num-key-heads 4 --linear-value-head-dim 24 --vocab-size 100").model
    with torch.device("meta"):
        built = WholeModel(model)
    assert model_parameters(model) == sum(weight.numel() for weight in built.parameters())


def test_token_slices_of_equal_work_are_equal_without_attention() -> None:
    model = model_of(f"--num-layers 4 --hybrid-layer-pattern M-G- {SIZES}").model
    assert balanced_token_slices(model, 4).lengths == (32,) * 4
    assert len(set(balanced_token_slices(replace(model, hybrid_layer_pattern="M-*-"), 4).lengths)) > 1
