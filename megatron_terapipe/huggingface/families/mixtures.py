"""Families with mixtures of experts: Llama's layers with a router and experts in place of the MLP.

Files have one width, the experts' one, or one of each kind. transformers 5 has another name for their number.
`router_aux_loss_coef` and its like concern only the losses of a training, which have flags.
"""

from collections.abc import Sequence
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError
from megatron_terapipe.huggingface.families.family import Family, TensorNames
from megatron_terapipe.huggingface.families.layer_settings import pattern_of, rotations, window_of_all
from megatron_terapipe.huggingface.families.llama import MULTIPLIERS, llama_like, swish
from megatron_terapipe.huggingface.families.settings import (
    ATTENTION_BIASES,
    COUNT,
    NATURAL,
    NUMBER,
    SWITCH,
    Fields,
    Kind,
    Setting,
    SettingsFile,
    always,
    biases,
    fixed,
    ignored,
    opposite,
    same,
    word,
    written,
)

LAYERS = Kind("a list of whole numbers", lambda value: isinstance(value, list) and all(map(NATURAL.fits, value)))


def mixture(name: str, architecture: str, experts: tuple[str, int, int], *settings: Setting, **more: Any) -> Family:
    """Return a family with experts.

    Args:
        experts: key of their number, its default, and the key of the number that a token chooses.
        more: as in `llama_like`.
    """
    key, number, top_k = experts
    return llama_like(
        name,
        architecture,
        swish(),
        same(key, "num_experts", NATURAL, number),
        same("num_experts_per_tok", "moe_router_topk", COUNT, top_k),
        ignored("router_aux_loss_coef", "output_router_logits"),
        *settings,
        **{"bias": ATTENTION_BIASES} | more,
    )


ONE_WIDTH = written(intermediate_size="moe_ffn_hidden_size")
"""The width of experts, where all layers have them; it is read as the width of an MLP."""


def _unless(key: str, field: str, kind: Kind, off: float) -> Setting:
    """Return a key with the value of a field, or `off` where the field is None; `off` is its default."""

    def read(file: SettingsFile, fields: Fields) -> Fields:
        value = file.value(key, kind, off)
        return {} if value == off else {field: value}

    return Setting((key,), read, lambda model: {key: getattr(model, field) or off})


def _layers(have_experts: Sequence[bool]) -> Fields:
    return {} if all(have_experts) else {"moe_layer_freq": pattern_of(have_experts, [False])}


def _dense_layers(model: ModelConfig) -> list[int]:
    return [index for index, block in enumerate(model.blocks) if not block.num_experts]


def _listed_layers(file: SettingsFile, fields: Fields) -> Fields:
    """Read every Nth layer, without the layers of a list, or no layer."""
    step, dense = file.value("decoder_sparse_step", COUNT, 1), file.value("mlp_only_layers", LAYERS, [], nullable=True)
    listed = [(index + 1) % step == 0 and index not in (dense or ()) for index in range(fields["num_layers"])]
    return _layers(listed) if any(listed) and fields["num_experts"] else {"num_experts": None}


def _layers_after(file: SettingsFile, fields: Fields) -> Fields:
    """Read the number of layers before the first one of experts."""
    first = file.value("first_k_dense_replace", NATURAL, 1)
    return _layers([index >= first for index in range(fields["num_layers"])])


def _window_if_used(file: SettingsFile, fields: Fields) -> Fields:
    window = file.value("sliding_window", COUNT, 4096, nullable=True)
    return {"sliding_window": window if file.value("use_sliding_window", SWITCH, False) else None}


