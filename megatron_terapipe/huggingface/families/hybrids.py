"""Families with layers of Mamba-2: by themselves, or among layers of attention and MLPs or experts.

A layer of ours is one part. In Granite and Bamba a layer of theirs is two of ours: Mamba-2 or attention, and an MLP or
experts.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.recurrences import pattern_and_stages
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError
from megatron_terapipe.huggingface.families.family import Family, TensorNames
from megatron_terapipe.huggingface.families.layer_settings import rotations
from megatron_terapipe.huggingface.families.llama import ATTENTION_DROPOUT, MULTIPLIERS, llama_like
from megatron_terapipe.huggingface.families.mixtures import GRANITE_NAMES, mixture
from megatron_terapipe.huggingface.families.settings import (
    COUNT,
    NATURAL,
    NATURALS,
    NUMBER,
    UNGATED,
    WORD,
    WORDS,
    Fields,
    Setting,
    SettingsFile,
    always,
    biases,
    fixed,
    head_width,
    heads_of_keys,
    ignored,
    same,
    sizes,
    word,
    written,
)

_UNBOUNDED = fixed("time_step_limit", [0.0, inf], (0.0, inf), [0.0, {"__float__": "Infinity"}])

_HYBRID_TENSORS = TensorNames(
    prefix="backbone.",
    words="embeddings",
    query_key_value=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    projection="mixer.o_proj",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    attention_norm="norm",
    mlp_norm="norm",
    final_norm="norm_f",
)

_OF_MAMBA: tuple[Setting, ...] = (
    always(normalization="rmsnorm", position_embedding_type="none"),
    same("layer_norm_epsilon", "layernorm_epsilon", NUMBER, 1e-5),
    same("n_groups", "mamba_num_groups", COUNT, 8),
    fixed("conv_kernel", 4),
    fixed("use_bias", False),
    fixed("use_conv_bias", True),
    _UNBOUNDED,
    # About first weights, the precision of the residual stream, and the order of computing the same.
    ignored("time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32"),
    ignored("chunk_size"),
)


def _heads_of_mamba(number: str, width: str, expand: str, default: int | None = None) -> Setting:
    """Return the setting of the heads of Mamba-2 by three keys.

    Args:
        default: default of the width; None if without the key, or with "auto", it follows from the others.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        hidden, heads = fields["hidden_size"], file.value(number, COUNT, 128)
        if default is None and file.contents.get(width, "auto") == "auto":
            size = file.value(expand, COUNT, 2) * hidden // heads
        else:
            size = file.value(width, COUNT, default)
        file.expect(expand, [heads * size / hidden], 2)
        return {"mamba_num_heads": heads, "mamba_head_dim": size}

    def write(model: ModelConfig) -> Mapping[str, Any]:
        heads, size = model.mamba_num_heads or 1, model.mamba_head_dim
        return {number: heads, width: size, expand: heads * size // model.hidden_size}

    return Setting((number, width, expand), read, write)


def _groups_of_norms(model: ModelConfig) -> list[str]:
    return [_GROUPS] if model.mamba_num_groups > 1 else []


_GROUPS = "read it with transformers 5.23 or newer: before, all groups of B and C have one norm"

MAMBA2 = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    settings=(
        same("vocab_size", "vocab_size", COUNT, 32768),
        same("hidden_size", "hidden_size", COUNT, 4096),
        same("initializer_range", "init_method_std", NUMBER, 0.1),
        sizes((None,) * 7)[-1],
        same("num_hidden_layers", "num_layers", COUNT, 64),
        _heads_of_mamba("num_heads", "head_dim", "expand", 64),
        Setting((), lambda file, fields: {"hybrid_layer_pattern": "M" * fields["num_layers"]}),
        same("state_size", "mamba_state_dim", COUNT, 128),
        fixed("hidden_act", "silu"),
        *_OF_MAMBA,
        # No layer has these parts, and positions have no end.
        always(num_attention_heads=1, ffn_hidden_size=1, disable_bias_linear=True, max_position_embeddings=2**20),
        ignored("time_step_rank", "time_step_min"),
    ),
    tensors=_HYBRID_TENSORS,
    remarks=_groups_of_norms,
)

