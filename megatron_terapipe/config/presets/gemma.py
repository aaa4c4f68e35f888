"""Gemma 2."""

from collections.abc import Mapping
from math import sqrt
from types import MappingProxyType

from megatron_terapipe.config.presets.preset import LLAMA, Preset, preset


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
