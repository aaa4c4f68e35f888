"""Descriptions of uneven layers as megatron-core itself reads them."""

import json
from typing import Any

import pytest

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape

HEADS, HIDDEN = 8, 384
USUAL = {"num_key_value_heads": 4, "ffn_hidden_size": 640}


def megatrons(entry: dict[str, Any]) -> BlockShape:
    """The shape of a layer by megatron-core's reader; what it leaves open is as usual, as its layers have it."""
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