_SYMBOLS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}


def _read_pattern(file: SettingsFile, fields: Fields) -> Fields:
    default = "ME*-"
    types = file.value("layers_block_type", WORDS, None, nullable=True)
    if types is None:
        pattern = file.value("hybrid_override_pattern", WORD, default)
    else:
        for each in types:
            if each not in _SYMBOLS:
                raise ConfigError(f"{file.where} has a layer {each} in layers_block_type: {MODEL_CANNOT_BE_TRAINED}")
        pattern = "".join(_SYMBOLS[each] for each in types)
    symbols, _ = pattern_and_stages(pattern)
    if "E" in symbols:
        raise ConfigError(f"{file.where} has layers of experts, E in {symbols}: {MODEL_CANNOT_BE_TRAINED}")
    return {"hybrid_layer_pattern": symbols, "num_layers": len(symbols)}


def _write_pattern(model: ModelConfig) -> Mapping[str, Any]:
    # The names of types in a list have changed between versions of transformers; these symbols have not.
    symbols = {"M": "M", "A": "*"}
    return {"hybrid_override_pattern": "".join(symbols.get(each, "-") for each in model.hybrid_layer_pattern or "M")}


NEMOTRON_H = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    settings=(
        *sizes((131072, 4096, 4096, 21504, None, 32, 0.02)),
        # The pattern counts, as in transformers, where num_hidden_layers differs from it.
        Setting(("layers_block_type", "hybrid_override_pattern"), _read_pattern, _write_pattern),
        heads_of_keys(8),
        head_width(128),
        same("ssm_state_size", "mamba_state_dim", COUNT, 128),
        same("mamba_num_heads", "mamba_num_heads", COUNT, 128),
        same("mamba_head_dim", "mamba_head_dim", COUNT, 64),
        # transformers reads it, and makes no such biases.
        ignored("attention_bias"),
        biases(),
        fixed("mlp_bias", False),
        word("mlp_hidden_act", "activation", UNGATED, "relu2"),
        fixed("mamba_hidden_act", "silu"),
        fixed("mamba_proj_bias", False),
        *_OF_MAMBA,
        ATTENTION_DROPOUT,
        written(hidden_dropout="hidden_dropout"),
        # transformers bounds steps by it; Megatron-LM, by which the published models are trained, does not.
        # A bound that no step comes to is written.
        Setting(("time_step_min",), lambda file, fields: {}, lambda model: {"time_step_min": 1e-12}),
        # Of experts and further predictions, of which the layers have none; and of kernels.
        fixed("num_nextn_predict_layers", 0),
        fixed("sliding_window", None),
        ignored("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
        ignored("moe_latent_size", "moe_shared_expert_overlap", "num_experts_per_tok", "routed_scaling_factor"),
        ignored("n_group", "topk_group", "norm_topk_prob", "output_router_logits", "mtp_layers_block_type"),
        ignored("expand", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
    ),
    tensors=_HYBRID_TENSORS,
    ties=False,
    remarks=lambda model: ["read it with transformers 5.10 or newer"],
)


_MIXER: tuple[Setting, ...] = (
    _heads_of_mamba("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    same("mamba_n_groups", "mamba_num_groups", COUNT, 1),
    same("mamba_d_state", "mamba_state_dim", COUNT, 256),
    fixed("mamba_d_conv", 4),
    fixed("mamba_conv_bias", True),
    fixed("mamba_proj_bias", False),
    fixed("attention_bias", False),
    _UNBOUNDED,
    ignored("mamba_chunk_size"),
)


def _pairs(mixers: str, after: str) -> Fields:
    """Return the fields of layers, each a mixer and the part after it."""
    return {"hybrid_layer_pattern": "".join(each + after for each in mixers), "num_layers": 2 * len(mixers)}


def _mixers(model: ModelConfig) -> str:
    """The first part of each pair, M or *."""
    return (model.hybrid_layer_pattern or "M").replace("A", "*")[::2]


def _read_types(file: SettingsFile, fields: Fields) -> Fields:
    experts, layers = fields.get("num_experts"), fields["num_layers"]
    types = file.value("layer_types", WORDS, ["linear_attention"] * layers, nullable=True)
    mixers = "".join(_SYMBOLS.get(each, "?") for each in types or ["mamba"] * layers)
    if len(mixers) != layers or set(mixers) - {"M", "*"}:
        raise ConfigError(f"{file.where} has other layer_types than {layers} of mamba or attention: get the file again")
    width = file.value("shared_intermediate_size", NATURAL, 1024)
    if experts:
        return {**_pairs(mixers, "E"), **({"moe_shared_expert_intermediate_size": width} if width else {})}
    return {**_pairs(mixers, "-"), "num_experts": None, "ffn_hidden_size": width}


def _write_types(model: ModelConfig) -> Mapping[str, Any]:
    width = model.moe_shared_expert_intermediate_size if model.num_experts else model.ffn_hidden_size
    return {
        "intermediate_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers // 2,
        "layer_types": ["mamba" if each == "M" else "attention" for each in _mixers(model)],
        "shared_intermediate_size": width or 0,
        "num_local_experts": model.num_experts or 0,
    }


def _rotated_if_asked() -> Setting:
    """Return the rotations, of the models that have them."""
    usual, key = rotations(), "position_embedding_type"

    def read(file: SettingsFile, fields: Fields) -> Fields:
        rotates = file.value(key, WORD, None, nullable=True) == "rope"
        return usual.read(file, fields) if rotates else {key: "none"}

    return Setting(
        (*usual.keys, key), read, lambda model: {**usual.write(model), key: "rope" if model.rotates else "nope"}
    )


GRANITEMOEHYBRID = mixture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    ("num_local_experts", 8, 2),
    *MULTIPLIERS,
    *_MIXER,
    Setting(("layer_types", "shared_intermediate_size"), _read_types, _write_types),
    bias=biases(),
    rotation=_rotated_if_asked(),
    aliases={"layer_types": "layers_block_type"},
    tensors=lambda model: replace(
        GRANITE_NAMES,
        mixer="mamba",
        parts=2,
        up=GRANITE_NAMES.shared_up,
        down=GRANITE_NAMES.shared_down,
    ),
    remarks=_groups_of_norms,
)


def _read_indices(file: SettingsFile, fields: Fields) -> Fields:
    attend = file.value("attn_layer_indices", NATURALS, None, nullable=True) or ()
    return _pairs("".join("*" if index in attend else "M" for index in range(fields["num_layers"])), "-")


def _write_indices(model: ModelConfig) -> Mapping[str, Any]:
    attend = [index for index, each in enumerate(_mixers(model)) if each == "*"]
    return {"num_hidden_layers": model.num_layers // 2, "attn_layer_indices": attend}


BAMBA = llama_like(
    "bamba",
    "BambaForCausalLM",
    *_MIXER,
    fixed("mlp_bias", False),
    Setting(("attn_layer_indices",), _read_indices, _write_indices),
    ignored("num_logits_to_keep", "z_loss_coefficient"),
    rotation=rotations(part=0.5),
    key_heads=8,
    epsilon=1e-5,
    tensors=TensorNames(
        mixer="mamba",
        parts=2,
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        mlp_norm="pre_ff_layernorm",
        final_norm="final_layernorm",
    ),
    remarks=_groups_of_norms,
    defaults=(128000, 262144, 4096, 14336, 32, 32),
)
