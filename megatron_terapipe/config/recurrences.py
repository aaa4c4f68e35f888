"""Layers with a state in place of attention: Mamba-2 and gated delta nets, and the patterns that name them.

    symbol   layer
    M        Mamba-2             Dao and Gu, arXiv 2405.21060
    G        gated delta net     Yang et al., arXiv 2412.06464
    *, A     attention; configurations have the letter, which shells leave as it is
    -        MLP
    E        experts

A layer of a hybrid pattern has one part and one norm; the pattern, and its symbols, are Megatron's. With
--linear-attention-freq a layer has two parts as usual, and a gated delta net in place of attention.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_terapipe.config.experts import ExpertSettings
from megatron_terapipe.config.layers import MOST_HEADS, MOST_WIDTH, BlockShape, Recurrence, layers_of_pattern
from megatron_terapipe.config.options import option, resolve
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError

PATTERN_FLAG = "--hybrid-layer-pattern"
_SYMBOLS = "MGA-E"
_ELSEWHERE = {"D": "sparse attention with an indexer", "+": "latent attention", "/": "multi-token prediction"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrenceSettings(ExpertSettings):
    """Layers with a state in a model."""

    hybrid_layer_pattern: str | None = option(None, metavar="PATTERN", aliases=("--hybrid-override-pattern",))
    """Layers of one part each, by symbols: M for Mamba-2, G for a gated delta net, * or A for attention, - for an MLP,
    E for experts, such as M-M-M*-M-. --num-layers follows from it. A | between two layers begins a stage."""

    mamba_num_heads: int | None = option(
        derived="2 x --hidden-size / --mamba-head-dim, with M in --hybrid-layer-pattern", least=1, most=MOST_HEADS
    )
    """Heads of a Mamba-2 layer."""

    mamba_head_dim: int = option(64, least=1, most=MOST_WIDTH)
    """Width of a head of Mamba-2."""

    mamba_num_groups: int = option(8, least=1, most=MOST_HEADS)
    """Groups of heads of Mamba-2, which share B and C."""

    mamba_state_dim: int = option(128, least=1, most=MOST_WIDTH)
    """State of each channel of Mamba-2."""

    experimental_attention_variant: Literal["none", "gated_delta_net"] = option(
        "none",
        needs=("linear_attention_freq",),
        spellings={"gdn": "gated_delta_net"},
        elsewhere={"dsa": MODEL_CANNOT_BE_TRAINED},
    )
    """Token mixer of the layers that --linear-attention-freq names."""

    linear_attention_freq: str | None = option(None, metavar="PATTERN", needs=("experimental_attention_variant",))
    """Layers with linear attention: a number N for all but every Nth layer, or a list with a 1 for each such layer and
    a 0 for each with attention, `([1]*3+[0])*8`."""

    linear_conv_kernel_dim: int = option(4, least=2, most=1024)
    """Taps of the convolution in a gated delta net."""

    linear_num_key_heads: int = option(16, least=1, most=MOST_HEADS)
    """Heads of queries and keys of a gated delta net."""

    linear_num_value_heads: int = option(32, least=1, most=MOST_HEADS)
    """Heads of values of a gated delta net."""

    linear_key_head_dim: int = option(128, least=1, most=MOST_WIDTH)
    """Width of a head of queries and keys of a gated delta net."""

    linear_value_head_dim: int = option(128, least=1, most=MOST_WIDTH)
    """Width of a head of values of a gated delta net."""

    @property
    def mamba(self) -> Recurrence:
        """The Mamba-2 layer of the model, with the four taps of Megatron's."""
        assert self.mamba_num_heads is not None, "resolved where a layer has it"
        return Recurrence(
            kind="mamba2",
            num_heads=self.mamba_num_heads,
            num_groups=self.mamba_num_groups,
            key_size=self.mamba_state_dim,
            value_size=self.mamba_head_dim,
            conv_size=4,
        )

    @property
    def delta_net(self) -> Recurrence:
        """The gated delta net of the model."""
        return Recurrence(
            kind="gated-delta-net",
            num_heads=self.linear_num_value_heads,
            num_groups=self.linear_num_key_heads,
            key_size=self.linear_key_head_dim,
            value_size=self.linear_value_head_dim,
            conv_size=self.linear_conv_kernel_dim,
        )

    def with_recurrences(self, shapes: list[BlockShape], usual: BlockShape, experts: BlockShape) -> list[BlockShape]:
        """Return the layers of a pattern, or the usual ones with a state where they have one."""
        if self.hybrid_layer_pattern is not None:
            return [self._of_symbol(symbol, usual, experts) for symbol in self.hybrid_layer_pattern]
        if self.linear_attention_freq is None:
            return shapes
        named = layers_of_pattern(self.linear_attention_freq, len(shapes), "--linear-attention-freq")
        is_number = self.linear_attention_freq.strip().isdigit()
        return [
            replace(shape, num_key_value_heads=0, latent=None, recurrence=self.delta_net)
            if each is not is_number
            else shape
            for shape, each in zip(shapes, named, strict=True)
        ]

    def _of_symbol(self, symbol: str, usual: BlockShape, experts: BlockShape) -> BlockShape:
        if symbol in "MG":
            recurrence = self.mamba if symbol == "M" else self.delta_net
            return BlockShape(num_key_value_heads=0, ffn_hidden_size=0, recurrence=recurrence)
        if symbol == "A":
            return replace(usual, ffn_hidden_size=0)
        return replace(experts if symbol == "E" else usual, num_key_value_heads=0, latent=None)


