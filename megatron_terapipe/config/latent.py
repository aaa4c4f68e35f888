"""Latent attention (MLA): its settings in the model section, the rules between these, and the sizes that they give.

DeepSeek    DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434 section 2.1, equations 9 to 19
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

from megatron_terapipe.config.layers import MOST_WIDTH, LatentSizes
from megatron_terapipe.config.options import option, resolve, with_value
from megatron_terapipe.config.recurrences import RecurrenceSettings
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError

_NEEDS = ("multi_latent_attention",)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSettings(RecurrenceSettings):
    """Latent attention in a model."""

    multi_latent_attention: bool = False
    """Compute keys and values, and with --q-lora-rank queries, from a latent vector of each token, as DeepSeek-V2 and
    V3 do. Norms on the latents: --qk-layernorm. Every head has a key of its own and one rotated key of the token."""

    q_lora_rank: int | None = option(None, least=1, most=MOST_WIDTH, needs=_NEEDS)
    """Width of the latent of the queries. Default: queries are projected from the hidden state."""

    kv_lora_rank: int = option(32, least=1, most=MOST_WIDTH, needs=_NEEDS)
    """Width of the latent of keys and values."""

    qk_head_dim: int = option(128, least=1, most=MOST_WIDTH, needs=_NEEDS)
    """Channels of a head's queries and keys that are not rotated."""

    qk_pos_emb_head_dim: int = option(64, least=2, most=MOST_WIDTH, needs=_NEEDS)
    """Rotated channels of a head's queries; of the keys all heads share them."""

    v_head_dim: int = option(128, least=1, most=MOST_WIDTH, needs=_NEEDS)
    """Width of a head's values."""

    latent_norm_epsilon: float | None = option(None, above=0, most=1, needs=_NEEDS)
    """Number that the norms of latents add to the mean square. Default: --layernorm-epsilon."""

    mscale: float = option(1.0, least=0, most=1e6)
    """`yarn`: weight of ln(--rotary-scaling-factor) in the factor of the rotated channels."""

    mscale_all_dim: float = option(0.0, least=0, most=1e6)
    """`yarn`: divide that factor by one with this weight, and with latent attention multiply the scores by the square
    of the latter."""

    @property
    def latent(self) -> LatentSizes | None:
        """Sizes of the latent attention; None for a model with another attention."""
        if not self.multi_latent_attention:
            return None
        return LatentSizes(
            query_rank=self.q_lora_rank or 0,
            rank=self.kv_lora_rank,
            key_size=self.qk_head_dim,
            rotated_size=self.qk_pos_emb_head_dim,
            value_size=self.v_head_dim,
        )


def yarn_factor(factor: float, weight: float) -> float:
    """Return 0.1 w ln(s) + 1, and 1 for a factor s up to 1 (Peng et al., YaRN, arXiv 2309.00071 section 3.4).

    Args:
        weight: w; 1 in the paper, `mscale` and `mscale_all_dim` in DeepSeek's models.
    """
    return 0.1 * weight * log(factor) + 1 if factor > 1 else 1.0


def resolve_latent(model: LatentSettings, *, layernorm_epsilon: float) -> None:
    """Fill in the settings that follow from others; only for `__post_init__` of the model section."""
    if (sizes := model.latent) is not None:
        resolve(model, "latent_norm_epsilon", layernorm_epsilon)
        # A head is as wide as its queries and keys, whatever --kv-channels: so in Megatron.
        object.__setattr__(model, "kv_channels", sizes.head_size)


_OF_OTHERS: Mapping[str, tuple[object, ...]] = {
    "qk_norm": ("none", "head"),
    "attention_output_gate": (False,),
    "add_attention_bias": (False,),
    "softmax_type": ("vanilla",),
    "add_qkv_bias": (False,),
    "rotary_percent": (1,),
    "heterogeneous_layers_config_path": (None,),
}
"""Settings of the model section for other attention, and the values that go with latent attention."""


def check_latent(model: LatentSettings) -> None:
    """Check that a model section with latent attention has no setting of another attention.

    Raises:
        ConfigError: naming the value and the rule.
    """
    if not model.multi_latent_attention:
        return
    if model.num_key_value_heads != model.num_attention_heads:
        raise ConfigError(
            f"--num-key-value-heads {model.num_key_value_heads} is for attention with grouped keys, and "
            "--multi-latent-attention gives every head its own: drop one of them"
        )
    if model.v_head_dim > model.kv_channels:
        raise ConfigError(
            f"--v-head-dim {model.v_head_dim} is more than --qk-head-dim {model.qk_head_dim} and "
            f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} together: no kernel of attention takes such heads, so "
            "lower it"
        )
    for name, allowed in _OF_OTHERS.items():
        if (value := getattr(model, name)) not in allowed:
            words = f"{with_value(name, value)} does not go with --multi-latent-attention"
            raise ConfigError(f"{words}: {MODEL_CANNOT_BE_TRAINED}")
