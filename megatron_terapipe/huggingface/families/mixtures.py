"""Families with experts in place of Llama's MLP.

Files have one width, the experts' one, or one of each kind. transformers 5 has another name for their number.
`router_aux_loss_coef` and its like concern only the losses of a training, which have flags. The last are Qwen's layers
of which most have a gated delta net in place of attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError
from megatron_terapipe.huggingface.families.family import Family, FurtherNames, TensorNames
from megatron_terapipe.huggingface.families.layer_settings import (
    delta_net_by_type,
    pattern_of,
    rotations,
    rotations_by_alpha,
    rotations_by_layer,
    window_by_type,
    window_of_all,
    windows_by_number,
)
from megatron_terapipe.huggingface.families.llama import MULTIPLIERS, llama_like
from megatron_terapipe.huggingface.families.settings import (
    ATTENTION_BIASES,
    COUNT,
    NATURAL,
    NATURALS,
    NUMBER,
    SWITCH,
    WHOLE,
    WORDS,
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


def mixture(
    name: str,
    architecture: str,
    experts: tuple[str, int, int],
    *settings: Setting,
    chosen: str = "num_experts_per_tok",
    **more: Any,
) -> Family:
    """Return a family with experts.

    Args:
        experts: key of their number, its default, and the default of the number that a token chooses.
        chosen: key of the number that a token chooses.
    """
    key, number, top_k = experts
    return llama_like(
        name,
        architecture,
        same(key, "num_experts", NATURAL, number),
        same(chosen, "moe_router_topk", COUNT, top_k),
        ignored("router_aux_loss_coef", "output_router_logits"),
        *settings,
        **{"bias": ATTENTION_BIASES} | more,
    )


ONE_WIDTH = written(intermediate_size="moe_ffn_hidden_size")
"""The width of experts, where all layers have them; it is read as the width of an MLP."""


def expert_width(default: int) -> Setting:
    """Return the setting of the width of an expert, where MLPs have another one."""
    return same("moe_intermediate_size", "moe_ffn_hidden_size", COUNT, default)


def weights_renormalised(default: bool) -> Setting:
    """Return the switch whether the weights of the chosen experts, by softmax, are divided by their sum."""
    return opposite("norm_topk_prob", "moe_router_pre_softmax", default)


def unless(key: str, field: str, kind: Kind, off: float, default: float) -> Setting:
    """Return a key with the value of a field, or `off` where the field is None."""

    def read(file: SettingsFile, fields: Fields) -> Fields:
        value = file.value(key, kind, default)
        return {} if value == off else {field: type(off)(value)}

    return Setting((key,), read, lambda model: {key: getattr(model, field) or off})


def layers_with_experts(have_experts: Sequence[bool]) -> Fields:
    """Return the field of the layers with experts; none where all layers have them."""
    return {} if all(have_experts) else {"moe_layer_freq": pattern_of(have_experts, [False])}


def _dense_layers(model: ModelConfig) -> list[int]:
    return [index for index, block in enumerate(model.blocks) if not block.num_experts]


def _listed_layers(file: SettingsFile, fields: Fields) -> Fields:
    """Read every Nth layer, without the layers of a list, or no layer."""
    step, dense = (
        file.value("decoder_sparse_step", COUNT, 1),
        file.value("mlp_only_layers", NATURALS, [], nullable=True),
    )
    listed = [(index + 1) % step == 0 and index not in (dense or ()) for index in range(fields["num_layers"])]
    return layers_with_experts(listed) if any(listed) and fields["num_experts"] else {"num_experts": None}


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
    expert_width(768),
    weights_renormalised(False),
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
    weights_renormalised(False),
    aliases={"num_experts": "num_local_experts"},
    epsilon=1e-5,
    defaults=(50304, 4096, 2048, 2048, 16, 16),
)

GRANITE_NAMES = TensorNames(
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
    tensors=GRANITE_NAMES,
)

GRANITEMOESHARED = mixture(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    ("num_local_experts", 8, 2),
    *MULTIPLIERS,
    ONE_WIDTH,
    unless("shared_intermediate_size", "moe_shared_expert_intermediate_size", NATURAL, 0, 0),
    tensors=GRANITE_NAMES,
)


def shared_experts(default: int, key: str = "n_shared_experts") -> Setting:
    """Return the setting of the number of shared experts, each as wide as the others."""

    def read(file: SettingsFile, fields: Fields) -> Fields:
        width = file.value(key, NATURAL, default) * fields["moe_ffn_hidden_size"]
        return {"moe_shared_expert_intermediate_size": width} if width else {}

    def write(model: ModelConfig) -> Mapping[str, Any]:
        return {key: (model.moe_shared_expert_intermediate_size or 0) // (model.moe_ffn_hidden_size or 1)}

    return Setting((key,), read, write)


def layers_of_experts(default: int, key: str = "first_k_dense_replace") -> Setting:
    """Return the setting of the number of layers before the first one of experts."""

    def read(file: SettingsFile, fields: Fields) -> Fields:
        first = file.value(key, NATURAL, default)
        return layers_with_experts([index >= first for index in range(fields["num_layers"])])

    return Setting((key,), read, lambda model: {key: len(_dense_layers(model))})


def layers_by_type(dense: int, key: str | None = None) -> Setting:
    """Return the setting of the layers with experts, as a list of types.

    Args:
        dense: number of layers before the first one of experts where there is no list.
        key: key of that number; None if it has none.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        first = dense if key is None else file.value(key, NATURAL, dense)
        types = file.value("mlp_layer_types", WORDS, None, nullable=True)
        if types is None:
            types = ["dense" if index < first else "sparse" for index in range(fields["num_layers"])]
        return layers_with_experts([each == "sparse" for each in types])

    def write(model: ModelConfig) -> Mapping[str, Any]:
        return {"mlp_layer_types": ["sparse" if each.num_experts else "dense" for each in model.blocks]}

    return Setting(("mlp_layer_types", *([key] if key else [])), read, write)


