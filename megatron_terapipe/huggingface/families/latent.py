"""Families with latent attention: DeepSeek's, and those that differ from them in a few settings.

The norms of latents add 1e-6 in transformers, whatever `rms_norm_eps`. YaRN has weights, `mscale` and `mscale_all_dim`;
scores take the square of the latter's factor.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.huggingface.families.family import Family
from megatron_terapipe.huggingface.families.layer_settings import rotations
from megatron_terapipe.huggingface.families.llama import llama_like
from megatron_terapipe.huggingface.families.mixtures import (
    FURTHER_LAYERS,
    expert_width,
    layers_by_type,
    layers_of_experts,
    mixture,
    scaled_weights,
    shared_experts,
    sigmoid_routing,
    with_further_layers,
)
from megatron_terapipe.huggingface.families.settings import (
    COUNT,
    NUMBER,
    SWITCH,
    Fields,
    Setting,
    SettingsFile,
    always,
    biases,
    fixed,
    ignored,
    same,
)


def _latents(query_rank: int | None, rank: int, sizes: tuple[int, int, int]) -> tuple[Setting, ...]:
    """Return the settings of latents, with defaults: ranks; widths without rotation, with it, and of values."""
    return (
        fixed("attention_bias", False, reason="latents have no biases here"),
        always(multi_latent_attention=True, qk_norm="head", latent_norm_epsilon=1e-6),
        same("q_lora_rank", "q_lora_rank", COUNT, query_rank, nullable=True),
        same("kv_lora_rank", "kv_lora_rank", COUNT, rank),
        same("qk_nope_head_dim", "qk_head_dim", COUNT, sizes[0]),
        same("qk_rope_head_dim", "qk_pos_emb_head_dim", COUNT, sizes[1]),
        same("v_head_dim", "v_head_dim", COUNT, sizes[2]),
    )


def _interleaved() -> Setting:
    """Return the switch of pairs of neighbouring channels."""
    return same("rope_interleave", "rotary_interleaved", SWITCH, True)


def _yarn() -> Setting:
    """Return the rotations, with the weights of YaRN."""
    usual = rotations(scalings=("yarn",))
    weights = ("mscale", "mscale_all_dim")

    def read(file: SettingsFile, fields: Fields) -> Fields:
        name = "rope_parameters" if not file.section("rope_scaling") else "rope_scaling"
        section = file.section(name)
        if "deepseek_yarn" in (section.contents.get("type"), section.contents.get("rope_type")):
            file = file.with_value(name, {**section.contents, "rope_type": "yarn"})
        found = dict(usual.read(file, fields))
        if found["rotary_scaling"] == "yarn":
            values = {key: section.value(key, NUMBER, None, nullable=True) for key in weights}
            found |= {key: float(value) for key, value in values.items() if value is not None}
        return found

    def write(model: ModelConfig) -> Mapping[str, Any]:
        keys = dict(usual.write(model))
        if model.rotary_scaling == "yarn":
            given = {key: getattr(model, key) for key in weights if getattr(model, key)}
            keys["rope_scaling"] = {**keys["rope_scaling"], **given}
        return keys

    return Setting(usual.keys, read, write)


_USUAL: dict[str, Any] = {
    "bias": biases(),
    "rotation": _yarn(),
    # It follows from the widths of latents, and is another width in some files.
    "head_size": ignored("head_dim", "qk_head_dim"),
}


def _experts(width: int) -> tuple[Setting, ...]:
    """Return the setting of the width of experts, with a default, and keys without effect."""
    return (
        expert_width(width),
        *FURTHER_LAYERS,
        # Of losses and kernels.
        ignored("pretraining_tp", "ep_size", "moe_layer_freq"),
    )


def _like_v3(
    name: str,
    architecture: str,
    experts: tuple[int, int],
    latents: tuple[Setting, ...],
    *settings: Setting,
    width: int,
    scale: float,
    groups: tuple[int, int] = (1, 1),
    **more: Any,
) -> Family:
    """Return a family with the routing and the latents of DeepSeek-V3.

    Args:
        experts: defaults of their number, and of the number that a token chooses.
        width: default of the width of an expert.
        scale: as `groups`, as in `sigmoid_routing`.
    """
    return mixture(
        name,
        architecture,
        ("n_routed_experts", *experts),
        *latents,
        _interleaved(),
        *_experts(width),
        *sigmoid_routing(scale, groups),
        shared_experts(1),
        *settings,
        tensors=with_further_layers,
        **{"aliases": {"n_routed_experts": "num_local_experts"}} | _USUAL | more,
    )


DEEPSEEK_V3 = _like_v3(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (256, 8),
    _latents(1536, 512, (128, 64, 128)),
    layers_of_experts(3),
    width=2048,
    scale=2.5,
    groups=(8, 4),
    defaults=(129280, 4096, 7168, 18432, 61, 128),
)

SARVAM_MLA = _like_v3(
    "sarvam_mla",
    "DeepseekV3ForCausalLM",
    (128, 8),
    _latents(None, 512, (128, 64, 128)),
    layers_of_experts(1),
    width=2048,
    scale=2.5,
    aliases={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    defaults=(262144, 4096, 4096, 16384, 32, 64),
    init_std=0.006,
)


GLM4_MOE_LITE = _like_v3(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    (64, 4),
    _latents(768, 512, (192, 64, 256)),
    layers_by_type(1),
    width=1536,
    scale=1.8,
    epsilon=1e-5,
    defaults=(154880, 202752, 2048, 10240, 47, 20),
)

DEEPSEEK_V2 = mixture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    ("n_routed_experts", 64, None),
    *_latents(1536, 512, (128, 64, 128)),
    always(rotary_interleaved=True, moe_router_pre_softmax=True),
    *_experts(1407),
    fixed("mlp_bias", False),
    fixed("topk_method", "greedy", reason="experts are not chosen by the best one of their group"),
    fixed("norm_topk_prob", False),
    ignored("n_group", "topk_group"),
    scaled_weights(1.0),
    shared_experts(2),
    layers_of_experts(0),
    aliases={"n_routed_experts": "num_experts"},
    tensors=with_further_layers,
    defaults=(102400, 2048, 4096, 11008, 32, 32),
    **_USUAL,
)

YOUTU = llama_like(
    "youtu",
    "YoutuForCausalLM",
    *_latents(1536, 512, (128, 64, 128)),
    _interleaved(),
    same("embedding_initializer_range", "embedding_init_method_std", NUMBER, 4 / sqrt(5 * 2048)),
    tied=True,
    defaults=(128256, 131072, 2048, 6144, 32, 16),
    init_std=2 / sqrt(5 * 2048),
    **_USUAL,
)


def _read_scales(file: SettingsFile, fields: Fields) -> Fields:
    depth, base = (
        file.value("scale_depth", NUMBER, 1.4, nullable=True),
        file.value("dim_model_base", COUNT, 256, nullable=True),
    )
    residual = {} if depth is None else {"residual_multiplier": depth / sqrt(fields["num_layers"])}
    return residual | ({} if base is None else {"logit_multiplier": base / fields["hidden_size"]})


MINICPM3 = llama_like(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    *_latents(768, 256, (64, 32, 64)),
    always(rotary_interleaved=False),
    fixed("mlp_bias", False),
    ignored("pretraining_tp"),
    same("scale_emb", "embedding_multiplier", NUMBER, 12.0),
    Setting(
        ("scale_depth", "dim_model_base"),
        _read_scales,
        lambda model: {
            "scale_depth": model.residual_multiplier * sqrt(model.num_layers),
            "dim_model_base": max(1, round(model.logit_multiplier * model.hidden_size)),
        },
    ),
    epsilon=1e-5,
    tied=True,
    defaults=(73448, 32768, 2560, 6400, 62, 40),
    init_std=0.1,
    **_USUAL,
)
