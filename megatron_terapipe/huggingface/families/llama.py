"""Llama, and the families that differ from it in a few settings.

Gemma's are the last: embeddings scaled by the root of their width, norms with weights stored less 1, GeGLU.
"""

from collections.abc import Sequence
from typing import Any

from megatron_terapipe.huggingface.families.family import Family, TensorNames
from megatron_terapipe.huggingface.families.layer_settings import (
    has_own_longrope,
    has_rotations_of_windows,
    rotated_layers,
    rotations,
    rotations_by_alpha,
    rotations_by_layer,
    window_by_type,
    window_of_all,
    window_or_unrotated,
    windows_by_number,
    with_scaled_queries,
)
from megatron_terapipe.huggingface.families.settings import (
    ATTENTION_BIASES,
    GATED,
    NUMBER,
    UNGATED,
    Fields,
    Setting,
    SettingsFile,
    always,
    biases,
    fixed,
    head_width,
    heads_of_keys,
    ignored,
    power,
    same,
    sizes,
    word,
    written,
)

ATTENTION_DROPOUT = written(attention_dropout="attention_dropout")

SWISH = word("hidden_act", "activation", GATED, "silu")
"""The activation function before the gate."""


def llama_like(
    name: str,
    architecture: str,
    *settings: Setting,
    activation: Setting = SWISH,
    norm: Sequence[Setting] | None = None,
    rotation: Setting | None = None,
    bias: Setting | None = None,
    key_heads: int | None = None,
    head_size: int | Setting | None = None,
    epsilon: float = 1e-6,
    tied: bool = False,
    defaults: tuple[int, ...] = (32000, 2048, 4096, 11008, 32, 32),
    init_std: float = 0.02,
    **more: Any,
) -> Family:
    """Return a family with rotary positions and grouped-query attention; unless given, with RMSNorm and gated MLPs.

    Args:
        norm: settings of the norms and their epsilon; None for RMSNorm, with `epsilon` as the default.
        key_heads: default of the key and value heads; None for as many as query heads.
        head_size: default of the width of a head, None for hidden size over heads; or the setting of it.
        defaults: numbers of words, positions, hidden size, width of MLPs, layers and heads.
        init_std: default of the standard deviation of initial weights.
    """
    return Family(
        name=name,
        architecture=architecture,
        settings=(
            *sizes((*defaults, init_std), tied=tied),
            heads_of_keys(key_heads),
            head_size if isinstance(head_size, Setting) else head_width(head_size),
            rotation or rotations(),
            *(norm or (always(normalization="rmsnorm"), same("rms_norm_eps", "layernorm_epsilon", NUMBER, epsilon))),
            bias or biases(),
            activation,
            *settings,
            ATTENTION_DROPOUT,
        ),
        **more,
    )


LLAMA = llama_like(
    "llama",
    "LlamaForCausalLM",
    # Another order of computing the same.
    ignored("pretraining_tp"),
    bias=biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias"),
)

_MISTRAL: dict[str, Any] = {"key_heads": 8, "defaults": (32000, 131072, 4096, 14336, 32, 32)}

MISTRAL = llama_like("mistral", "MistralForCausalLM", window_of_all(4096), **_MISTRAL)

MINISTRAL = llama_like("ministral", "MinistralForCausalLM", window_by_type(None), **_MISTRAL)

_MINISTRAL3_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}

MINISTRAL3 = llama_like(
    "ministral3",
    "Ministral3ForCausalLM",
    window_of_all(),
    rotation=with_scaled_queries(
        rotations(base=1_000_000.0, scalings=("yarn",), usual={**_MINISTRAL3_YARN, "attention_factor": 1.0})
    ),
    key_heads=8,
    head_size=128,
    epsilon=1e-5,
    defaults=(131072, 262144, 4096, 14336, 34, 32),
)

ARCEE = llama_like(
    "arcee",
    "ArceeForCausalLM",
    activation=word("hidden_act", "activation", UNGATED, "relu2"),
    bias=biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias"),
    epsilon=1e-5,
    tensors=TensorNames(up=("mlp.up_proj",)),
    defaults=(32000, 4096, 2560, 18432, 32, 32),
)

