"""The families of Gemma: embeddings scaled by the root of their width, norms whose weights are kept less 1, GeGLU."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.huggingface.families.layers import WindowByType
from megatron_terapipe.huggingface.families.llama import llama_like
from megatron_terapipe.huggingface.families.rotation import RotationByLayer
from megatron_terapipe.huggingface.families.setting import (
    GATED,
    Always,
    Biases,
    Fields,
    Fixed,
    Reading,
    Reciprocal,
    Same,
    Setting,
    Word,
)
from megatron_terapipe.huggingface.families.settings_file import COUNT, NUMBER
from megatron_terapipe.huggingface.families.tensor_names import TensorNames


class _ScaledEmbedding:
    """The embedded words times the root of the hidden size."""

    keys: Sequence[str] = ()

    def read(self, reading: Reading) -> Fields:
        """Return the multiplier."""
        return {"embedding_multiplier": float(reading.fields["hidden_size"] ** 0.5)}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return nothing."""
        return {}


_COMMON: tuple[Setting, ...] = (
    _ScaledEmbedding(),
    Always(apply_layernorm_1p=True),
    Fixed("use_bidirectional_attention", (None, False)),
)
_SIZES: dict[str, Any] = {
    "biases": Biases(qkv="attention_bias", projection="attention_bias"),
    "head_size": Same("head_dim", "kv_channels", COUNT, 256),
    "tied": True,
}

# Its first files say gelu, and mean the form with tanh.
GEMMA = llama_like(
    "gemma",
    "GemmaForCausalLM",
    Word("hidden_act", "activation", {**GATED, "gelu": "geglu"}, "gelu_pytorch_tanh"),
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
    Word("hidden_activation", "activation", GATED, "gelu_pytorch_tanh"),
    Always(norm_placement="both"),
    Reciprocal("query_pre_attn_scalar", "softmax_scale", -0.5, 256),
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
    WindowByType(2),
    Same("attn_logit_softcapping", "attention_softcap", NUMBER, 50.0, nullable=True),
    Same("final_logit_softcapping", "logit_softcap", NUMBER, 30.0, nullable=True),
    *_WITH_WINDOWS,
    *_COMMON,
    vocab_size=256000,
    max_position_embeddings=8192,
    **_SIZES | _WITH_WINDOWS_SIZES,
)

GEMMA3_TEXT = llama_like(
    "gemma3_text",
    "Gemma3ForCausalLM",
    Same("attn_logit_softcapping", "attention_softcap", NUMBER, None),
    Same("final_logit_softcapping", "logit_softcap", NUMBER, None),
    Always(qk_norm="head"),
    *_WITH_WINDOWS,
    *_COMMON,
    rotation=RotationByLayer(WindowByType(6, "sliding_window_pattern")),
    vocab_size=262208,
    max_position_embeddings=131072,
    **_SIZES | _WITH_WINDOWS_SIZES,
)
