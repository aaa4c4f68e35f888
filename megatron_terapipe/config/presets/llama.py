"""Llama, and the models that differ from it by a setting or two."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_terapipe.config.presets.preset import LLAMA, UNTIED, Preset, preset


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
