"""Rotary positions: what the settings of the model section follow from, and the rules between them."""

from math import log
from typing import TYPE_CHECKING

from megatron_terapipe.config.options import check_positive, flag, resolve
from megatron_terapipe.errors import ConfigError

if TYPE_CHECKING:
    from megatron_terapipe.config.model import ModelConfig


def resolve_rotation(model: "ModelConfig") -> None:
    """Fill in the settings of rotations that follow from others; only for `__post_init__` of the model section.

    Raises:
        ConfigError: if one is not positive.
    """
    factor = model.rotary_scaling_factor
    resolve(model, "rotary_scaling", "none" if factor is None or factor == 1 else "linear")
    resolve(model, "rotary_scaling_factor", 8.0 if model.rotary_scaling == "llama3" else 1.0)
    check_positive(
        model,
        "rotary_base",
        "rotary_scaling_factor",
        "rotary_low_frequency_factor",
        "rotary_beta_slow",
        "rotary_base_local",
        "rotary_original_length",
        "rotary_attention_factor",
    )
    factor = model.rotary_scaling_factor
    before = 8192 if model.rotary_scaling == "llama3" else max(1, int(model.max_position_embeddings / factor))
    resolve(model, "rotary_original_length", before)
    # Peng et al., YaRN, arXiv 2309.00071 section 3.4; queries and keys take it each, so scores take its square.
    yarn = 0.1 * log(factor) + 1 if model.rotary_scaling == "yarn" and factor > 1 else 1.0
    resolve(model, "rotary_attention_factor", yarn)


def check_rotation(model: "ModelConfig") -> None:
    """Check the settings of rotations against each other.

    Raises:
        ConfigError: if two do not fit together.
    """
    if not 0 < model.rotary_percent <= 1:
        raise ConfigError(f"--rotary-percent {model.rotary_percent} is out of range: give more than 0, up to 1")
    if model.position_embedding_type == "rope" and (model.rotary_channels < 2 or model.rotary_channels % 2):
        raise ConfigError(
            f"--rotary-percent {model.rotary_percent} of heads of width {model.kv_channels} rotates "
            f"{model.rotary_channels} channels, and they turn in pairs: change it, or --kv-channels"
        )
    for low, high in (
        ("rotary_low_frequency_factor", "rotary_high_frequency_factor"),
        ("rotary_beta_slow", "rotary_beta_fast"),
    ):
        if not getattr(model, low) < getattr(model, high):
            raise ConfigError(
                f"{flag(low)} {getattr(model, low)} is not less than {flag(high)} {getattr(model, high)}: change one"
            )
    if model.rotary_scaling == "none" and model.rotary_scaling_factor != 1:
        raise ConfigError(
            f"--rotary-scaling-factor {model.rotary_scaling_factor} contradicts --rotary-scaling none: drop one of them"
        )
    if model.rotary_scaling != "none" and model.position_embedding_type != "rope":
        raise ConfigError(
            f"--rotary-scaling {model.rotary_scaling} has no rotations to scale: add --position-embedding-type rope"
        )
