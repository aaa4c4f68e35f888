"""GPT-2, GPT-3 and what EleutherAI made of them."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from megatron_terapipe.config.presets.preset import UNTIED, Preset, preset


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