def _groups(file: SettingsFile, fields: Fields, usual: tuple[int, int]) -> Fields:
    """Read the groups of experts; transformers compares groups by their two best experts."""
    groups, kept = (file.value(key, COUNT, each) for key, each in zip(("n_group", "topk_group"), usual, strict=True))
    if groups == 1:
        return {}
    if fields["moe_router_topk"] != 2 * kept:
        raise ConfigError(
            f"{file.where} sets topk_group to {kept} and num_experts_per_tok to {fields['moe_router_topk']}, which is "
            f"not twice as many: {MODEL_CANNOT_BE_TRAINED}"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": kept}


BIASED_SIGMOID = always(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
"""Experts are chosen by the sum of a bias and the sigmoid of their logits."""


def sigmoid_routing(
    scale: float, groups: tuple[int, int] = (1, 1), *, renormalised: bool = True
) -> tuple[Setting, ...]:
    """Return the routing of DeepSeek-V3: sigmoid scores, chosen with a bias within groups, renormalised and scaled.

    Args:
        scale: default of the factor.
        groups: defaults of the number of groups, and of those that a token chooses in.
        renormalised: default of the key whether weights are renormalised, which ours are.
    """

    def check(file: SettingsFile, fields: Fields) -> Fields:
        file.expect("norm_topk_prob", (True,), renormalised)
        return {}

    return (
        BIASED_SIGMOID,
        Setting(("norm_topk_prob",), check, lambda model: {"norm_topk_prob": True}),
        scaled_weights(scale),
        Setting(
            ("n_group", "topk_group"),
            lambda file, fields: _groups(file, fields, groups),
            lambda model: {"n_group": model.moe_router_num_groups or 1, "topk_group": model.moe_router_group_topk or 1},
        ),
    )


def scaled_weights(default: float, key: str = "routed_scaling_factor") -> Setting:
    """Return the setting of the factor of the weights of experts."""
    return unless(key, "moe_router_topk_scaling_factor", NUMBER, 1.0, default)


def with_further_layers(model: ModelConfig) -> TensorNames:
    """Return the usual names, with DeepSeek-V3's for layers after the last one, which predict further tokens."""
    layer = "model.layers.{}."
    further = FurtherNames(
        **{"begin": layer, "block": layer, "first": model.num_layers, "projection": "eh_proj"},
        **{"words_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "shared_head.norm"},
        copies={"embed_tokens": "words", "shared_head.head": "output"},
    )
    return TensorNames(further=further)


FURTHER_LAYERS: tuple[Setting, ...] = (
    written(num_nextn_predict_layers="mtp_num_layers"),
    # Another name of the same in transformers.
    ignored("num_mtp_layers"),
)
"""The number of layers that predict further tokens; a run reads as many as `--mtp-num-layers` asks for."""

GLM4_MOE = mixture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    ("n_routed_experts", 128, 8),
    expert_width(1408),
    *sigmoid_routing(1.0),
    shared_experts(1),
    layers_of_experts(1),
    word("use_qk_norm", "qk_norm", {False: "none", True: "head"}, False),
    *FURTHER_LAYERS,
    rotation=rotations(part=0.5),
    bias=biases(qkv="attention_bias"),
    aliases={"n_routed_experts": "num_local_experts"},
    tensors=with_further_layers,
    # Published files have it; the other defaults of transformers are no model without it.
    head_size=128,
    key_heads=8,
    epsilon=1e-5,
    defaults=(151552, 131072, 4096, 10944, 46, 96),
)


def _quantized(file: SettingsFile, fields: Fields) -> Fields:
    section = file.section("quantization_config")
    section.expect("quant_method", ("mxfp4", None), end="give a copy of the model in bf16")
    return {}


GPT_OSS = mixture(
    "gpt_oss",
    "GptOssForCausalLM",
    ("num_local_experts", 128, 4),
    Setting(("quantization_config",), _quantized),
    window_by_type(2, tokens=128),
    always(softmax_type="learnable", glu_linear_offset=1.0, disable_bias_linear=False),
    same("swiglu_limit", "activation_func_clamp_value", NUMBER, 7.0),
    fixed("swiglu_alpha", 1.702),
    fixed("attention_bias", True),
    ONE_WIDTH,
    # They repeat other keys.
    ignored("experts_per_token", "initial_context_length"),
    activation=word("hidden_act", "activation", {"silu": "quick-geglu"}, "silu"),
    bias=always(),
    rotation=rotations(
        base=150_000.0,
        scalings=("yarn",),
        usual={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    ),
    aliases={"num_local_experts": "num_experts"},
    tensors=TensorNames(
        router="mlp.router",
        expert_up=("mlp.experts.gate_up_proj",),
        expert_down="mlp.experts.down_proj",
        alternating_experts=True,
    ),
    key_heads=8,
    head_size=64,
    epsilon=1e-5,
    defaults=(201088, 131072, 2880, 2880, 36, 64),
)

_SHARED_EXPERT = TensorNames(
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)

QWEN2_MOE = mixture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    ("num_experts", 60, 4),
    expert_width(1408),
    same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", COUNT, 5632),
    always(moe_shared_expert_gate=True),
    weights_renormalised(False),
    LISTED_LAYERS,
    windows_by_number(even_before=True),
    bias=biases(qkv="qkv_bias", default=True),
    tensors=_SHARED_EXPERT,
    key_heads=16,
    defaults=(151936, 32768, 2048, 5632, 24, 16),
)

FLEX_OLMO = mixture(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    ("num_experts", 7, 5),
    always(qk_norm="all-heads", norm_placement="post"),
    ONE_WIDTH,
    weights_renormalised(False),
    rotation=rotations(base=500_000.0),
    defaults=(100352, 4096, 4096, 11008, 32, 32),
)

HUNYUAN_V1_MOE = mixture(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    ("num_experts", 1, 1),
    always(qk_norm="head-rotated"),
    ONE_WIDTH,
    Setting((), lambda file, fields: {"moe_shared_expert_intermediate_size": fields["ffn_hidden_size"]}),
    ignored("pretraining_tp"),
    chosen="moe_topk",
    rotation=rotations_by_alpha(),
    aliases={"num_experts": "num_local_experts", "moe_topk": "num_experts_per_tok"},
    epsilon=1e-5,
    tensors=TensorNames(
        query_norm="self_attn.query_layernorm",
        key_norm="self_attn.key_layernorm",
        router="mlp.gate.wg",
        shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    ),
    defaults=(290943, 2048, 4096, 11008, 32, 32),
)


def _interval(file: SettingsFile, fields: Fields) -> Fields:
    """Read the layers with experts: every Nth from a first to a last one."""
    layers = fields["num_layers"]
    step = file.value("moe_layer_interval", COUNT, 1)
    first, last = file.value("moe_layer_start_index", NATURAL, 1), file.value("moe_layer_end_index", WHOLE, -1)
    last = layers - 1 if last == -1 else last
    return layers_with_experts([(index + 1) % step == 0 and first <= index <= last for index in range(layers)])


def _write_interval(model: ModelConfig) -> Mapping[str, Any]:
    experts = [index for index, block in enumerate(model.blocks) if block.num_experts]
    ends = {"moe_layer_start_index": experts[0], "moe_layer_end_index": experts[-1]} if experts else {}
    return {"moe_layer_interval": experts[1] - experts[0] if len(experts) > 1 else 1, **ends}


ERNIE4_5_MOE = mixture(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    ("moe_num_experts", 64, 6),
    always(rotary_interleaved=True, moe_router_enable_expert_bias=True),
    expert_width(1536),
    shared_experts(2, "moe_num_shared_experts"),
    Setting(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), _interval, _write_interval),
    # It also adds biases to the output layer.
    fixed("use_bias", False),
    # The sum of the chosen probabilities is far above the least divisor.
    ignored("moe_norm_min"),
    chosen="moe_k",
    rotation=rotations(base=500_000.0),
    bias=biases(),
    aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    key_heads=4,
    epsilon=1e-5,
    tied=True,
    tensors=TensorNames(
        router_bias="mlp.moe_statics.e_score_correction_bias",
        router_bias_of_row=True,
        unread="model.mtp_",
    ),
    defaults=(103424, 131072, 2560, 12288, 28, 20),
)

MELLUM = mixture(
    "mellum",
    "MellumForCausalLM",
    ("num_experts", 64, 8),
    always(qk_norm="head"),
    expert_width(896),
    weights_renormalised(True),
    layers_by_type(0),
    ignored("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    rotation=rotations_by_layer(window_by_type(1, tokens=1024), 500_000.0, nested=True, older=False),
    aliases={"num_experts": "num_local_experts"},
    tensors=TensorNames(unread="mtp."),
    key_heads=4,
    head_size=128,
    defaults=(98304, 131072, 2304, 7168, 28, 32),
)

_DELTA_NETS: tuple[Setting, ...] = (
    delta_net_by_type(),
    *(same(key, key, COUNT, None) for key in ("linear_num_key_heads", "linear_num_value_heads")),
    *(same(key, key, COUNT, None) for key in ("linear_key_head_dim", "linear_value_head_dim")),
    same("linear_conv_kernel_dim", "linear_conv_kernel_dim", COUNT, None),
    always(qk_norm="head", apply_layernorm_1p=True, attention_output_gate=True),
)
_WITH_EXPERTS: tuple[Setting, ...] = (
    *_DELTA_NETS,
    expert_width(512),
    same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", COUNT, 512),
    always(moe_shared_expert_gate=True),
)
_QWEN: dict[str, Any] = {
    "activation": word("hidden_act", "activation", {"silu": "swiglu"}, "silu"),
    **{"rotation": rotations(part=0.25), "bias": ATTENTION_BIASES, "head_size": 256},
    "tensors": replace(
        _SHARED_EXPERT,
        further=FurtherNames(
            **{"begin": "mtp.", "block": "mtp.layers.{}.", "first": 0, "projection": "fc", "final_norm": "norm"},
            **{"words_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"},
        ),
    ),
}
_QWEN3_5 = {**_QWEN, "remarks": lambda model: ["read it with transformers 5.2 or newer"]}

QWEN3_NEXT = mixture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    ("num_experts", 512, 10),
    *(LISTED_LAYERS, weights_renormalised(True), *_WITH_EXPERTS),
    key_heads=2,
    defaults=(151936, 32768, 2048, 5632, 48, 16),
    **_QWEN | {"tensors": replace(_QWEN["tensors"], grouped=True)},
)
QWEN3_5_TEXT = llama_like(
    *("qwen3_5_text", "Qwen3_5ForCausalLM", *_DELTA_NETS),
    key_heads=4,
    defaults=(248320, 32768, 4096, 12288, 32, 16),
    **_QWEN3_5,
)
QWEN3_5_MOE_TEXT = mixture(
    *("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", ("num_experts", 256, 8), *_WITH_EXPERTS),
    key_heads=2,
    defaults=(248320, 32768, 2048, 11008, 40, 16),
    **_QWEN3_5,
)
