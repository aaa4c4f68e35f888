"""A `config.json` is read with its types checked, and refused in one line where our models cannot be so."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.config.flops import model_parameters
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.registry import FAMILIES, family_of, read_fields, read_model
from megatron_terapipe.huggingface.families.settings import SettingsFile


def read(name: str, **settings: Any) -> ModelConfig:
    return FAMILIES[name].read(SettingsFile(settings, "config.json"))


ALPHA = {"rope_scaling": {"type": "dynamic", "alpha": 1e300}}
NUMBERS_OF_LAYERS = {name: "n_layer" if name in ("gpt2", "gpt_bigcode") else "num_hidden_layers" for name in FAMILIES}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("llama", {"hidden_size": "64"}, 'sets hidden_size to "64", and it must be a whole number above 0'),
        ("llama", {"rope_parameters": "oops"}, 'sets rope_parameters to "oops", and it must be a JSON object'),
        ("llama", {"intermediate_size": [128, 128]}, "sets intermediate_size to [128, 128], and it must be a whole"),
        ("llama", {"num_attention_heads": None}, "sets num_attention_heads to null, and it must be a whole number"),
        (
            "seed_oss",
            {"attention_bias": False, "attention_out_bias": True},
            "has attention_out_bias without attention_bias",
        ),
        ("llama", {"num_attention_heads": 5}, "makes no model: --hidden-size 4096 is not a multiple of"),
        ("llama", {"num_key_value_heads": 3}, "makes no model: --num-key-value-heads 3 does not divide"),
        ("llama", {"hidden_act": ["silu"]}, 'sets hidden_act to ["silu"], and our models have "silu" or'),
        ("llama", {"attention_bias": 1}, "sets attention_bias to 1, and it must be true or false"),
        ("llama", {"rms_norm_eps": True}, "sets rms_norm_eps to true, and it must be a number above 0"),
        ("llama", {"rms_norm_eps": float("nan")}, "sets rms_norm_eps to NaN, and it must be a number above 0"),
        ("llama", {"rope_theta": None}, "sets rope_theta to null, and it must be a number above 0"),
        ("llama", {"rope_scaling": {"rope_type": 3}}, "rope_scaling sets rope_type to 3, and it must be a word"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling leaves out factor, which must be a number above"),
        ("llama", {"partial_rotary_factor": 0.5}, "sets partial_rotary_factor to 0.5, and our models have 1 or null"),
        ("llama", {"rope_scaling": {"type": "proportional", "factor": 2}}, "as proportional, and our models not"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 0}}, "sets truncate to 0, and it must be"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "rope_parameters sets full_attention"),
        ("qwen2", {"use_sliding_window": "false"}, 'sets use_sliding_window to "false", and it must be true or false'),
        ("llama", {"quantization_config": {"bits": 4}}, 'sets quantization_config to {"bits": 4}, and weights are'),
        ("deepseek_v3", {"attention_bias": True}, "sets attention_bias to true, and latents have no biases here"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "--multi-latent-attention gives every head its own"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "not chosen by the best one of their group"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "sets scale_attn_by_inverse_layer_idx to true"),
        ("gpt2", {"add_cross_attention": True}, "sets add_cross_attention to true, and our models have false"),
        ("mistral", {"layer_types": ["full_attention"] * 32}, "has layer_types and one sliding_window"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 32}, "has layers of sliding_attention and no sliding_window"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 32}, "has a layer of chunked_attention, and our models have"),
        ("gemma2", {"layer_types": ["full_attention"]}, "lists 1 layers in layer_types, and has 26"),
        ("gemma2", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention to true"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "has neither full_attention nor sliding_attention"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            'sets rope_type to "linear", and our models have "default"',
        ),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "leaves out short_factor, which must be a list of numbers"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "as linear, and our models not at all, or as long"),
        ("smollm3", {"use_sliding_window": True}, "sets use_sliding_window to true, and our models have false"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "lists 2 layers in no_rope_layers, and has 36"),
        (
            "gemma3_text",
            {"attn_logit_softcapping": 50.0},
            "sets attn_logit_softcapping to 50.0, and our models have null",
        ),
        (
            "gpt2",
            {"num_hidden_layers": "two"},
            'sets num_hidden_layers to "two", and it must be a whole number above 0',
        ),
        ("helium", {"head_dim": 64}, "sets head_dim to 64, and our models have 128"),
        ("cohere", {"use_qk_norm": True}, "sets use_qk_norm to true, and our models have false or null"),
        ("cohere2", {"sliding_window": None}, "sets sliding_window to null, and it must be a whole number above 0"),
        ("olmo", {"clip_qkv": 8.0}, "sets clip_qkv to 8.0, and our models have null"),
        ("phi", {"tie_word_embeddings": True}, "has weights of its own in our models: train it as layers of your own"),
        ("granite", {"logits_scaling": 5e-324}, "makes no model: --logit-multiplier 9.9"),
        *((name, {key: 10**12}, f"sets {key} to 1000000000000, and it") for name, key in NUMBERS_OF_LAYERS.items()),
        ("gptj", {"n_embd": 8, "n_head": 16}, "makes no model (division by zero): correct its numbers"),
        ("hunyuan_v1_dense", {"head_dim": 4, **ALPHA}, "makes no model (Numerical result out of range): correct"),
        ("stablelm", {"qk_layernorm": True}, "sets qk_layernorm to true, and our models have false"),
        ("falcon", {"alibi": True}, "sets alibi to true, and our models have false or null"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "for which transformers has no layer"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 48}, "full_attention and linear_attention: this model"),
        ("qwen3_next", {"hidden_act": "gelu"}, 'sets hidden_act to "gelu", and our models have "silu"'),
        ("qwen3_5_text", {"num_experts": 8}, "sets num_experts to 8, and experts are not in this type of model"),
        ("mixtral", {"num_local_experts": 0}, "makes no model: --num-experts 0 is"),
        (
            "glm4_moe",
            {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 6},
            "sets topk_group to 4 and num_experts_per",
        ),
        ("opt", {"do_layer_norm_before": False}, "sets do_layer_norm_before to false, and our models have true"),
        ("opt", {"hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512}, "word_embed_proj_dim to"),
    ],
)
def test_invalid_settings_are_named_in_one_line(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(name, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, r"which is none of the \d\d families of .*") for name in ("bloom", "gemma3")),
        *((name, "whose attention chooses its keys by an indexer") for name in ("deepseek_v32", "glm_moe_dsa")),
    ],
)
def test_other_families_are_named(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ConfigError, match=f"is a model of type {name}, {reason}: train it as layers"):
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


def test_settings_mean_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """Bounds of steps as files of transformers 4 have them; biases that it reads, and makes none of."""
    settings = {"time_step_limit": [0.0, float("inf")], "attention_bias": True, "hybrid_override_pattern": "M*-"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nemotron_h", **settings}))
    _, model = read_model(tmp_path, "--load")
    assert not model.has_qkv_bias
    (difference,) = FAMILIES["nemotron_h"].differences(replace(model, add_qkv_bias=True))
    assert difference.startswith("biases of queries, keys and values, and Hugging Face's nemotron_h no")


PHI3 = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
PHI3_LISTS = {"short_factor": [1.0] * 48, "long_factor": [1.5] * 48}


def test_longrope_of_phi3_has_its_lengths_outside() -> None:
    model = read("phi3", **PHI3, rope_scaling={"type": "su", **PHI3_LISTS, "original_max_position_embeddings": 2})
    assert (model.rotary_scaling, model.rotary_original_length, model.rotary_scaling_factor) == ("longrope", 4096, 32)
    assert model.rotary_attention_factor == pytest.approx(1.1902380714238083)  # sqrt(1 + ln 32 / ln 4096)
    assert model.rotary_long_factors == ",".join(["1.5"] * 48)
    given = {"attention_factor": 1.25, "factor": 2.0}
    other = read(
        "llama", rope_scaling={"type": "longrope", **LISTS_OF_64, "original_max_position_embeddings": 9, **given}
    )
    assert (other.rotary_original_length, other.rotary_attention_factor, other.rotary_scaling_factor) == (9, 1.25, 2.0)


@pytest.mark.parametrize(
    ("name", "settings", "keys", "remarks"),
    [
        ("olmo3", {}, {"rope_theta": 5e5, "rope_scaling": None}, []),
        ("olmo3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {}, ["read it with transformers 5.16 or"]),
        (
            "phi3",
            {**PHI3, "rope_scaling": {"type": "su", **PHI3_LISTS}},
            {"rope_scaling": {"type": "longrope", **PHI3_LISTS}},
            [],
        ),
        (
            "phi3",
            {**PHI3, "rope_scaling": {"type": "su", **PHI3_LISTS, "factor": 2.0}},
            {},
            ["read it with transformers"],
        ),
        ("mamba2", {"n_groups": 1}, {}, []),
        ("mamba2", {}, {}, ["read it with transformers 5.23"]),
        ("qwen3_5_text", {}, {}, ["read it with transformers 5.2 or"]),
    ],
)
def test_files_are_as_transformers_4_reads_them_or_name_the_version(
    name: str, settings: dict[str, Any], keys: dict[str, Any], remarks: list[str]
) -> None:
    """As tried with 4.57, 5.2, 5.10 and 5.24."""
    model = read(name, **settings)
    written = FAMILIES[name].write(model)
    assert {key: written[key] for key in keys} == keys
    assert [each[: len(said)] for each, said in zip(FAMILIES[name].remarks(model), remarks, strict=True)] == remarks


LISTS_OF_64 = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


def test_whole_numbers_are_written_as_numbers() -> None:
    """Transformers reads no whole number where a setting may be a fraction."""
    written = FAMILIES["gemma2"].write(read("gemma2", final_logit_softcapping=30, rms_norm_eps=1))
    assert [type(written[key]) for key in ("final_logit_softcapping", "rms_norm_eps")] == [float, float]


def test_patterns_of_layers() -> None:
    assert read("gemma2").window_attn_skip_freq == "2"
    assert read("gemma3_text").window_attn_skip_freq == "6"
    assert read("smollm3").no_rope_freq == "4"
    assert read("qwen2", use_sliding_window=True).window_attn_skip_freq == "[0]*28+[1]*4"
    windows = [block.window for block in read("qwen2", use_sliding_window=True).blocks]
    assert windows == [None] * 28 + [4096] * 4
    assert read("gemma2", layer_types=["full_attention"] * 26).sliding_window is None


def test_delta_nets_are_compared_by_layer_and_not_by_the_text_of_a_pattern() -> None:
    model = read("qwen3_next", num_experts=0)
    assert (model.linear_attention_freq, model.num_experts) == ("4", None)
    assert read("qwen3_next", num_experts=0, full_attention_interval=3).linear_attention_freq == "3"
    assert family_of(replace(model, linear_attention_freq="([1]*3+[0])*12")).name == "qwen3_next"
    (difference,) = FAMILIES["qwen3"].differences(replace(read("qwen3"), attention_output_gate=True))
    assert difference.startswith("--attention-output-gate, and")
    listed = read("qwen3_5_text", layer_types=["full_attention", *["linear_attention"] * 31])
    assert listed.linear_attention_freq == "[0]*1+[1]*31"


def test_the_length_of_sequences_is_no_setting_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    _, fields = read_fields(tmp_path, "--model-preset")
    assert "seq_length" not in fields
    assert fields["max_position_embeddings"] == 131072
    # Derived sizes are not set.
    assert "kv_channels" not in fields


def test_a_model_is_written_as_the_first_family_that_has_it() -> None:
    assert family_of(read("llama")).name == "llama"
    assert family_of(read("mistral", sliding_window=None)).name == "llama"
    assert family_of(read("phi3", sliding_window=9)).name == "mistral"
    assert family_of(read("opt")).name == "gpt2"
    # Families of pairs of parts are compared, too.
    assert family_of(read("nemotron_h", hybrid_override_pattern="M*--")).name == "nemotron_h"


def sizes(*numbers: int) -> dict[str, int]:
    """Layers, hidden size, width of MLPs, heads, key heads and words."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "vocab_size"), numbers, strict=True))


