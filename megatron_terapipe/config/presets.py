"""Published models by name: what `--model-preset` stands for.

A preset says what the model is, and how long the sequences are that it was published with; nothing of the training.
Dropout is not part of it. Sources:

    TeraPipe   Li et al., arXiv 2102.07988 table 1; its blocks alone are timed there, here they get GPT-3's ends
    GPT-2      Radford et al., Language Models are Unsupervised Multitask Learners, table 2; sizes as released
    GPT-3      Brown et al., arXiv 2005.14165 table 2.1
    Llama      Touvron et al., arXiv 2302.13971 table 2
    Llama 2    Touvron et al., arXiv 2307.09288 table 1 and appendix A.2
    Llama 3    Grattafiori et al., arXiv 2407.21783 table 3; sizes below 8 B as released with Llama 3.2
    GPT-NeoX   Black et al., arXiv 2204.06745
    Pythia     Biderman et al., arXiv 2304.01373 table 1
    Mistral    Jiang et al., arXiv 2310.06825 table 1
    Qwen2.5    Qwen team, arXiv 2412.15115 table 1
    Qwen3      Qwen team, arXiv 2505.09388 table 1
    Gemma 2    Gemma team, arXiv 2408.00118 table 1
    OLMo 2     OLMo team, arXiv 2501.00656 table 1
    SmolLM3    Hugging Face, SmolLM3: smol, multilingual, long-context reasoner (2025)

What a paper leaves out, such as epsilons and rows of the vocabulary, is as in `config.json` of the released weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from math import sqrt
from types import MappingProxyType
from typing import Any

from megatron_terapipe.errors import ConfigError

__all__ = ["MODEL_PRESETS", "Preset", "find_preset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A published model."""

    source: str
    """Who published it; the package says where."""

    published_parameters: float
    """Parameters as published."""

    settings: Mapping[str, Any]
    """Value of each field of the model section that it does not leave to its default."""


LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "position_embedding_type": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "disable_bias_linear": True,
    }
)
"""Settings of Llama and of most models after it, which GPT-2 does not have."""

UNTIED: Mapping[str, Any] = MappingProxyType({"untie_embeddings_and_output_weights": True})
"""An output layer with weights of its own."""


