"""Rotary positions: their settings in the model section, the rules between these, and the frequencies that they give.

Peng    Peng et al., YaRN, arXiv 2309.00071
Ding    Ding et al., LongRoPE, arXiv 2402.13753; lists and attention factor as in Phi-3 (arXiv 2404.14219)
NTK     dynamic scaling has no paper of its own; Peng, section 3.2 and equation 16, has its base
Llama   Grattafiori et al., arXiv 2407.21783; the formula of its scaling as in the released code
"""

from dataclasses import dataclass, replace
from math import ceil, floor, isfinite, log, pi, sqrt
from typing import Literal, TypeVar

from megatron_terapipe.config.latent import LatentSettings, yarn_factor
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.config.options import Otherwise, check_bounds, flag, option, resolve
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationSettings(LatentSettings):
    """Positions of the tokens in a model."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = option(
        "learned_absolute",
        # Scripts pass the second together with RoPE: it is about the learned positions.
        also={"--use-rotary-position-embeddings": "rope", "--no-position-embedding": Otherwise("none")},
        elsewhere=dict.fromkeys(("relative", "mrope", "alibi"), MODEL_CANNOT_BE_TRAINED),
    )
    """How the model encodes positions: `learned_absolute` adds a learned vector for each position, `rope` rotates
    queries and keys, `none` does neither. Megatron's `yarn` is `rope` with `--rotary-scaling yarn`."""

    rotary_base: float = option(10000.0, aliases=("--rotary-position-embeddings-theta",), above=0, most=1e15)
    """Base of the wavelengths of the rotations."""

    rotary_percent: float = option(1.0, above=0, most=1)
    """Fraction of each head that is rotated, its first channels."""

    rotary_interleaved: bool = option(
        derived="on with --multi-latent-attention, otherwise off", also={"--no-rotary-interleaved": False}
    )
    """Rotate channel 2i with channel 2i + 1. Where it is off, channel i turns with channel i + half of the rotated
    ones."""

    rotary_scaling: Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope"] = option(
        derived="linear with --rotary-scaling-factor above 1, yarn with --multi-latent-attention too, otherwise none",
        also={"--use-rope-scaling": "llama3", "--rope-type": {"rope": "none", "yarn": "yarn"}},
    )
    """How the rotations of a model are slowed down for longer sequences than its pretraining had: all alike
    (`linear`); only the slow ones, as in Llama 3.1 (`llama3`) or YaRN (`yarn`); by a larger base, for --seq-length
    beyond --rotary-original-length (`dynamic`); or by lists of factors, one for sequences up to that length and one for
    longer ones, as in Phi-3 (`longrope`)."""

    rotary_scaling_factor: float = option(
        derived="8 with llama3, --max-position-embeddings / --rotary-original-length with longrope, otherwise 1",
        aliases=("--rope-scaling-factor", "--rotary-seq-len-interpolation-factor"),
        above=0,
        most=1e6,
    )
    """How many times longer the sequences are that the rotations are scaled for."""

    rotary_original_length: int = option(
        derived="8192 with llama3, 4096 with --multi-latent-attention, otherwise --max-position-embeddings / "
        "--rotary-scaling-factor",
        aliases=("--original-max-position-embeddings", "--yarn-original-max-position-embeddings"),
        least=1,
        most=10**9,
    )
    """Tokens of the sequences before scaling: the limit between slow and fast rotations, with `dynamic` and `longrope`
    between short and long sequences."""

    rotary_short_factors: str | None = option(None, metavar="LIST")
    """`longrope`: divisors of the rotations if --seq-length is --rotary-original-length or less, a number for each pair
    of channels, with commas between them."""

    rotary_long_factors: str | None = option(None, metavar="LIST")
    """`longrope`: the same for longer sequences."""

    rotary_low_frequency_factor: float = option(1.0, above=0, most=1e6)
    """`llama3` scales rotations whole that turn fewer times than this within --rotary-original-length."""

    rotary_high_frequency_factor: float = option(4.0, above=0, most=1e6)
    """`llama3` does not scale rotations that turn more times than this within --rotary-original-length."""

    rotary_beta_slow: float = option(1.0, aliases=("--beta-slow", "--yarn-beta-slow"), above=0, most=1e6)
    """`yarn` scales rotations whole that turn fewer times than this within --rotary-original-length."""

    rotary_beta_fast: float = option(32.0, aliases=("--beta-fast", "--yarn-beta-fast"), above=0, most=1e6)
    """`yarn` does not scale rotations that turn more times than this within --rotary-original-length."""

    rotary_unrounded_ramp: bool = option(False, aliases=("--no-yarn-correction-range-round-to-int",))
    """`yarn`: keep the fractions of the numbers of channels between which rotations are scaled in part."""

    rotary_attention_factor: float = option(
        derived="0.1 m ln(--rotary-scaling-factor) + 1 with yarn for m = --mscale, over the same for m = "
        "--mscale-all-dim, sqrt(1 + ln(--rotary-scaling-factor) / ln(--rotary-original-length)) with longrope, "
        "otherwise 1",
        above=0,
        most=1e6,
    )
    """Factor of the rotated channels of queries and keys."""

    query_scaling_beta: float = option(0.0, least=0, most=1e6)
    """Multiply rotated queries by 1 + B ln(1 + floor(position / --rotary-original-length)), as Llama 4 does."""

    rotary_base_local: float | None = option(None, needs=("sliding_window",), above=0, most=1e15)
    """Base of the wavelengths in layers with a window, whose rotations are then not scaled. Default: as in other
    layers."""

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated; in latent attention beside learned positions, too, as in Megatron."""
        return self.position_embedding_type == "rope" or self.multi_latent_attention

    @property
    def rotary_channels(self) -> int:
        """Channels of each head that RoPE rotates."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.kv_channels * self.rotary_percent)

    @property
    def score_factor(self) -> float:
        """Factor of the scores by YaRN in latent attention; 1 otherwise."""
        if not self.multi_latent_attention or self.rotary_scaling != "yarn":
            return 1.0
        return yarn_factor(self.rotary_scaling_factor, self.mscale_all_dim) ** 2


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the queries and keys of a layer turn with their positions."""

    name: str
    """Its name among the rotations of the model."""
    frequencies: tuple[float, ...]
    """Angle per position of each pair of channels, in the order of the pairs."""
    factor: float = 1.0
    """Factor of the channels that turn."""
    query_scaling: tuple[float, int] = (0.0, 1)
    """B and L, where queries have a factor of 1 + B ln(1 + floor(position / L))."""
    interleaved: bool = False
    """Whether pair c is channels 2c and 2c + 1; otherwise it is channels c and c + the number of pairs."""


def rotation_of(model: RotationSettings, block: BlockShape) -> Rotation | None:
    """Return the rotation of a layer's queries and keys; None if it has none."""
    if not model.rotates or not block.rotated:
        return None
    scaling = model.query_scaling_beta, model.rotary_original_length
    if block.window is not None and model.rotary_base_local is not None:
        local = frequencies_of_base(model.rotary_base_local, model.rotary_channels)
        return Rotation("rotation in windows", local, 1.0, scaling, model.rotary_interleaved)
    factor = model.rotary_attention_factor
    return Rotation("rotation", scaled_frequencies(model), factor, scaling, model.rotary_interleaved)