@pytest.mark.parametrize(
    ("name", "settings", "published"),
    [
        ("llama", sizes(32, 4096, 14336, 32, 8, 128256), 8.03e9),
        ("gemma2", sizes(42, 3584, 14336, 16, 8, 256000), 9.24e9),
        ("granite", {**sizes(40, 2048, 8192, 32, 8, 49155), "tie_word_embeddings": True}, 2.53e9),
        ("mixtral", {}, 46.7e9),
        ("qwen3_moe", {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True}, 30.5e9),
        ("glm4_moe", {"attention_bias": True}, 106.85e9),
        ("qwen3_next", {}, 79.7e9),
        ("gpt_neox", {**sizes(24, 2048, 8192, 16, 16, 50304), "rotary_pct": 0.25}, 1.41e9),
        ("falcon", {**sizes(32, 4544, 0, 71, 1, 65024), "num_kv_heads": 71}, 6.92e9),
        ("opt", {**sizes(24, 2048, 0, 32, 32, 50272), "ffn_dim": 8192, "word_embed_proj_dim": 2048}, 1.32e9),
        ("gptj", {}, 6_050_882_784),
        ("cohere", {}, 34.98e9),
    ],
)
def test_models_are_as_large_as_published(name: str, settings: dict[str, Any], published: float) -> None:
    model = replace(read(name, **settings), make_vocab_size_divisible_by=1)
    assert model_parameters(model) == pytest.approx(published, rel=5e-3)


def test_the_chapter_lists_every_family() -> None:
    chapter = Path(__file__).parents[3] / "docs" / "how-to" / "huggingface.md"
    assert set(re.findall(r"^\| `(\w+)` \|", chapter.read_text(), re.MULTILINE)) - {"model_type"} == FAMILIES.keys()
