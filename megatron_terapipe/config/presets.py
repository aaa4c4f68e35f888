"""Published models by name: what `--model-preset` stands for.

A preset says what the model is, and how long the sequences are that it was published with; nothing of the training.
Dropout is not part of it. Sources:

    TeraPipe   Li et al., arXiv 2102.07988 table 1; its blocks alone are timed there, here they get GPT-3's ends
    GPT-2      Radford et al., Language Models are Unsupervised Multitask Learners, table 2; sizes as released
    GPT-3      Brown et al., arXiv 2005.14165 table 2.1
    Llama      Touvron et al., arXiv 2302.13971 table 2
    Llama 2    Touvron et al., arXiv 2307.09288 table 1 and appendix A.2
    Llama 3    Grattafiori et al., arXiv 2407.21783 table 3; sizes below 8 B as released with Llama 3.2
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A published model."""

    source: str
    """Who published it; the list above says where."""

    published_parameters: float
    """Parameters as published."""

    settings: Mapping[str, Any]
    """Value of each field of the model section that it does not leave to its default."""


def find_preset(name: str) -> Preset:
    """Return a preset by its name.

    Raises:
        ConfigError: if there is none of that name.
    """
    if name in MODEL_PRESETS:
        return MODEL_PRESETS[name]
    nearest = get_close_matches(name, MODEL_PRESETS, n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"choose among {', '.join(MODEL_PRESETS)}"
    raise ConfigError(f"--model-preset {name} is not known: {remedy}")


def _gpt(source: str, published: float, layers: int, hidden: int, heads: int, seq_length: int = 2048) -> Preset:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": seq_length}
    others = {"vocab_size": 50257, "activation": "gelu"}
    return Preset(source=source, published_parameters=published, settings=MappingProxyType(sizes | others))


def _llama(
    source: str,
    published: float,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    *,
    groups: int | None = None,
    seq_length: int,
    vocabulary: int = 32000,
    epsilon: float = 1e-5,
    rotary_base: float = 10000.0,
    tied: bool = False,
) -> Preset:
    settings: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups or heads,
        "seq_length": seq_length,
        "vocab_size": vocabulary,
        "position_embedding_type": "rope",
        "rotary_base": rotary_base,
        "normalization": "rmsnorm",
        "layernorm_epsilon": epsilon,
        "activation": "swiglu",
        "disable_bias_linear": True,
    }
    if not tied:
        settings["untie_embeddings_and_output_weights"] = True
    return Preset(source=source, published_parameters=published, settings=MappingProxyType(settings))


def _llama1(published: float, layers: int, hidden: int, heads: int, ffn: int) -> Preset:
    return _llama("Llama", published, layers, hidden, heads, ffn, seq_length=2048, epsilon=1e-6)


def _llama2(published: float, layers: int, hidden: int, heads: int, ffn: int, groups: int | None = None) -> Preset:
    return _llama("Llama 2", published, layers, hidden, heads, ffn, groups=groups, seq_length=4096)


def _llama3(published: float, layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> Preset:
    # The rotations of longer contexts came after pretraining at this length, and are not part of these.
    return _llama(
        "Llama 3",
        published,
        layers,
        hidden,
        heads,
        ffn,
        groups=8,
        seq_length=8192,
        vocabulary=128256,
        rotary_base=500000.0,
        tied=tied,
    )


MODEL_PRESETS: Mapping[str, Preset] = MappingProxyType(
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
    }
)
"""Every preset by its name."""
