"""The model that NeoX builds from its settings is the model that the flags describe."""

from dataclasses import fields
from typing import Any

import pytest

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.convert import convert
from megatron_terapipe.neox.model import layer_kinds, standard_deviation
from tests.neox.test_conversion import LEAST, SMALL, converted, parsed

WIDTH_256 = {"hidden_size": 256}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "rmsnorm", "rms_norm_epsilon": 0.5}, "--normalization rmsnorm --layernorm-epsilon 0.5"),
        ({"norm": "te_layernorm"}, "--normalization layernorm --layernorm-epsilon 1e-05"),
        ({"norm": "rmsnorm", "use_bias_in_norms": False}, "--normalization rmsnorm --layernorm-epsilon 1e-08"),
        ({"pos_emb": "none"}, "--position-embedding-type none"),
        ({"pos_emb": "rotary", "rotary_pct": 0.25}, "--rotary-base 10000 --rotary-percent 0.25"),
        ({"gpt_j_residual": True}, "--parallel-residual"),
        ({"gpt_j_residual": True, "gpt_j_tied": True}, "--parallel-residual --shared-block-norm"),
        ({"gpt_j_tied": True}, "--activation gelu-exact"),
        ({"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}, "--disable-bias-linear"),
        ({"use_bias_in_attn_linear": False}, "--disable-bias-linear --add-mlp-bias"),
        ({"use_bias_in_mlp": False}, "--disable-bias-linear --add-attention-bias"),
        ({"sliding_window_width": 64, "attention_config": [[["flash"], 4]]}, "--sliding-window 65"),
        (
            {"sliding_window_width": 64, "attention_config": [[["flash", "global"], "all"]]},
            "--sliding-window 65 --window-attn-skip-freq [1,0,1,0]",
        ),
        ({"num_kv_heads": 2, "attention_type": "groupedquery"}, "--num-key-value-heads 2"),
    ],
)
def test_settings_of_the_model(changes: dict[str, Any], words: str) -> None:
    conversion = converted(**changes)
    assert f" {words} " in f" {' '.join(conversion.words())} "
    parsed(conversion)


@pytest.mark.parametrize(
    ("changes", "activation", "width"),
    [
        ({}, "gelu-exact", 1024),
        ({"bias_gelu_fusion": True}, "gelu", 1024),
        ({"activation": "relu", "intermediate_size": 100, "mlp_multiple_of": 64}, "relu", 128),
        ({"expansion_factor": 3.5}, "gelu-exact", 896),
        ({"activation": "swiglu"}, "swiglu", 341),
        ({"activation": "geglu", "bias_gelu_fusion": True, "mlp_multiple_of": 64}, "geglu-exact", 384),
        ({"activation": "swiglu", "intermediate_size": 2048, "mlp_multiple_of": 64}, "swiglu", 704),
        ({"mlp_type": "llama", "activation": "silu"}, "swiglu", 768),
        ({"mlp_type": "llama", "activation": "silu", "intermediate_size": 700, "mlp_multiple_of": 100}, "swiglu", 700),
        ({"te_layernorm_mlp": True}, "gelu", 1024),
        ({"te_layernorm_mlp": True, "activation": "geglu"}, "geglu", 682),
        ({"te_layernorm_mlp": True, "activation": "srelu"}, "squared-relu", 1024),
    ],
)
def test_the_mlp_has_neoxs_width(changes: dict[str, Any], activation: str, width: int) -> None:
    model = parsed(converted(**WIDTH_256, **changes)).model
    assert (model.activation, model.ffn_hidden_size) == (activation, width)


def test_the_older_gated_mlp_has_no_biases() -> None:
    model = parsed(converted(mlp_type="llama", activation="silu")).model
    assert (model.has_qkv_bias, model.has_projection_bias, model.has_mlp_bias) == (True, True, False)


def test_transformer_engines_layers_have_biases_whatever_the_files_say() -> None:
    without = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    assert not parsed(converted(**without, te_mha=True, te_layernorm_mlp=True)).model.disable_bias_linear
    model = parsed(converted(**without, te_mha=True)).model
    assert (model.has_qkv_bias, model.has_projection_bias, model.has_mlp_bias) == (True, True, False)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / 24**0.5),
        ("single_residual_scaled_normal", 0.02 / 12**0.5),
        ("small_init", (2 / 3840) ** 0.5),
        ("wang_init", 2 / 12 / 768**0.5),
        ("orthogonal", None),
        ("xavier_uniform", None),
    ],
)
def test_standard_deviations(method: str, expected: float | None) -> None:
    found = standard_deviation(method, 0.02, hidden_size=768, num_layers=12)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-15))