def pattern_and_stages(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the symbols of a pattern, A for attention, and the bounds of the stages that it draws, if it draws any."""
    for symbol, meaning in _ELSEWHERE.items():
        if symbol in text:
            raise ConfigError(f"{PATTERN_FLAG} {text} has a {symbol}, {meaning}: {MODEL_CANNOT_BE_TRAINED}")
    parts = text.strip().replace("*", "A").split("|")
    symbols = "".join(parts)
    if unknown := set(symbols) - set(_SYMBOLS):
        raise ConfigError(
            f"{PATTERN_FLAG} {text} has the unknown symbol {min(unknown)!r}: use M, G, *, -, E, and | between stages"
        )
    if not symbols:
        raise ConfigError(f"{PATTERN_FLAG} has no layer: give symbols such as M-M*-")
    bounds = tuple(len("".join(parts[:count])) for count in range(len(parts) + 1))
    return symbols, bounds if len(parts) > 1 else ()


def resolve_recurrences(settings: RecurrenceSettings, *, num_layers: int, hidden_size: int) -> None:
    """Fill in the heads of Mamba-2, and check the rules between the settings.

    Raises:
        ConfigError: naming the value and the rule.
    """
    pattern = settings.hybrid_layer_pattern
    if pattern is not None:
        symbols, bounds = pattern_and_stages(pattern)
        object.__setattr__(settings, "hybrid_layer_pattern", symbols)
        _check_pattern(settings, pattern, bounds, num_layers)
        if "M" in symbols:
            if settings.mamba_num_heads is None and 2 * hidden_size % settings.mamba_head_dim:
                raise ConfigError(
                    f"--mamba-head-dim {settings.mamba_head_dim} does not divide 2 x --hidden-size {hidden_size}: "
                    "change one of them, or give --mamba-num-heads"
                )
            resolve(settings, "mamba_num_heads", 2 * hidden_size // settings.mamba_head_dim)
            if (settings.mamba_num_heads or 0) % settings.mamba_num_groups:
                raise ConfigError(
                    f"--mamba-num-groups {settings.mamba_num_groups} does not divide --mamba-num-heads "
                    f"{settings.mamba_num_heads}: give one of its divisors"
                )
    if settings.linear_num_value_heads % settings.linear_num_key_heads:
        raise ConfigError(
            f"--linear-num-key-heads {settings.linear_num_key_heads} does not divide --linear-num-value-heads "
            f"{settings.linear_num_value_heads}: give one of its divisors"
        )


def _check_pattern(settings: RecurrenceSettings, text: str, bounds: tuple[int, ...], num_layers: int) -> None:
    """Check a pattern, as it was typed, against the other settings."""
    symbols = settings.hybrid_layer_pattern or ""
    if bounds:
        raise ConfigError(
            f"{PATTERN_FLAG} {text} draws stages, which do not belong to a model: give {symbols}, and "
            f"--stage-partition {','.join(map(str, bounds))}"
        )
    if num_layers != len(symbols):
        raise ConfigError(
            f"{PATTERN_FLAG} {text} has {len(symbols)} layers, and --num-layers is {num_layers}: drop the latter"
        )
    if settings.linear_attention_freq is not None:
        raise ConfigError(f"{PATTERN_FLAG} names every layer: drop --linear-attention-freq")
    if ("E" in symbols) != (settings.num_experts is not None):
        if settings.num_experts is None:
            raise ConfigError(f"{PATTERN_FLAG} {text} has layers of experts: add --num-experts")
        raise ConfigError(
            f"{PATTERN_FLAG} {text} has no layer for --num-experts {settings.num_experts}: add an E, or drop it"
        )
