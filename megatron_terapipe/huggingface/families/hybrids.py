"""Families with layers of Mamba-2, by themselves or among layers of attention and MLPs: a layer is one part.

Qwen's are the last: layers of two parts, most with a gated delta net in place of attention.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.recurrences import pattern_and_stages
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError
from megatron_terapipe.huggingface.families.family import Family, TensorNames
from megatron_terapipe.huggingface.families.layer_settings import delta_net_by_type, rotations
from megatron_terapipe.huggingface.families.llama import ATTENTION_DROPOUT, llama_like
from megatron_terapipe.huggingface.families.mixtures import LISTED_LAYERS, mixture
from megatron_terapipe.huggingface.families.settings import (
    ATTENTION_BIASES,
    COUNT,
    NUMBER,
    UNGATED,
    WORD,
    WORDS,
    Fields,
    Setting,
    SettingsFile,
    always,
    fixed,
    head_width,
    heads_of_keys,
    ignored,
    opposite,
    same,
    sizes,
    word,
    written,
)

_TENSORS = TensorNames(
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

_OF_ALL: tuple[Setting, ...] = (
    always(normalization="rmsnorm", position_embedding_type="none"),
    same("layer_norm_epsilon", "layernorm_epsilon", NUMBER, 1e-5),
    same("n_groups", "mamba_num_groups", COUNT, 8),
    fixed("conv_kernel", 4),
    fixed("use_bias", False),
    fixed("use_conv_bias", True),
    fixed("time_step_limit", [0.0, inf], (0.0, inf), [0.0, {"__float__": "Infinity"}]),
    # About first weights, the precision of the residual stream, and the order of computing the same.
    ignored("time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32"),
    ignored("chunk_size"),
)


def _read_heads(file: SettingsFile, fields: Fields) -> Fields:
    heads, width = file.value("num_heads", COUNT, 128), file.value("head_dim", COUNT, 64)
    file.expect("expand", [heads * width / fields["hidden_size"]], 2)
    return {"hybrid_layer_pattern": "M" * fields["num_layers"], "mamba_num_heads": heads, "mamba_head_dim": width}


def _write_heads(model: ModelConfig) -> Mapping[str, Any]:
    heads = model.mamba_num_heads or 1
    return {
        "num_heads": heads,
        "head_dim": model.mamba_head_dim,
        "expand": heads * model.mamba_head_dim // model.hidden_size,
    }


MAMBA2 = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    settings=(
        same("vocab_size", "vocab_size", COUNT, 32768),
        same("hidden_size", "hidden_size", COUNT, 4096),
        same("initializer_range", "init_method_std", NUMBER, 0.1),
        sizes((None,) * 7)[-1],
        same("num_hidden_layers", "num_layers", COUNT, 64),
        Setting(("num_heads", "head_dim", "expand"), _read_heads, _write_heads),
        same("state_size", "mamba_state_dim", COUNT, 128),
        fixed("hidden_act", "silu"),
        *_OF_ALL,
        # No layer has these parts, and positions have no end.
        always(num_attention_heads=1, ffn_hidden_size=1, disable_bias_linear=True, max_position_embeddings=2**20),
        ignored("time_step_rank", "time_step_min"),
    ),
    tensors=_TENSORS,
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
    types = {"M": "linear_attention", "A": "full_attention", "-": "mlp"}
    pattern = model.hybrid_layer_pattern or "M"
    return {"layers_block_type": [types.get(each, "mlp") for each in pattern]}


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
        ATTENTION_BIASES,
        fixed("mlp_bias", False),
        word("mlp_hidden_act", "activation", UNGATED, "relu2"),
        fixed("mamba_hidden_act", "silu"),
        fixed("mamba_proj_bias", False),
        *_OF_ALL,
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
    tensors=_TENSORS,
)

_DELTA_NETS: tuple[Setting, ...] = (
    delta_net_by_type(),
    *(same(key, key, COUNT, None) for key in ("linear_num_key_heads", "linear_num_value_heads")),
    *(same(key, key, COUNT, None) for key in ("linear_key_head_dim", "linear_value_head_dim")),
    same("linear_conv_kernel_dim", "linear_conv_kernel_dim", COUNT, None),
    fixed("hidden_act", "silu"),
    always(activation="swiglu", qk_norm="head", apply_layernorm_1p=True, attention_output_gate=True),
)
_WITH_EXPERTS: tuple[Setting, ...] = (
    *_DELTA_NETS,
    same("moe_intermediate_size", "moe_ffn_hidden_size", COUNT, 512),
    same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", COUNT, 512),
    always(moe_shared_expert_gate=True),
)
_QWEN: dict[str, Any] = {
    **{"rotation": rotations(part=0.25), "bias": ATTENTION_BIASES, "head_size": 256},
    "tensors": TensorNames(
        shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
        unread="mtp.",  # Predictions of the tokens after the next one, which transformers leaves out, too.
    ),
}

QWEN3_NEXT = mixture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    ("num_experts", 512, 10),
    *(LISTED_LAYERS, opposite("norm_topk_prob", "moe_router_pre_softmax", True), *_WITH_EXPERTS),
    key_heads=2,
    defaults=(151936, 32768, 2048, 5632, 48, 16),
    **_QWEN | {"tensors": replace(_QWEN["tensors"], grouped=True)},
)
QWEN3_5_TEXT = llama_like(
    *("qwen3_5_text", "Qwen3_5ForCausalLM", *_DELTA_NETS),
    key_heads=4,
    defaults=(248320, 32768, 4096, 12288, 32, 16),
    **_QWEN,
)
QWEN3_5_MOE_TEXT = mixture(
    *("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", ("num_experts", 256, 8), *_WITH_EXPERTS),
    key_heads=2,
    defaults=(248320, 32768, 2048, 11008, 40, 16),
    **_QWEN,
)