def test_initial_weights_are_exact() -> None:
    model = parsed(convert({**SMALL, "init_method": "small_init", "output_layer_init_method": "wang_init"}, 8)).model
    assert model.init_method_std == pytest.approx((2 / (5 * 768)) ** 0.5, rel=1e-15)
    assert model.output_layer_init_std == pytest.approx(2 / (12 * 768**0.5), rel=1e-15)
    usual = parsed(converted()).model
    assert (usual.init_method_std, usual.output_layer_init_std) == (0.02, pytest.approx(0.02 / 8**0.5, rel=1e-15))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"pos_emb": "alibi"}, "pos_emb alibi: positions can be learned, rotary or none: "),
        ({"norm": "scalenorm"}, "norm scalenorm: norms can be layernorm or rmsnorm: "),
        ({"use_bias_in_norms": False}, "use_bias_in_norms false: a LayerNorm has a bias: "),
        ({"activation": "mish"}, "activation mish: it can be gelu, relu, swiglu or geglu: "),
        ({"mlp_type": "llama"}, "activation gelu: it can be"),
        ({"mlp_type": "other"}, "mlp_type other: it can be regular or llama: "),
        ({"attention_config": [[["mamba"], 4]]}, "attention_config mamba: Mamba layers are not in this trainer: "),
        (
            {"attention_config": [[["gmlp"], "all"]], "activation": "silu"},
            "attention_config gmlp: MLPs over positions are",
        ),
        ({"attention_config": [[["global", "rwkv"], 2]]}, "attention_config rwkv: recurrent layers are not"),
        ({"attention_config": [[["global", "local"], 2]]}, "attention_config local: attention is global: "),
        ({"sliding_window_width": 8, "te_mha": True}, "sliding_window_width 8: Transformer Engine takes two numbers"),
        ({"use_qk_layernorm": True}, "use_qk_layernorm True: NeoX has one norm for the queries and keys of all heads"),
        ({"init_method": "orthogonal"}, "init_method orthogonal: weights start from a normal distribution: "),
        ({"output_layer_init_method": "no"}, "output_layer_init_method no: no method of NeoX: "),
        ({"te_layernorm_mlp": True, "layernorm_epsilon": 1e-6}, "layernorm_epsilon 1e-06: with te_layernorm_mlp NeoX"),
        ({"hidden_dropout": 0.1, "use_bias_in_mlp": False}, "hidden_dropout 0.1: NeoX drops nothing where a matrix"),
        (
            {"hidden_dropout": 0.1, "gpt_j_residual": True, "use_bias_in_attn_linear": False},
            "hidden_dropout 0.1: NeoX drops nothing where a matrix",
        ),
    ],
)
def test_models_that_cannot_be_trained(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(**changes)
    assert str(caught.value).startswith(line)


def test_a_refused_activation_leaves_no_other_setting_unread() -> None:
    with pytest.raises(ConfigError) as caught:
        converted(activation="mish", intermediate_size=128, mlp_multiple_of=64)
    assert str(caught.value).count(";") == 0 and "intermediate_size" not in str(caught.value)


def test_what_neox_leaves_out_of_its_own_layers_is_remarked() -> None:
    conversion = converted(sliding_window_width=64, gpt_j_residual=True, use_bias_in_mlp=False)
    assert parsed(conversion).model.sliding_window is None
    assert {setting for setting, _ in conversion.remarks} == {"sliding_window_width", "gpt_j_residual"}


PYTHIA = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "pos_emb": "rotary",
    "rotary_pct": 0.25,
    "no_weight_tying": True,
    "gpt_j_residual": True,
    "attention_config": [[["flash"], 12]],
}


def test_pythia_is_the_preset_of_its_name() -> None:
    """But for what the published configuration does not keep: how weights started."""
    ours = parsed(converted(**PYTHIA)).model
    preset = parse_arguments(
        "--model-preset pythia-160m --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data".split()
    ).model
    differing = {each.name for each in fields(ours) if getattr(ours, each.name) != getattr(preset, each.name)}
    assert differing <= {"vocab_size"}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (None, ["global"] * 4),
        ([[["flash"], 4]], ["flash"] * 4),
        ([[["flash", "global"], 1], [["global"], 2]], ["flash", "global", "global", "global"]),
        ([[["flash", "global"], "all"]], ["flash", "global", "flash", "global"]),
        (["flash", "global", "global", "flash"], ["flash", "global", "global", "flash"]),
    ],
)
def test_kinds_of_layers(config: list[Any] | None, kinds: list[str]) -> None:
    assert layer_kinds(config, 4) == kinds


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"attention_config": "flash"}, "attention_config describes 5 layers and num_layers is 4: describe each layer"),
        ({"attention_config": 3}, "attention_config 3 is not a list such as"),
        ({"attention_config": [[["flash"], "some"]]}, "attention_config [[['flash'], 'some']] is not a list such as"),
        ({"attention_config": [[["flash"], 3]]}, "attention_config describes 3 layers and num_layers is 4"),
        ({"intermediate_size": 8, "expansion_factor": 2}, "intermediate_size 8 and expansion_factor 2 both size the"),
        ({"rotary_pct": True}, "rotary_pct True is not a number: give one"),
    ],
)
def test_settings_of_the_model_that_are_wrong(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(LEAST | changes)
    assert str(caught.value).startswith(line)
