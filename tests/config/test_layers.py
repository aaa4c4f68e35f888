"""Patterns over layers, and the shapes of layers that are not alike."""

import json
from typing import Any

import pytest

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape, layers_of_pattern, window_of_megatron
from megatron_terapipe.errors import ConfigError
from tests.model.configs import model_config


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("1", "1111"),
        ("2", "0101"),
        ("4", "0001"),
        ("5", "0000"),
        ("[0,1,1,0]", "0110"),
        ("[1]*4", "1111"),
        ("2*[0,1]", "0101"),
        (" ([0]*3+[1])*1 ", "0001"),
        ("[1]+[0]*2+[1]", "1001"),
    ],
)
def test_a_number_names_every_nth_layer_and_a_list_each(pattern: str, named: str) -> None:
    assert layers_of_pattern(pattern, 4, "--no-rope-freq") == tuple(each == "1" for each in named)


@pytest.mark.parametrize(
    "pattern",
    ["0", "-1", "x", "[2]*4", "[[1]]*4", "", "1+1", "[1]*-1", "[1]**4", "True", "[1]*10**9", "f()", "[1.0]*4"],
)
def test_wrong_patterns_are_refused_in_one_line(pattern: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of_pattern(pattern, 4, "--no-rope-freq")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--no-rope-freq {pattern} ")


def test_a_list_of_another_length() -> None:
    with pytest.raises(ConfigError, match=r"^--no-rope-freq \[1\]\*5 lists 5 layers, but --num-layers is 4: list each"):
        layers_of_pattern("[1]*5", 4, "--no-rope-freq")


def test_megatrons_window_does_not_count_the_token_itself() -> None:
    assert [window_of_megatron(text) for text in ("128,0", "(127, 0)", "-1,0")] == [129, 128, None]
    for text in ("128", "128,1", "-2,0", "-1,-1", "0,128", "a,b"):
        with pytest.raises(ValueError, match="is not N,0"):
            window_of_megatron(text)


def test_patterns_of_windows_and_rotations() -> None:
    for skipped, windows in ((None, [8, 8, 8, 8]), ("2", [8, None, 8, None]), ("[1,0,0,1]", [8, None, None, 8])):
        model = model_config(num_layers=4, sliding_window=8, window_attn_skip_freq=skipped)
        assert [block.window for block in model.blocks] == windows
    model = model_config(num_layers=4, position_embedding_type="rope", no_rope_freq="4")
    assert [block.rotated for block in model.blocks] == [True, True, True, False]


HEADS, HIDDEN = 8, 384
USUAL = {"num_key_value_heads": 4, "ffn_hidden_size": 640}


def megatrons(entry: dict[str, Any]) -> BlockShape:
    """The shape of a layer by megatron-core's reader; parts that it leaves open are as usual, as in its layers."""
    heterogeneous = pytest.importorskip("megatron.core.transformer.heterogeneous.heterogeneous_config")
    copied = json.loads(json.dumps(entry))  # it writes to what it reads
    attention = heterogeneous.AttentionConfig.build_config_from_dict(copied, HEADS)
    mlp = heterogeneous.MLPConfig.build_config_from_dict(copied, HIDDEN)
    return BlockShape(
        num_key_value_heads=0 if attention.no_op else attention.num_query_groups or USUAL["num_key_value_heads"],
        ffn_hidden_size=0 if mlp.no_op else mlp.ffn_hidden_size or USUAL["ffn_hidden_size"],
    )


def ours(entry: dict[str, Any]) -> BlockShape:
    text = json.dumps({"block_configs": [entry]})
    shape = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "seq_length": 16}
    (block,) = ModelConfig(heterogeneous_layers_config_path=text, **shape, **USUAL).blocks
    return block


FORMS = {
    "groups and width": {"attention": {"num_query_groups": 2}, "mlp": {"ffn_hidden_size": 100}},
    "heads in a group": {"attention": {"n_heads_in_group": 4}, "mlp": {"ffn_hidden_size": 100}},
    "no attention": {"attention": {"num_query_groups": None, "no_op": True}, "mlp": {"ffn_hidden_size": 100}},
    "as Nemotron's files": {
        "attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False},
        "ffn": {"ffn_mult": 2.625, "no_op": False, "replace_with_linear": False},
    },
    "no attention in Nemotron's files": {
        "attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False},
        "ffn": {"ffn_mult": 1.3125, "no_op": False, "replace_with_linear": False},
    },
    "no MLP in Nemotron's files": {
        "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
        "ffn": {"ffn_mult": None, "no_op": True, "replace_with_linear": False},
    },
    "a width that is rounded": {"attention": {"num_query_groups": 2}, "mlp": {"ffn_mult": 4}},
    "a tiny width": {"attention": {"num_query_groups": 2}, "mlp": {"ffn_mult": 0.01}},
}


@pytest.mark.parametrize("entry", FORMS.values(), ids=FORMS)
def test_the_same_layer_is_read(entry: dict[str, Any]) -> None:
    assert ours(entry) == megatrons(entry)


def test_parts_that_megatron_needs_may_be_left_out() -> None:
    assert ours({}) == ours({"attention": {"no_op": False}, "mlp": {}}) == BlockShape(**USUAL)
    both = {"attention": {"no_op": True}, "mlp": {"no_op": True}}
    assert ours(both) == BlockShape(num_key_value_heads=0, ffn_hidden_size=0)