def frequencies_of_base(base: float, channels: int) -> tuple[float, ...]:
    """Return the angle per position of each pair of channels (Su et al., RoFormer, arXiv 2104.09864 equation 15).

    Args:
        channels: channels that turn, an even number.
    """
    return tuple(base ** (-channel / channels) for channel in range(0, channels, 2))


def scaled_frequencies(model: RotationSettings) -> tuple[float, ...]:
    """Return the angle per position of each pair of channels, scaled by the settings of the model section."""
    plain = frequencies_of_base(model.rotary_base, model.rotary_channels)
    if model.rotary_scaling == "none":
        return plain
    if model.rotary_scaling == "dynamic":
        return frequencies_of_base(model.rotary_base * _base_stretch(model), model.rotary_channels)
    if model.rotary_scaling == "longrope":
        longer = model.seq_length > model.rotary_original_length
        factors = listed_factors(model, "rotary_long_factors" if longer else "rotary_short_factors")
        return tuple(each / factor for each, factor in zip(plain, factors, strict=True))
    kept = [0.0] * len(plain)
    if model.rotary_scaling != "linear":
        kept = (_kept_in_llama3 if model.rotary_scaling == "llama3" else _kept_in_yarn)(model, plain)
    factor = model.rotary_scaling_factor
    return tuple(each * (share + (1 - share) / factor) for each, share in zip(plain, kept, strict=True))


FOLLOW_LENGTH = ("dynamic", "longrope")
"""Scalings with which rotations depend on the length of sequences."""


Settings = TypeVar("Settings", bound=RotationSettings)


def for_length(model: Settings, tokens: int) -> Settings:
    """Return the model for sequences of another length, where its rotations depend on that.

    Args:
        tokens: length of the sequences; more than the model can process are as many as it can.
    """
    if model.rotary_scaling not in FOLLOW_LENGTH:
        return model
    return replace(model, seq_length=min(tokens, model.max_position_embeddings))


def _base_stretch(model: RotationSettings) -> float:
    """Factor of the base for sequences of this length, 1 up to the original one (Peng, section 3.2, equation 16)."""
    factor, channels = model.rotary_scaling_factor, model.rotary_channels
    longer = max(model.seq_length / model.rotary_original_length, 1.0)
    return float((factor * longer - (factor - 1)) ** (channels / (channels - 2)))


def listed_factors(model: RotationSettings, name: str) -> tuple[float, ...]:
    """Return the factors of a list of `longrope`, one for each pair of channels."""
    text, pairs = getattr(model, name), model.rotary_channels // 2
    if text is None:
        raise ConfigError(f"--rotary-scaling longrope divides rotations by lists of factors: add {flag(name)}")
    try:
        factors = tuple(float(part) for part in text.split(","))
    except ValueError:
        factors = ()
    if not factors or not all(isfinite(each) and each > 0 for each in factors):
        raise ConfigError(f"{flag(name)} {text} is not positive numbers with commas between them: write 1.0,1.05")
    if len(factors) != pairs:
        raise ConfigError(
            f"{flag(name)} lists {len(factors)} factors, and {pairs} pairs of channels turn: give one for each"
        )
    return factors


