"""Families with the experts of DeepSeek-V3 and another attention: sigmoid scores, chosen with a bias, renormalised."""

from collections.abc import Mapping
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.huggingface.families.family import TensorNames
from megatron_terapipe.huggingface.families.layer_settings import (
    rotations,
    window_or_unrotated,
    windows_by_number,
)
from megatron_terapipe.huggingface.families.mixtures import (
    BIASED_SIGMOID,
    ONE_WIDTH,
    expert_width,
    layers_by_type,
    layers_of_experts,
    mixture,
    scaled_weights,
    shared_experts,
    sigmoid_routing,
)
from megatron_terapipe.huggingface.families.settings import (
    COUNT,
    SWITCH,
    Fields,
    Setting,
    SettingsFile,
    always,
    biases,
    fixed,
    ignored,
)

DOTS1 = mixture(
    "dots1",
    "Dots1ForCausalLM",
    ("n_routed_experts", None, None),
    always(qk_norm="head"),
    expert_width(1408),
    *sigmoid_routing(1.0, renormalised=False),
    shared_experts(0),
    layers_of_experts(0),
    windows_by_number(62, switch=None),
    aliases={"n_routed_experts": "num_local_experts"},
    key_heads=32,
    defaults=(152064, 2048, 4608, 10944, 62, 32),
)

SOLAR_OPEN = mixture(
    "solar_open",
    "SolarOpenForCausalLM",
    ("n_routed_experts", 128, 8),
    expert_width(1280),
    *sigmoid_routing(1.0),
    shared_experts(1),
    rotation=rotations(base=1_000_000.0),
    bias=biases(qkv="attention_bias"),
    aliases={"n_routed_experts": "num_local_experts"},
    key_heads=8,
    head_size=128,
    epsilon=1e-5,
    # All layers have experts.
    defaults=(196608, 131072, 4096, None, 48, 64),
)


def _rotated_channels() -> Setting:
    """Return the rotations, whose fraction of a head may be a number of channels."""
    usual = rotations(base=5_000_000.0, part=1.0)

    def read(file: SettingsFile, fields: Fields) -> Fields:
        channels = file.value("rotary_dim", COUNT, None, nullable=True)
        if channels is not None and "partial_rotary_factor" not in file.contents:
            file = file.with_value("partial_rotary_factor", channels / fields["kv_channels"])
        return usual.read(file, fields)

    return Setting((*usual.keys, "rotary_dim"), read, usual.write)


MINIMAX_M2 = mixture(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    ("num_local_experts", 256, 8),
    always(qk_norm="all-heads"),
    BIASED_SIGMOID,
    ONE_WIDTH,
    ignored("router_jitter_noise"),
    rotation=_rotated_channels(),
    bias=biases(),
    aliases={"num_local_experts": "num_experts"},
    tensors=TensorNames(
        router="block_sparse_moe.gate",
        router_bias="block_sparse_moe.e_score_correction_bias",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    key_heads=8,
    head_size=128,
    defaults=(200064, 196608, 3072, 1536, 62, 48),
)

EXAONE_MOE = mixture(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    ("num_experts", 64, 8),
    always(qk_norm="head"),
    expert_width(1024),
    *sigmoid_routing(2.5),
    shared_experts(1, "num_shared_experts"),
    layers_by_type(1, "first_k_dense_replace"),
    window_or_unrotated(),
    bias=biases(),
    tensors=TensorNames(router_bias="mlp.e_score_correction_bias", unread="mtp."),
    key_heads=32,
    epsilon=1e-5,
    defaults=(102400, 2048, 4096, 16384, 32, 32),
)


def _of_router(shared: str) -> dict[str, str | tuple[str, str]]:
    """Return the names of the router, its bias and the shared experts, which are in a module of this name."""
    return {
        "router": "mlp.router.gate",
        "router_bias": "mlp.expert_bias",
        "shared_up": (f"mlp.{shared}.gate_proj", f"mlp.{shared}.up_proj"),
        "shared_down": f"mlp.{shared}.down_proj",
    }


HY_V3 = mixture(
    "hy_v3",
    "HYV3ForCausalLM",
    ("num_experts", 192, 8),
    always(qk_norm="head"),
    BIASED_SIGMOID,
    expert_width(1536),
    scaled_weights(2.826, "router_scaling_factor"),
    shared_experts(1, "num_shared_experts"),
    layers_by_type(1),
    fixed("mlp_bias", False),
    ignored("enable_moe_fp32_combine"),
    rotation=rotations(base=11_158_840.0),
    aliases={"num_experts": "num_local_experts"},
    # Layers after the last one predict further tokens; transformers leaves them out, too.
    tensors=lambda model: TensorNames(**_of_router("shared_mlp"), unread=f"model.layers.{model.num_layers}."),
    key_heads=8,
    head_size=128,
    epsilon=1e-5,
    defaults=(120832, 131072, 4096, 13312, 80, 64),
    init_std=0.006,
)


def _scaled_words(file: SettingsFile, fields: Fields) -> Fields:
    scaled = file.value("mup_enabled", SWITCH, False)
    return {"embedding_multiplier": float(fields["hidden_size"] ** 0.5)} if scaled else {}


def _are_scaled(model: ModelConfig) -> Mapping[str, Any]:
    return {"mup_enabled": model.embedding_multiplier != 1}


AFMOE = mixture(
    "afmoe",
    "AfmoeForCausalLM",
    ("num_experts", 64, 6),
    always(qk_norm="head", norm_placement="both", attention_output_gate=True),
    BIASED_SIGMOID,
    expert_width(1408),
    scaled_weights(1.0, "route_scale"),
    shared_experts(2, "num_shared_experts"),
    layers_of_experts(1, "num_dense_layers"),
    window_or_unrotated(1024, "global_attn_every_n_layers"),
    # It adds none to the gates.
    fixed("attention_bias", False),
    Setting(("mup_enabled",), _scaled_words, _are_scaled),
    bias=biases(),
    tensors=TensorNames(
        **_of_router("shared_experts"),
        query_key_value=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.gate_proj"),
        mlp_norm="pre_mlp_layernorm",
        mlp_output_norm="post_mlp_layernorm",
    ),
    head_size=128,
    epsilon=1e-5,
    defaults=(200192, 16384, 2048, 6144, 32, 16),
)
