"""A `config.json` is read with its types checked, and refused in one line where our models cannot be so."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import ConfigError, UserError
from megatron_terapipe.huggingface.families.registry import FAMILIES, family_of, read_fields, read_model
from megatron_terapipe.huggingface.families.settings_file import SettingsFile


def read(name: str, **settings: Any) -> ModelConfig:
    return FAMILIES[name].read(SettingsFile(settings, "config.json"))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("llama", {"hidden_size": "64"}, "sets hidden_size to 64, and it must be a whole number above 0: correct the"),
        ("llama", {"rope_parameters": "oops"}, "sets rope_parameters to oops, and it must be a JSON object"),
        ("llama", {"intermediate_size": [128, 128]}, "sets intermediate_size to [128, 128], and it must be a whole"),
        ("llama", {"num_attention_heads": None}, "sets num_attention_heads to null, and it must be a whole number"),
        ("llama", {"num_attention_heads": 5}, "makes no model: --hidden-size 4096 is not a multiple of"),
        ("llama", {"num_key_value_heads": 3}, "makes no model: --num-key-value-heads 3 does not divide"),
        ("llama", {"hidden_act": ["silu"]}, "sets hidden_act to ['silu'], and our models have silu or"),
        ("llama", {"attention_bias": 1}, "sets attention_bias to 1, and it must be true or false"),
        ("llama", {"rms_norm_eps": True}, "sets rms_norm_eps to true, and it must be a number above 0"),
        ("llama", {"rms_norm_eps": float("nan")}, "sets rms_norm_eps to nan, and it must be a number above 0"),
        ("llama", {"rope_theta": None}, "sets rope_theta to null, and it must be a number above 0"),
        ("llama", {"rope_scaling": {"rope_type": 3}}, "rope_scaling sets rope_type to 3, and it must be a word"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling leaves out factor, which must be a number above"),
        ("llama", {"partial_rotary_factor": 0.5}, "sets partial_rotary_factor to 0.5, and our models have 1 or null"),
        (
            "llama",
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "as longrope, and our models as default, linear",
        ),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": False}}, "sets truncate to false"),
        ("llama", {"pretraining_tp": 2}, "sets pretraining_tp to 2, and our models have 1 or null"),
        ("llama", {"quantization_config": {"bits": 4}}, "sets quantization_config to {'bits': 4}, and our models have"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "sets scale_attn_by_inverse_layer_idx to true"),
        ("gpt2", {"add_cross_attention": True}, "sets add_cross_attention to true, and our models have false"),
        ("mistral", {"layer_types": ["full_attention"] * 32}, "has layer_types beside one sliding_window"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 32}, "has layers of sliding_attention and no sliding_window"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 32}, "has a layer of chunked_attention, and our models have"),
        ("gemma2", {"layer_types": ["full_attention"]}, "lists 1 layers in layer_types, and has 26"),
        ("gemma2", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention to true"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "has neither full_attention nor sliding_attention"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sets rope_type to linear, and our models have default",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "as longrope, and our models as default"),
        ("smollm3", {"use_sliding_window": True}, "sets use_sliding_window to true, and our models have false"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "lists 2 layers in no_rope_layers, and has 36"),
        ("stablelm", {"qk_layernorm": True}, "sets qk_layernorm to true, and our models have false"),
        ("falcon", {"alibi": True}, "sets alibi to true, and our models have false or null"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "for which transformers has no layer"),
        ("opt", {"do_layer_norm_before": False}, "sets do_layer_norm_before to false, and our models have true"),
        ("opt", {"hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512}, "word_embed_proj_dim to"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(name, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json")


@pytest.mark.parametrize("name", ["mixtral", "bloom", "gemma3", "phi", "olmo", "mamba"])
def test_other_families_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ConfigError, match=f"config.json is a model of type {name}, which cannot be trained here"):
        read_model(tmp_path, "--load")


@pytest.mark.parametrize("text", ["[]", "{", '{"model_type": 3}', "{}"])
def test_a_file_that_is_no_model_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_model(tmp_path / "config.json", "--load")


def test_of_two_sections_of_rotations_the_one_that_transformers_reads_counts() -> None:
    model = read(
        "llama",
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
        rope_theta=5000.0,
    )
    assert (model.rotary_scaling, model.rotary_scaling_factor, model.rotary_base) == ("linear", 4.0, 5000.0)
    model = read("llama", rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert (model.rotary_scaling, model.rotary_base) == ("none", 77.0)
    assert read("llama", rope_scaling={}, rope_theta=5000.0).rotary_base == 5000.0


def test_patterns_of_layers() -> None:
    assert read("gemma2").window_attn_skip_freq == "2"
    assert read("gemma3_text").window_attn_skip_freq == "6"
    assert read("smollm3").no_rope_freq == "4"
    assert read("qwen2", use_sliding_window=True).window_attn_skip_freq == "[0]*28+[1]*4"
    windows = [block.window for block in read("qwen2", use_sliding_window=True).blocks]
    assert windows == [None] * 28 + [4096] * 4
    assert read("gemma2", layer_types=["full_attention"] * 26).sliding_window is None


def test_the_length_of_sequences_is_no_setting_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    fields = read_fields(tmp_path, "--model-preset")
    assert "seq_length" not in fields
    assert fields["max_position_embeddings"] == 131072
    # What follows from other sizes is left to follow.
    assert "kv_channels" not in fields


def test_a_model_is_written_as_the_first_family_that_has_it() -> None:
    assert family_of(read("llama")).name == "llama"
    assert family_of(read("mistral", sliding_window=None)).name == "llama"
    assert family_of(read("phi3", sliding_window=9)).name == "mistral"
    assert family_of(read("falcon")).name == "falcon"
    assert family_of(read("opt")).name == "gpt2"