MIXTRAL = mixture(
    "mixtral",
    "MixtralForCausalLM",
    ("num_local_experts", 8, 2),
    window_of_all(),
    ONE_WIDTH,
    ignored("router_jitter_noise"),
    bias=biases(),
    rotation=rotations(base=1_000_000.0),
    aliases={"num_local_experts": "num_experts"},
    tensors=TensorNames(
        router="block_sparse_moe.gate",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    key_heads=8,
    epsilon=1e-5,
    defaults=(32000, 131072, 4096, 14336, 32, 32),
)

LISTED_LAYERS = Setting(
    ("decoder_sparse_step", "mlp_only_layers"),
    _listed_layers,
    lambda model: {"decoder_sparse_step": 1, "mlp_only_layers": _dense_layers(model)},
)

QWEN3_MOE = mixture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ("num_experts", 128, 8),
    always(qk_norm="head"),
    same("moe_intermediate_size", "moe_ffn_hidden_size", COUNT, 768),
    opposite("norm_topk_prob", "moe_router_pre_softmax", False),
    LISTED_LAYERS,
    Setting(
        ("use_sliding_window", "sliding_window"),
        _window_if_used,
        lambda model: {"use_sliding_window": model.sliding_window is not None, "sliding_window": model.sliding_window},
    ),
    # Left over from Qwen 2 in published files.
    ignored("max_window_layers"),
    aliases={"num_experts": "num_local_experts"},
    key_heads=4,
    defaults=(151936, 32768, 2048, 6144, 24, 32),
)

OLMOE = mixture(
    "olmoe",
    "OlmoeForCausalLM",
    ("num_experts", 64, 8),
    always(qk_norm="all-heads"),
    fixed("clip_qkv", None),
    ONE_WIDTH,
    opposite("norm_topk_prob", "moe_router_pre_softmax", False),
    aliases={"num_experts": "num_local_experts"},
    epsilon=1e-5,
    defaults=(50304, 4096, 2048, 2048, 16, 16),
)

_GRANITE_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    expert_up=("block_sparse_moe.input_linear",),
    expert_down="block_sparse_moe.output_linear",
    shared_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)

GRANITEMOE = mixture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    ("num_local_experts", 8, 2),
    *MULTIPLIERS,
    ONE_WIDTH,
    tensors=_GRANITE_NAMES,
)

GRANITEMOESHARED = mixture(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    ("num_local_experts", 8, 2),
    *MULTIPLIERS,
    ONE_WIDTH,
    _unless("shared_intermediate_size", "moe_shared_expert_intermediate_size", NATURAL, 0),
    tensors=_GRANITE_NAMES,
)


def _shared(file: SettingsFile, fields: Fields) -> Fields:
    """Read the shared experts, each as wide as the others."""
    number = file.value("n_shared_experts", COUNT, 1)
    return {"moe_shared_expert_intermediate_size": number * fields["moe_ffn_hidden_size"]}


def _groups(file: SettingsFile, fields: Fields) -> Fields:
    """Read the groups of experts; transformers compares groups by their two best experts."""
    groups, kept = file.value("n_group", COUNT, 1), file.value("topk_group", COUNT, 1)
    if groups == 1:
        return {}
    if fields["moe_router_topk"] != 2 * kept:
        raise ConfigError(
            f"{file.where} sets topk_group to {kept} and num_experts_per_tok to {fields['moe_router_topk']}, which is "
            f"not twice as many: {MODEL_CANNOT_BE_TRAINED}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": kept}


GLM4_MOE = mixture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    ("n_routed_experts", 128, 8),
    same("moe_intermediate_size", "moe_ffn_hidden_size", COUNT, 1408),
    always(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    fixed("norm_topk_prob", True),
    _unless("routed_scaling_factor", "moe_router_topk_scaling_factor", NUMBER, 1.0),
    Setting(
        ("n_group", "topk_group"),
        _groups,
        lambda model: {"n_group": model.moe_router_num_groups or 1, "topk_group": model.moe_router_group_topk or 1},
    ),
    Setting(
        ("n_shared_experts",),
        _shared,
        lambda model: {
            "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // (model.moe_ffn_hidden_size or 1)
        },
    ),
    Setting(
        ("first_k_dense_replace",),
        _layers_after,
        lambda model: {"first_k_dense_replace": len(_dense_layers(model))},
    ),
    word("use_qk_norm", "qk_norm", {False: "none", True: "head"}, False),
    # A further layer predicts the token after the next one; transformers leaves it out, too.
    ignored("num_nextn_predict_layers", "num_mtp_layers"),
    rotation=rotations(part=0.5),
    bias=biases(qkv="attention_bias"),
    aliases={"n_routed_experts": "num_local_experts"},
    tensors=lambda model: TensorNames(unread=f"model.layers.{model.num_layers}."),
    # Published files have it; the other defaults of transformers are no model without it.
    head_size=128,
    key_heads=8,
    epsilon=1e-5,
    defaults=(151552, 131072, 4096, 10944, 46, 96),
)
