"""Settings of the MLP: its activation and its width."""

from collections.abc import Mapping
from types import MappingProxyType

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"gelu": "gelu-exact", "relu": "relu", "swiglu": "swiglu", "geglu": "geglu-exact"}
)
"""NeoX's GELU has the error function; its fused kernel has the tanh form."""

TRANSFORMER_ENGINE: Mapping[str, str] = MappingProxyType(
    {**ACTIVATIONS, "gelu": "gelu", "geglu": "geglu", "squared_relu": "squared-relu", "srelu": "squared-relu"}
)
"""Activations of `te_layernorm_mlp`, whose GELU has the tanh form."""

GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")
"""Activations that double the first matrix in NeoX, whether they are here or not."""


def convert_mlp(conversion: Conversion) -> None:
    """Convert activation and width."""
    name = conversion.take("activation", "gelu")
    fused = conversion.take("bias_gelu_fusion", False) or conversion.take("openai_gelu", False)
    engine = bool(conversion.take("te_layernorm_mlp", False))
    older = conversion.take("mlp_type", "regular")
    activation = (TRANSFORMER_ENGINE if engine else ACTIVATIONS).get(name)
    if older == "llama":
        activation = "swiglu" if name in ("silu", "swish", "swiglu") else None
    elif older != "regular":
        conversion.refuse(f"mlp_type {older}", "it can be regular or llama")
    elif name == "gelu" and fused:
        activation = "gelu"
    hidden_size = conversion.count("hidden_size")
    asked, multiple = _asked(conversion, hidden_size or 0), conversion.count("mlp_multiple_of")
    if activation is None:
        conversion.refuse(f"activation {name}", "it can be gelu, relu, swiglu or geglu")
        return
    conversion.flag("--activation", activation)
    width = older_gated_width if older == "llama" else engine_width if engine else mlp_width
    if hidden_size is not None:
        conversion.flag("--ffn-hidden-size", width(asked, hidden_size, gated=name in GATED, multiple=multiple or None))


def mlp_width(asked: int | None, hidden_size: int, *, gated: bool, multiple: int | None) -> int:
    """Return the width of NeoX's MLP: with a gate, two thirds of what is asked for, and half of that on each side.

    Args:
        asked: width that the files ask for; None = 4 x hidden_size.
        gated: whether there is a gate.
        multiple: what the width is rounded up to a multiple of.
    """
    width = asked or 4 * hidden_size
    return _rounded(int(width * 2 / 3) // 2 if gated else width, multiple or 1)


def engine_width(asked: int | None, hidden_size: int, *, gated: bool, multiple: int | None) -> int:
    """Return the width of Transformer Engine's MLP as NeoX builds it, which has the whole width on each side of a gate.

    Args:
        asked: width that the files ask for; None = 4 x hidden_size.
        gated: whether there is a gate.
        multiple: half of what the width is rounded up to a multiple of.
    """
    width = asked or 4 * hidden_size
    return _rounded(int(width * 2 / 3) if gated else width, 2 * (multiple or 1))


def older_gated_width(asked: int | None, hidden_size: int, *, gated: bool, multiple: int | None) -> int:
    """Return the width of `mlp_type: llama`, NeoX's older gated MLP: what is asked for, otherwise two thirds of 4h.

    Args:
        asked: width that the files ask for; None = two thirds of 4 x hidden_size.
        multiple: what the width is rounded up to a multiple of; None = 256.
    """
    return _rounded(asked or int(2 * 4 * hidden_size / 3), multiple or 256)


def _asked(conversion: Conversion, hidden_size: int) -> int | None:
    """Return the width that the files ask for; None if they do not."""
    given, factor = conversion.count("intermediate_size"), conversion.number("expansion_factor")
    if given and factor:
        raise ConfigError(f"intermediate_size {given} and expansion_factor {factor} both size the MLP: remove one")
    return given or (int(factor * hidden_size) if factor else None)


def _rounded(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple
