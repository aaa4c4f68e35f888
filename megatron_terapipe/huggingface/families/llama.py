"""Llama, and the families that differ from it in a few settings.

Gemma's are the last: embeddings scaled by the root of their width, norms with weights stored less 1, GeGLU.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.huggingface.families.family import Family, TensorNames
from megatron_terapipe.huggingface.families.layer_settings import (
    rotated_layers,
    rotations,
    rotations_by_layer,
    window_after_layer,
    window_by_type,
    window_of_all,
    window_or_unrotated,
)
from megatron_terapipe.huggingface.families.settings import (
    ATTENTION_BIASES,
    GATED,
    NUMBER,
    UNGATED,
    Setting,
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

_USUAL_SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "initializer_range": 0.02,
}


def llama_like(
    name: str,
    architecture: str,
    *settings: Setting,
    rotation: Setting | None = None,
    bias: Setting | None = None,
    key_heads: int | None = None,
    head_size: int | None = None,
    epsilon: float = 1e-6,
    tensors: TensorNames | Callable[[ModelConfig], TensorNames] | None = None,
    aliases: Mapping[str, str] | None = None,
    tied: bool = False,
    **defaults: Any,
) -> Family:
    """Return a family with rotary positions, RMSNorm, gated MLPs and grouped-query attention.

    Args:
        key_heads: default of the key and value heads; None for as many as query heads.
        head_size: default of the width of a head; None for hidden size over heads.
        **defaults: defaults of sizes, if they are not those of Llama.
    """
    return Family(
        name=name,
        architecture=architecture,
        settings=(
            *sizes(tuple((_USUAL_SIZES | defaults).values()), tied=tied),
            heads_of_keys(key_heads),
            head_width(head_size),
            rotation or rotations(),
            always(normalization="rmsnorm"),
            same("rms_norm_eps", "layernorm_epsilon", NUMBER, epsilon),
            bias or biases(),
            *settings,
            ATTENTION_DROPOUT,
        ),
        tensors=tensors or TensorNames(),
        aliases=aliases or {},
    )


def swish(default: str = "silu") -> Setting:
    """Return the setting of the activation function before the gate."""
    return word("hidden_act", "activation", GATED, default)


LLAMA = llama_like(
    "llama",
    "LlamaForCausalLM",
    swish(),
    # Another order of computing the same.
    ignored("pretraining_tp"),
    bias=biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias"),
)

_MISTRAL: dict[str, Any] = {"key_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072}

MISTRAL = llama_like("mistral", "MistralForCausalLM", swish(), window_of_all(4096), **_MISTRAL)

MINISTRAL = llama_like("ministral", "MinistralForCausalLM", swish(), window_by_type(None), **_MISTRAL)

ARCEE = llama_like(
    "arcee",
    "ArceeForCausalLM",
    word("hidden_act", "activation", UNGATED, "relu2"),
    bias=biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias"),
    epsilon=1e-5,
    tensors=TensorNames(up=("mlp.up_proj",)),
    hidden_size=2560,
    intermediate_size=18432,
    max_position_embeddings=4096,
)

SEED_OSS = llama_like(
    "seed_oss",
    "SeedOssForCausalLM",
    swish(),
    ignored("pretraining_tp"),
    written(residual_dropout="hidden_dropout"),
    bias=biases(qkv="attention_bias", projection="attention_out_bias", mlp="mlp_bias", default="attention_bias"),
    key_heads=8,
    head_size=128,
    vocab_size=155136,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=80,
    max_position_embeddings=524288,
)

ERNIE4_5 = llama_like(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    swish(),
    always(rotary_interleaved=True),
    rotation=rotations(base=500_000.0),
    bias=biases(qkv="use_bias", projection="use_bias", mlp="use_bias"),
    key_heads=2,
    head_size=128,
    epsilon=1e-5,
    tied=True,
    vocab_size=103424,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=18,
    num_attention_heads=16,
    max_position_embeddings=131072,
)

_GLM: dict[str, Any] = {
    "rotation": rotations(part=0.5),
    "bias": biases(qkv="attention_bias", default=True),
    "key_heads": 2,
    "head_size": 128,
    "epsilon": 1.5625e-7,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "max_position_embeddings": 131072,
}

_GLM_TENSORS = TensorNames(
    up=("mlp.gate_up_proj",), attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm"
)

GLM = llama_like("glm", "GlmForCausalLM", swish(), always(rotary_interleaved=True), tensors=_GLM_TENSORS, **_GLM)

GLM4 = llama_like(
    "glm4",
    "Glm4ForCausalLM",
    swish(),
    always(rotary_interleaved=True, norm_placement="both"),
    tensors=_GLM_TENSORS,
    **_GLM,
)

_QWEN: dict[str, Any] = {
    "key_heads": 32,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}

QWEN2 = llama_like("qwen2", "Qwen2ForCausalLM", swish(), window_after_layer(), bias=biases(qkv=True), **_QWEN)

QWEN3 = llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    swish(),
    window_after_layer(),
    always(qk_norm="head"),
    head_size=128,
    bias=ATTENTION_BIASES,
    **_QWEN,
)

_OLMO: dict[str, Any] = {"bias": ATTENTION_BIASES, "epsilon": 1e-5, "vocab_size": 50304}

OLMO2 = llama_like(
    "olmo2",
    "Olmo2ForCausalLM",
    swish(),
    always(qk_norm="all-heads", norm_placement="post"),
    **_OLMO,
)

OLMO3 = llama_like(
    "olmo3",
    "Olmo3ForCausalLM",
    swish(),
    always(qk_norm="all-heads", norm_placement="post"),
    rotation=rotations_by_layer(window_by_type(4), 500_000.0, 500_000.0, nested=True),
    **_OLMO,
)

EXAONE4 = llama_like(
    "exaone4",
    "Exaone4ForCausalLM",
    swish(),
    always(qk_norm="head", norm_placement="post"),
    window_or_unrotated(),
    key_heads=32,
    epsilon=1e-5,
    vocab_size=102400,
    intermediate_size=16384,
)

SMOLLM3 = llama_like(
    "smollm3",
    "SmolLM3ForCausalLM",
    swish(),
    rotated_layers(),
    rotation=rotations(base=2_000_000.0),
    bias=biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias"),
    key_heads=4,
    tied=True,
    vocab_size=128256,
    hidden_size=2048,
    num_hidden_layers=36,
    num_attention_heads=16,
    max_position_embeddings=32768,
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
    swish(),
    *MULTIPLIERS,
    bias=biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias"),
)

PHI3 = llama_like(
    "phi3",
    "Phi3ForCausalLM",
    swish(),
    window_of_all(),
    written(resid_pdrop="hidden_dropout", embd_pdrop="hidden_dropout"),
    rotation=rotations(part=1.0, scalings=("longrope",), original_length=4096, older_names=("su", "yarn")),
    epsilon=1e-5,
    tensors=TensorNames(query_key_value=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    max_position_embeddings=4096,
)


_COMMON: tuple[Setting, ...] = (
    # The embedded words are multiplied by the root of the hidden size.
    Setting((), lambda file, fields: {"embedding_multiplier": float(fields["hidden_size"] ** 0.5)}),
    always(apply_layernorm_1p=True),
    fixed("use_bidirectional_attention", None, False),
)
_SIZES: dict[str, Any] = {
    "bias": ATTENTION_BIASES,
    "head_size": 256,
    "tied": True,
}

# Its first files have gelu, which means the form with tanh.
GEMMA = llama_like(
    "gemma",
    "GemmaForCausalLM",
    word("hidden_act", "activation", {**GATED, "gelu": "geglu"}, "gelu_pytorch_tanh"),
    *_COMMON,
    key_heads=16,
    vocab_size=256000,
    hidden_size=3072,
    intermediate_size=24576,
    num_hidden_layers=28,
    num_attention_heads=16,
    max_position_embeddings=8192,
    **_SIZES,
)

_WITH_WINDOWS: tuple[Setting, ...] = (
    word("hidden_activation", "activation", GATED, "gelu_pytorch_tanh"),
    always(norm_placement="both"),
    power("query_pre_attn_scalar", "softmax_scale", -0.5, 256, whole=True),
)
_WITH_WINDOWS_SIZES: dict[str, Any] = {
    "key_heads": 4,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
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
    vocab_size=256000,
    max_position_embeddings=8192,
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
    vocab_size=262208,
    max_position_embeddings=131072,
    **_SIZES | _WITH_WINDOWS_SIZES,
)