ERNIE4_5 = llama_like(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    always(rotary_interleaved=True),
    rotation=rotations(base=500_000.0),
    bias=biases(qkv="use_bias", projection="use_bias", mlp="use_bias"),
    key_heads=2,
    head_size=128,
    epsilon=1e-5,
    tied=True,
    defaults=(103424, 131072, 1024, 3072, 18, 16),
)


def _check_heads(file: SettingsFile, fields: Fields) -> Fields:
    """Refuse heads that are not as wide together as the model: their projection is square in transformers."""
    file.expect("head_dim", (fields["hidden_size"] // fields["num_attention_heads"],), 128)
    return {}


HELIUM = llama_like(
    "helium",
    "HeliumForCausalLM",
    always(rotary_interleaved=True),
    Setting((), _check_heads),
    rotation=rotations(base=100_000.0),
    bias=biases(qkv="attention_bias", mlp="mlp_bias"),
    key_heads=20,
    head_size=128,
    epsilon=1e-8,
    defaults=(48000, 4096, 2560, 7040, 24, 20),
)

HUNYUAN_V1_DENSE = llama_like(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    always(qk_norm="head-rotated"),
    ignored("pretraining_tp"),
    rotation=rotations_by_alpha(),
    bias=ATTENTION_BIASES,
    epsilon=1e-5,
    tensors=TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
    defaults=(290943, 2048, 4096, 11008, 32, 32),
)

_GLM: dict[str, Any] = {
    "rotation": rotations(part=0.5),
    "bias": biases(qkv="attention_bias", default=True),
    "key_heads": 2,
    "head_size": 128,
    "epsilon": 1.5625e-7,
    "defaults": (151552, 131072, 4096, 13696, 40, 32),
}

_GLM_TENSORS = TensorNames(
    up=("mlp.gate_up_proj",), attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm"
)

GLM = llama_like("glm", "GlmForCausalLM", always(rotary_interleaved=True), tensors=_GLM_TENSORS, **_GLM)

GLM4 = llama_like(
    "glm4",
    "Glm4ForCausalLM",
    always(rotary_interleaved=True, norm_placement="both"),
    tensors=_GLM_TENSORS,
    **_GLM,
)

_QWEN: dict[str, Any] = {"key_heads": 32, "defaults": (151936, 32768, 4096, 22016, 32, 32)}

QWEN2 = llama_like("qwen2", "Qwen2ForCausalLM", windows_by_number(), bias=biases(qkv=True), **_QWEN)

QWEN3 = llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    windows_by_number(),
    always(qk_norm="head"),
    head_size=128,
    bias=ATTENTION_BIASES,
    **_QWEN,
)

SEED_OSS = llama_like(
    "seed_oss",
    "SeedOssForCausalLM",
    ignored("pretraining_tp"),
    written(residual_dropout="hidden_dropout"),
    bias=biases(qkv="attention_bias", projection="attention_out_bias", mlp="mlp_bias", default="attention_bias"),
    key_heads=8,
    head_size=128,
    defaults=(155136, 524288, 4096, 27648, 64, 80),
)

_OLMO: dict[str, Any] = {"bias": ATTENTION_BIASES, "epsilon": 1e-5, "defaults": (50304, 2048, 4096, 11008, 32, 32)}

OLMO2 = llama_like(
    "olmo2",
    "Olmo2ForCausalLM",
    always(qk_norm="all-heads", norm_placement="post"),
    **_OLMO,
)

_ROTATIONS = "read it with transformers 5.16 or newer: before, layers with a window have the rotations of the others"

OLMO3 = llama_like(
    "olmo3",
    "Olmo3ForCausalLM",
    always(qk_norm="all-heads", norm_placement="post"),
    rotation=rotations_by_layer(window_by_type(4), 500_000.0, 500_000.0, nested=True),
    remarks=lambda model: [_ROTATIONS] if has_rotations_of_windows(model) else [],
    **_OLMO,
)

EXAONE4 = llama_like(
    "exaone4",
    "Exaone4ForCausalLM",
    always(qk_norm="head", norm_placement="post"),
    window_or_unrotated(),
    key_heads=32,
    epsilon=1e-5,
    defaults=(102400, 2048, 4096, 16384, 32, 32),
)

SMOLLM3 = llama_like(
    "smollm3",
    "SmolLM3ForCausalLM",
    rotated_layers(),
    rotation=rotations(base=2_000_000.0),
    bias=biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias"),
    key_heads=4,
    tied=True,
    defaults=(128256, 32768, 2048, 11008, 36, 16),
)

MULTIPLIERS: tuple[Setting, ...] = (
    same("embedding_multiplier", "embedding_multiplier", NUMBER, 1.0),
    same("residual_multiplier", "residual_multiplier", NUMBER, 1.0),
    same("attention_multiplier", "softmax_scale", NUMBER, 1.0),
    power("logits_scaling", "logit_multiplier", -1, 1.0),
)
"""Factors of Granite."""

GRANITE = llama_like(
    "granite",
    "GraniteForCausalLM",
    *MULTIPLIERS,
    bias=biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias"),
)

_LONGROPE = "read it with transformers 5: version 4 computes the factors of longrope from its lengths"

PHI3 = llama_like(
    "phi3",
    "Phi3ForCausalLM",
    window_of_all(),
    written(resid_pdrop="hidden_dropout", embd_pdrop="hidden_dropout"),
    rotation=rotations(part=1.0, scalings=("longrope",), original_length=4096, older_names=("su", "yarn")),
    epsilon=1e-5,
    tensors=TensorNames(query_key_value=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    remarks=lambda model: [_LONGROPE] if has_own_longrope(model) else [],
    defaults=(32064, 4096, 3072, 8192, 32, 32),
)


_COMMON: tuple[Setting, ...] = (
    # The embedded words are multiplied by the root of the hidden size.
    Setting((), lambda file, fields: {"embedding_multiplier": float(fields["hidden_size"] ** 0.5)}),
    always(apply_layernorm_1p=True),
    fixed("use_bidirectional_attention", None, False),
)
_SIZES: dict[str, Any] = {"bias": ATTENTION_BIASES, "head_size": 256, "tied": True}

# Its first files have gelu, which means the form with tanh.
GEMMA = llama_like(
    "gemma",
    "GemmaForCausalLM",
    *_COMMON,
    activation=word("hidden_act", "activation", {**GATED, "gelu": "geglu"}, "gelu_pytorch_tanh"),
    key_heads=16,
    defaults=(256000, 8192, 3072, 24576, 28, 16),
    **_SIZES,
)

_WITH_WINDOWS: tuple[Setting, ...] = (
    always(norm_placement="both"),
    power("query_pre_attn_scalar", "softmax_scale", -0.5, 256, whole=True),
)
_WITH_WINDOWS_SIZES: dict[str, Any] = {
    "activation": word("hidden_activation", "activation", GATED, "gelu_pytorch_tanh"),
    "key_heads": 4,
    "tensors": TensorNames(mlp_norm="pre_feedforward_layernorm"),
}

GEMMA2 = llama_like(
    "gemma2",
    "Gemma2ForCausalLM",
    window_by_type(2),
    same("attn_logit_softcapping", "attention_softcap", NUMBER, 50.0, nullable=True),
    same("final_logit_softcapping", "logit_softcap", NUMBER, 30.0, nullable=True),
    *_WITH_WINDOWS,
    *_COMMON,
    defaults=(256000, 8192, 2304, 9216, 26, 8),
    **_SIZES | _WITH_WINDOWS_SIZES,
)

GEMMA3_TEXT = llama_like(
    "gemma3_text",
    "Gemma3ForCausalLM",
    # transformers reads it for Gemma 3, and computes without it.
    fixed("attn_logit_softcapping", None),
    same("final_logit_softcapping", "logit_softcap", NUMBER, None),
    always(qk_norm="head"),
    *_WITH_WINDOWS,
    *_COMMON,
    rotation=rotations_by_layer(window_by_type(6, "sliding_window_pattern")),
    defaults=(262208, 131072, 2304, 9216, 26, 8),
    **_SIZES | _WITH_WINDOWS_SIZES,
)