def preset(source: str, published: float, layers: int, hidden: int, heads: int, **more: Any) -> Preset:
    """Return a preset."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return Preset(source=source, published_parameters=published, settings=MappingProxyType(sizes | more))


def _gpt(source: str, published: float, layers: int, hidden: int, heads: int, seq_length: int = 2048) -> Preset:
    others = {"seq_length": seq_length, "vocab_size": 50257, "activation": "gelu"}
    return preset(source, published, layers, hidden, heads, **others)


def _neox(source: str, published: float, layers: int, hidden: int, heads: int, **more: Any) -> Preset:
    parts = {"position_embedding_type": "rope", "rotary_percent": 0.25, "parallel_residual": True, **UNTIED}
    return preset(source, published, layers, hidden, heads, seq_length=2048, **parts, **more)


# Rows of the embedding are those of the released weights, which were padded for several ranks.
_pythia = partial(_neox, "Pythia", activation="gelu-exact")

GPTS: Mapping[str, Preset] = MappingProxyType(
    {
        "gpt2": _gpt("GPT-2", 124e6, 12, 768, 12, 1024),
        "gpt2-medium": _gpt("GPT-2", 355e6, 24, 1024, 16, 1024),
        "gpt2-large": _gpt("GPT-2", 774e6, 36, 1280, 20, 1024),
        "gpt2-xl": _gpt("GPT-2", 1.558e9, 48, 1600, 25, 1024),
        "gpt3-125m": _gpt("GPT-3", 125e6, 12, 768, 12),
        "gpt3-350m": _gpt("GPT-3", 350e6, 24, 1024, 16),
        "gpt3-760m": _gpt("GPT-3", 760e6, 24, 1536, 16),
        # The table prints 24 heads of 128, which are 3072 channels of a width of 2048; 16 give the 1.3 B it prints.
        "gpt3-1.3b": _gpt("GPT-3", 1.3e9, 24, 2048, 16),
        "gpt3-2.7b": _gpt("GPT-3", 2.7e9, 32, 2560, 32),
        "gpt3-6.7b": _gpt("GPT-3", 6.7e9, 32, 4096, 32),
        # The table prints a width of 5140, which 40 heads do not divide.
        "gpt3-13b": _gpt("GPT-3, TeraPipe", 13e9, 40, 5120, 40),
        "gpt3-175b": _gpt("GPT-3, TeraPipe", 175e9, 96, 12288, 96),
        "gpt3-1b": _gpt("TeraPipe", 1.3e9, 24, 2048, 16),
        "gpt3-44b": _gpt("TeraPipe", 44e9, 96, 6144, 48),
        "gpt-neox-20b": _neox("GPT-NeoX", 20.6e9, 44, 6144, 64, activation="gelu", vocab_size=50432),
        "pythia-70m": _pythia(70.4e6, 6, 512, 8, vocab_size=50304),
        "pythia-160m": _pythia(162.3e6, 12, 768, 12, vocab_size=50304),
        "pythia-410m": _pythia(405.3e6, 24, 1024, 16, vocab_size=50304),
        "pythia-1b": _pythia(1.012e9, 16, 2048, 8, vocab_size=50304),
        "pythia-1.4b": _pythia(1.415e9, 24, 2048, 16, vocab_size=50304),
        "pythia-2.8b": _pythia(2.775e9, 32, 2560, 32, vocab_size=50304),
        "pythia-6.9b": _pythia(6.857e9, 32, 4096, 32, vocab_size=50432),
        "pythia-12b": _pythia(11.85e9, 36, 5120, 40, vocab_size=50688),
    }
)
"""Presets by their names."""


def _llama1(published: float, layers: int, hidden: int, heads: int, ffn: int) -> Preset:
    sizes = {"ffn_hidden_size": ffn, "num_key_value_heads": heads, "vocab_size": 32000, "seq_length": 2048}
    return preset("Llama", published, layers, hidden, heads, **LLAMA, **UNTIED, **sizes, layernorm_epsilon=1e-6)


def _llama2(published: float, layers: int, hidden: int, heads: int, ffn: int, groups: int | None = None) -> Preset:
    sizes = {"ffn_hidden_size": ffn, "num_key_value_heads": groups or heads, "vocab_size": 32000, "seq_length": 4096}
    return preset("Llama 2", published, layers, hidden, heads, **LLAMA, **UNTIED, **sizes)


def _llama3(
    published: float, layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False, scaled: bool = False
) -> Preset:
    sizes = {"ffn_hidden_size": ffn, "num_key_value_heads": 8, "vocab_size": 128256}
    more: dict[str, Any] = {} if tied else dict(UNTIED)
    # The rotations of longer contexts came after pretraining at 8192 tokens, with Llama 3.1.
    more |= {"seq_length": 131072, "rotary_scaling": "llama3"} if scaled else {"seq_length": 8192}
    return preset(
        "Llama 3.1" if scaled else "Llama 3",
        published,
        layers,
        hidden,
        heads,
        **LLAMA,
        **sizes,
        rotary_base=500000.0,
        **more,
    )


def _qwen25(
    published: float, layers: int, hidden: int, heads: int, groups: int, ffn: int, *, tied: bool = False
) -> Preset:
    return preset(
        "Qwen2.5",
        published,
        layers,
        hidden,
        heads,
        **LLAMA,
        **({} if tied else UNTIED),
        ffn_hidden_size=ffn,
        num_key_value_heads=groups,
        add_qkv_bias=True,
        vocab_size=151936 if tied else 152064,
        seq_length=32768,
        rotary_base=1e6,
        layernorm_epsilon=1e-5 if layers >= 48 else 1e-6,
    )


def _qwen3(published: float, layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> Preset:
    return preset(
        "Qwen3",
        published,
        layers,
        hidden,
        heads,
        **LLAMA,
        **({} if tied else UNTIED),
        ffn_hidden_size=ffn,
        num_key_value_heads=8,
        kv_channels=128,
        qk_norm="head",
        vocab_size=151936,
        seq_length=32768,
        rotary_base=1e6,
        layernorm_epsilon=1e-6,
    )


def _olmo2(published: float, layers: int, hidden: int, heads: int, ffn: int) -> Preset:
    return preset(
        "OLMo 2",
        published,
        layers,
        hidden,
        heads,
        **LLAMA,
        **UNTIED,
        ffn_hidden_size=ffn,
        num_key_value_heads=heads,
        norm_placement="post",
        qk_norm="all-heads",
        vocab_size=100352,
        seq_length=4096,
        rotary_base=500000.0,
        layernorm_epsilon=1e-6,
    )


_MISTRAL_7B = preset(
    "Mistral",
    7.24e9,
    32,
    4096,
    32,
    **LLAMA,
    **UNTIED,
    ffn_hidden_size=14336,
    num_key_value_heads=8,
    sliding_window=4096,
    vocab_size=32000,
    seq_length=8192,
)

_SMOLLM3_3B = preset(
    "SmolLM3",
    3.08e9,
    36,
    2048,
    16,
    **LLAMA,
    ffn_hidden_size=11008,
    num_key_value_heads=4,
    no_rope_freq="4",
    vocab_size=128256,
    seq_length=65536,
    rotary_base=5e6,
    layernorm_epsilon=1e-6,
)

LLAMAS: Mapping[str, Preset] = MappingProxyType(
    {
        "llama-7b": _llama1(6.7e9, 32, 4096, 32, 11008),
        "llama-13b": _llama1(13e9, 40, 5120, 40, 13824),
        "llama-30b": _llama1(32.5e9, 60, 6656, 52, 17920),
        "llama-65b": _llama1(65.2e9, 80, 8192, 64, 22016),
        "llama2-7b": _llama2(6.74e9, 32, 4096, 32, 11008),
        "llama2-13b": _llama2(13.0e9, 40, 5120, 40, 13824),
        "llama2-34b": _llama2(33.7e9, 48, 8192, 64, 22016, 8),
        "llama2-70b": _llama2(69.0e9, 80, 8192, 64, 28672, 8),
        "llama3-1b": _llama3(1.24e9, 16, 2048, 32, 8192, tied=True),
        "llama3-3b": _llama3(3.21e9, 28, 3072, 24, 8192, tied=True),
        "llama3-8b": _llama3(8.03e9, 32, 4096, 32, 14336),
        "llama3-70b": _llama3(70.6e9, 80, 8192, 64, 28672),
        "llama3-405b": _llama3(405e9, 126, 16384, 128, 53248),
        "llama3.1-8b": _llama3(8.03e9, 32, 4096, 32, 14336, scaled=True),
        "llama3.1-70b": _llama3(70.6e9, 80, 8192, 64, 28672, scaled=True),
        "llama3.1-405b": _llama3(405e9, 126, 16384, 128, 53248, scaled=True),
        "mistral-7b": _MISTRAL_7B,
        "qwen2.5-0.5b": _qwen25(0.49e9, 24, 896, 14, 2, 4864, tied=True),
        "qwen2.5-1.5b": _qwen25(1.54e9, 28, 1536, 12, 2, 8960, tied=True),
        "qwen2.5-3b": _qwen25(3.09e9, 36, 2048, 16, 2, 11008, tied=True),
        "qwen2.5-7b": _qwen25(7.61e9, 28, 3584, 28, 4, 18944),
        "qwen2.5-14b": _qwen25(14.7e9, 48, 5120, 40, 8, 13824),
        "qwen2.5-32b": _qwen25(32.5e9, 64, 5120, 40, 8, 27648),
        "qwen2.5-72b": _qwen25(72.7e9, 80, 8192, 64, 8, 29568),
        "qwen3-0.6b": _qwen3(0.6e9, 28, 1024, 16, 3072, tied=True),
        "qwen3-1.7b": _qwen3(1.7e9, 28, 2048, 16, 6144, tied=True),
        "qwen3-4b": _qwen3(4.0e9, 36, 2560, 32, 9728, tied=True),
        "qwen3-8b": _qwen3(8.2e9, 36, 4096, 32, 12288),
        "qwen3-14b": _qwen3(14.8e9, 40, 5120, 40, 17408),
        "qwen3-32b": _qwen3(32.8e9, 64, 5120, 64, 25600),
        "olmo2-7b": _olmo2(7.3e9, 32, 4096, 32, 11008),
        "olmo2-13b": _olmo2(13.7e9, 40, 5120, 40, 13824),
        "smollm3-3b": _SMOLLM3_3B,
    }
)
"""Presets by their names."""


def _gemma2(
    published: float,
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    ffn: int,
    *,
    head_size: int = 256,
    scale_of: int = 256,
) -> Preset:
    """Scores are divided by the square root of `scale_of`."""
    return preset(
        "Gemma 2",
        published,
        layers,
        hidden,
        heads,
        **(dict(LLAMA) | {"activation": "geglu"}),
        ffn_hidden_size=ffn,
        num_key_value_heads=groups,
        kv_channels=head_size,
        softmax_scale=1 / sqrt(scale_of),
        attention_softcap=50.0,
        logit_softcap=30.0,
        sliding_window=4096,
        window_attn_skip_freq="2",
        norm_placement="both",
        apply_layernorm_1p=True,
        embedding_multiplier=sqrt(hidden),
        vocab_size=256000,
        seq_length=8192,
        layernorm_epsilon=1e-6,
    )


GEMMAS: Mapping[str, Preset] = MappingProxyType(
    {
        "gemma2-2b": _gemma2(2.61e9, 26, 2304, 8, 4, 9216),
        "gemma2-9b": _gemma2(9.24e9, 42, 3584, 16, 8, 14336),
        "gemma2-27b": _gemma2(27.2e9, 46, 4608, 32, 16, 36864, head_size=128, scale_of=144),
    }
)
"""Presets by their names."""


MODEL_PRESETS: Mapping[str, Preset] = MappingProxyType({**GPTS, **LLAMAS, **GEMMAS})
"""Every preset by its name."""


def find_preset(name: str) -> Preset:
    """Return a preset by its name."""
    if name in MODEL_PRESETS:
        return MODEL_PRESETS[name]
    nearest = get_close_matches(name, MODEL_PRESETS, n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"choose among {', '.join(MODEL_PRESETS)}"
    raise ConfigError(f"--model-preset {name} is not known: {remedy}")