def _kept_in_llama3(model: RotationSettings, plain: tuple[float, ...]) -> list[float]:
    """Share of each frequency that is not scaled, which grows with its turns within the original length."""
    low, high = model.rotary_low_frequency_factor, model.rotary_high_frequency_factor
    turns = (model.rotary_original_length * each / (2 * pi) for each in plain)
    return [_within_unit((each - low) / (high - low)) for each in turns]


def _kept_in_yarn(model: RotationSettings, plain: tuple[float, ...]) -> list[float]:
    """Share of each frequency that is not scaled, which falls with its number (Peng, equations 17 to 19)."""

    def number(turns: float) -> float:
        """Number of the pair of channels that turns so often within the original length, a fraction."""
        wavelengths = model.rotary_original_length / (2 * pi * turns)
        return model.rotary_channels * log(wavelengths) / (2 * log(model.rotary_base))

    # The released code rounds both ends outwards, and lets the ramp end beyond the last pair.
    first, last = number(model.rotary_beta_fast), number(model.rotary_beta_slow)
    if not model.rotary_unrounded_ramp:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, model.rotary_channels - 1)
    width = last - first or 0.001
    return [1 - _within_unit((index - first) / width) for index in range(len(plain))]


def _within_unit(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def resolve_rotation(model: RotationSettings) -> None:
    """Fill in the settings of rotations that follow from others; only for `__post_init__` of the model section."""
    factor = model.rotary_scaling_factor
    usual_scaling = "yarn" if model.multi_latent_attention else "linear"
    resolve(model, "rotary_scaling", "none" if factor is None or factor == 1 else usual_scaling)
    usual = 8.0 if model.rotary_scaling == "llama3" else 1.0
    if model.rotary_scaling == "longrope" and model.rotary_original_length:
        usual = model.max_position_embeddings / model.rotary_original_length
    resolve(model, "rotary_scaling_factor", usual)
    resolve(model, "rotary_interleaved", model.multi_latent_attention)
    check_bounds(model)
    factor = model.rotary_scaling_factor
    before = max(1, int(model.max_position_embeddings / factor))
    if model.rotary_scaling == "llama3":
        before = 8192
    elif model.multi_latent_attention:
        before = 4096  # As in Megatron.
    resolve(model, "rotary_original_length", before)
    # Queries and keys take it each, so scores take its square.
    attention = 1.0
    if model.rotary_scaling == "yarn":
        attention = yarn_factor(factor, model.mscale) / yarn_factor(factor, model.mscale_all_dim)
    elif model.rotary_scaling == "longrope":
        attention = longrope_attention_factor(factor, model.rotary_original_length)
    resolve(model, "rotary_attention_factor", attention)
    for name in LISTS:
        if model.rotary_scaling == "longrope":
            # The same numbers have one form, so that models can be compared.
            object.__setattr__(model, name, ",".join(map(str, listed_factors(model, name))))


LISTS = ("rotary_short_factors", "rotary_long_factors")
"""Fields with lists of factors."""


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """Return the factor of the channels that turn (Phi-3, arXiv 2404.14219; Ding's scaling leaves it open)."""
    return sqrt(1 + log(factor) / log(original_length)) if factor > 1 and original_length > 1 else 1.0


def check_rotation(model: RotationSettings) -> None:
    """Check the settings of rotations against each other."""
    if model.multi_latent_attention and model.rotary_channels % 2:
        raise ConfigError(
            f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} is odd, and rotated channels turn in pairs: change it"
        )
    if model.rotates and (model.rotary_channels < 2 or model.rotary_channels % 2):
        raise ConfigError(
            f"--rotary-percent {model.rotary_percent} of heads of width {model.kv_channels} rotates "
            f"{model.rotary_channels} channels, and they turn in pairs: change it, or --kv-channels"
        )
    if model.rotary_scaling == "dynamic" and model.rotary_channels == 2:
        raise ConfigError(
            "--rotary-scaling dynamic enlarges the base of all rotations but the first, and 2 channels turn in one: "
            "choose linear, or raise --rotary-percent"
        )
    for name in LISTS:
        if model.rotary_scaling != "longrope" and getattr(model, name) is not None:
            raise ConfigError(f"{flag(name)} is for --rotary-scaling longrope, not {model.rotary_scaling}: drop it")
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
    if model.query_scaling_beta and not model.rotates:
        words = f"--query-scaling-beta {model.query_scaling_beta} is for rotated queries"
        raise ConfigError(f"{words}: add --position-embedding-type rope")
    if model.rotary_scaling != "none" and not model.rotates:
        raise ConfigError(
            f"--rotary-scaling {model.rotary_scaling} needs rotations: add --position-embedding-type rope"
        )
