"""Rotary positions: their settings in the model section, the rules between these, and the frequencies that they give.

Peng    Peng et al., YaRN, arXiv 2309.00071
Llama   Grattafiori et al., arXiv 2407.21783; the formula of its scaling is that of the released code
"""

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import TYPE_CHECKING

from megatron_terapipe.config.fields.options import check_bounds, flag, resolve
from megatron_terapipe.config.model.block_shape import BlockShape
from megatron_terapipe.errors import ConfigError

if TYPE_CHECKING:
    from megatron_terapipe.config.model.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the queries and keys of a layer turn with their positions.

    Attributes:
        name: its name among the rotations of the model.
        frequencies: angle per position of each pair of channels, in the order of the pairs.
        factor: factor of the channels that turn.
        interleaved: whether pair c is channels 2c and 2c + 1; otherwise it is channels c and c + the number of pairs.
    """

    name: str
    frequencies: tuple[float, ...]
    factor: float = 1.0
    interleaved: bool = False


def rotation_of(model: "ModelConfig", block: BlockShape) -> Rotation | None:
    """Return the rotation of a layer's queries and keys; None if it has none.

    Args:
        model: the model section.
        block: shape of the layer.
    """
    if model.position_embedding_type != "rope" or not block.rotated:
        return None
    if block.window is not None and model.rotary_base_local is not None:
        local = frequencies_of_base(model.rotary_base_local, model.rotary_channels)
        return Rotation("rotation in windows", local, interleaved=model.rotary_interleaved)
    return Rotation(
        "rotation", scaled_frequencies(model), model.rotary_attention_factor, interleaved=model.rotary_interleaved
    )


def frequencies_of_base(base: float, channels: int) -> tuple[float, ...]:
    """Return the angle per position of each pair of channels (Su et al., RoFormer, arXiv 2104.09864 equation 15).

    Args:
        base: base of the wavelengths.
        channels: channels that turn, an even number.
    """
    return tuple(base ** (-channel / channels) for channel in range(0, channels, 2))


def scaled_frequencies(model: "ModelConfig") -> tuple[float, ...]:
    """Return the angle per position of each pair of channels, scaled as the model section says."""
    plain = frequencies_of_base(model.rotary_base, model.rotary_channels)
    if model.rotary_scaling == "none":
        return plain
    kept = {"linear": _none_kept, "llama3": _kept_in_llama3, "yarn": _kept_in_yarn}[model.rotary_scaling](model, plain)
    factor = model.rotary_scaling_factor
    return tuple(each * (share + (1 - share) / factor) for each, share in zip(plain, kept, strict=True))


def _none_kept(model: "ModelConfig", plain: tuple[float, ...]) -> list[float]:
    return [0.0 for _ in plain]


def _kept_in_llama3(model: "ModelConfig", plain: tuple[float, ...]) -> list[float]:
    """Share of each frequency that is left alone, which grows with its turns within the original length."""
    low, high = model.rotary_low_frequency_factor, model.rotary_high_frequency_factor
    turns = (model.rotary_original_length * each / (2 * pi) for each in plain)
    return [_within_unit((each - low) / (high - low)) for each in turns]


def _kept_in_yarn(model: "ModelConfig", plain: tuple[float, ...]) -> list[float]:
    """Share of each frequency that is left alone, which falls with its number (Peng, equations 17 to 19)."""

    def number(turns: float) -> float:
        """Number of the pair of channels that turns so often within the original length, a fraction."""
        wavelengths = model.rotary_original_length / (2 * pi * turns)
        return model.rotary_channels * log(wavelengths) / (2 * log(model.rotary_base))

    # The released code rounds both ends outwards, and lets the ramp end beyond the last pair.
    first = max(floor(number(model.rotary_beta_fast)), 0)
    last = min(ceil(number(model.rotary_beta_slow)), model.rotary_channels - 1)
    width = last - first or 0.001
    return [1 - _within_unit((index - first) / width) for index in range(len(plain))]


def _within_unit(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def resolve_rotation(model: "ModelConfig") -> None:
    """Fill in the settings of rotations that follow from others; only for `__post_init__` of the model section.

    Raises:
        ConfigError: if one is not positive.
    """
    factor = model.rotary_scaling_factor
    resolve(model, "rotary_scaling", "none" if factor is None or factor == 1 else "linear")
    resolve(model, "rotary_scaling_factor", 8.0 if model.rotary_scaling == "llama3" else 1.0)
    check_bounds(model)
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
    if model.position_embedding_type == "rope" and (model.rotary_channels < 2 or model.rotary_channels % 2):
        raise ConfigError(
            f"--rotary-percent {model.rotary_percent} of heads of width {model.kv_channels} rotates "
            f"{model.rotary_channels} channels, and they turn in pairs: change it, or --kv-channels"
        )
    if model.rotary_scaling == "yarn" and model.rotary_base <= 1:
        raise ConfigError(
            f"--rotary-base {model.rotary_base} has no slow rotations that --rotary-scaling yarn could scale: raise it"
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
