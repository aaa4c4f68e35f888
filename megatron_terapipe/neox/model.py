"""Settings of the model: attention, MLP, initial weights, positions, norms, biases."""

from collections.abc import Mapping
from math import sqrt
from types import MappingProxyType
from typing import Any

from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN, ConfigError
from megatron_terapipe.neox.settings import Conversion, Defaults

NOT_ATTENTION = {
    "mamba": "Mamba layers are not in this trainer",
    "rwkv": "recurrent layers are not in this trainer",
    "gmlp": "MLPs over positions are not in this trainer",
    "amlp": "MLPs over positions are not in this trainer",
}
"""Kinds of layers that do not attend, or not in this way, and the reason why they are refused."""


def convert_attention(conversion: Conversion) -> None:
    """Convert heads, kinds and windows.

    Raises:
        ConfigError: if layers do not attend, so that nothing else matters.
    """
    groups = conversion.count("num_kv_heads")
    if groups:
        conversion.flag("--num-key-value-heads", groups)
    layers = conversion.count("num_layers")
    kinds = layer_kinds(conversion.take("attention_config"), layers)
    for kind in sorted(set(kinds) - {"global", "flash"}):
        conversion.refuse(f"attention_config {kind}", NOT_ATTENTION.get(kind, "attention is global"))
    if NOT_ATTENTION.keys() & set(kinds):
        conversion.check()
    _window(conversion, kinds)


def _window(conversion: Conversion, kinds: list[str]) -> None:
    """NeoX's window counts the tokens before a token, and only its flash layers have it."""
    width = conversion.count("sliding_window_width")
    if width is None:
        return
    if conversion.settings.get("te_mha"):
        conversion.refuse(f"sliding_window_width {width}", "Transformer Engine takes two numbers", "leave te_mha out")
        return
    with_window = [int(kind == "flash") for kind in kinds]
    if not any(with_window):
        conversion.remark("sliding_window_width", "NeoX gives a window to flash layers alone, and there is none")
        return
    conversion.flag("--sliding-window", width + 1)
    if not all(with_window):
        conversion.flag("--window-attn-skip-freq", str(with_window).replace(" ", ""))


MOST_LAYERS = 10_000
"""Layers of a model at most, as in `--num-layers`."""


def layer_kinds(config: Any, num_layers: int | None) -> list[str]:
    """Return the kind of each layer.

    Args:
        config: the kinds as NeoX takes them, `[[["global", "flash"], 6]]`, or a kind for each layer; None = global.
        num_layers: layers of the model; None = not given.

    Raises:
        ConfigError: if it is written in another way, or for another number of layers.
    """
    if config is None:
        return ["global"] * (num_layers or 1)
    kinds: list[str] = []
    try:
        for entry in config:
            if isinstance(entry, str):
                kinds.append(entry)
                continue
            pattern, times = entry
            if times == "all":
                times = (num_layers or len(pattern)) // len(pattern)
            if times * max(len(pattern), 1) > MOST_LAYERS:
                raise ValueError("too many layers")
            kinds += [str(kind) for kind in pattern] * times
    except (TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(f'attention_config {config!r} is not a list such as [[["flash"], 12]]: write one') from None
    if num_layers is not None and len(kinds) != num_layers:
        raise ConfigError(
            f"attention_config describes {len(kinds)} layers and num_layers is {num_layers}: describe each layer once"
        )
    return kinds


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


NOT_NORMAL = ("orthogonal", "scaled_orthogonal", "xavier_uniform", "xavier_normal")
"""Methods of NeoX whose numbers are not drawn from one normal distribution."""


def convert_initial_weights(conversion: Conversion) -> None:
    """Convert how weights start: the standard deviation of most of them, and that of writers to the residual stream."""
    std = conversion.number("init_method_std", 0.02)
    methods = {
        "--init-method-std": ("init_method", conversion.take("init_method", "normal")),
        "--output-layer-init-std": (
            "output_layer_init_method",
            conversion.take("output_layer_init_method", "scaled_normal"),
        ),
    }
    hidden_size, layers = conversion.count("hidden_size"), conversion.count("num_layers")
    if not hidden_size or not layers:
        return
    for flag, (key, method) in methods.items():
        start = standard_deviation(method, std, hidden_size=hidden_size, num_layers=layers)
        if start is None:
            reason = "weights start from a normal distribution" if method in NOT_NORMAL else "no method of NeoX"
            conversion.refuse(f"{key} {method}", reason, TRAINING_CANNOT_BE_RUN)
        else:
            conversion.flag(flag, repr(start))


def standard_deviation(method: str, std: float, *, hidden_size: int, num_layers: int) -> float | None:
    """Return the standard deviation of a method of NeoX; None if it is not one number for every matrix."""
    known = {
        "normal": std,
        "scaled_normal": std / sqrt(2 * num_layers),
        # One residual a layer instead of two.
        "single_residual_scaled_normal": std / sqrt(num_layers),
        # Nguyen and Salazar, arXiv 1910.05895, section 2.2: Xavier's for a matrix of d x 4d.
        "small_init": sqrt(2 / (5 * hidden_size)),
        # GPT-J's, by its author Ben Wang.
        "wang_init": 2 / (num_layers * sqrt(hidden_size)),
    }
    return known.get(method)


POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
NORMS = {
    "layernorm": ("layernorm", "layernorm_epsilon"),
    "te_layernorm": ("layernorm", "layernorm_epsilon"),
    "rmsnorm": ("rmsnorm", "rms_norm_epsilon"),
    "te_rmsnorm": ("rmsnorm", "rms_norm_epsilon"),
}
"""Type of the trainer's norm, and the setting of its epsilon."""

EPSILONS = {"layernorm_epsilon": 1e-5, "rms_norm_epsilon": 1e-8}
"""NeoX's defaults; Transformer Engine's norms within the MLP have them whatever the files say."""


def convert_model(conversion: Conversion, defaults: Defaults) -> None:
    """Convert what the layers are made of.

    Args:
        defaults: values of settings that are left out and whose default has changed.
    """
    _positions(conversion)
    _norms(conversion)
    convert_attention(conversion)
    convert_mlp(conversion)
    _biases(conversion)
    _residual(conversion)
    _dropout(conversion, defaults)


def _positions(conversion: Conversion) -> None:
    name = str(conversion.take("pos_emb", "learned"))
    percent, base = conversion.number("rotary_pct", 1.0), conversion.number("rotary_emb_base", 10000)
    if name not in POSITIONS:
        conversion.refuse(f"pos_emb {name}", "positions can be learned, rotary or none")
        return
    conversion.flag("--position-embedding-type", POSITIONS[name])
    if name == "rotary":
        conversion.flag("--rotary-base", base)
        conversion.flag("--rotary-percent", percent)


def _norms(conversion: Conversion) -> None:
    name = conversion.take("norm", "layernorm")
    epsilons = {key: conversion.number(key, default) for key, default in EPSILONS.items()}
    if name not in NORMS:
        conversion.refuse(f"norm {name}", "norms can be layernorm or rmsnorm")
        return
    ours, key = NORMS[name]
    if not conversion.take("use_bias_in_norms", True) and ours == "layernorm":
        conversion.refuse("use_bias_in_norms false", "a LayerNorm has a bias")
    if conversion.settings.get("te_layernorm_mlp") and epsilons[key] != EPSILONS[key]:
        reason = f"with te_layernorm_mlp NeoX gives the MLP's norm {EPSILONS[key]}, and here all norms have one epsilon"
        conversion.refuse(f"{key} {epsilons[key]}", reason)
    conversion.flag("--normalization", ours)
    conversion.flag("--layernorm-epsilon", epsilons[key])


def has_biases(conversion: Conversion) -> tuple[bool, bool]:
    """Return whether the matrices of attention have biases, and those of the MLP."""
    attention = bool(conversion.take("use_bias_in_attn_linear", True))
    mlp = bool(conversion.take("use_bias_in_mlp", True))
    # NeoX's older gated MLP has none, and Transformer Engine's layers are always built with them.
    if conversion.take("mlp_type") == "llama":
        mlp = False
    if conversion.settings.get("te_mha"):
        attention = True
    if conversion.settings.get("te_layernorm_mlp"):
        mlp = True
    return attention, mlp


def _biases(conversion: Conversion) -> None:
    attention, mlp = has_biases(conversion)
    if not (attention and mlp):
        conversion.flag("--disable-bias-linear")
    if attention and not mlp:
        conversion.flag("--add-attention-bias")
    if mlp and not attention:
        conversion.flag("--add-mlp-bias")


def _residual(conversion: Conversion) -> None:
    parallel, tied = conversion.take("gpt_j_residual", False), conversion.take("gpt_j_tied", False)
    if not parallel:
        return
    conversion.flag("--parallel-residual")
    if tied:
        conversion.flag("--shared-block-norm")
    if not has_biases(conversion)[1]:
        reason = "attention and MLP add up in every layer; NeoX loses the attention of layers whose MLP has no biases"
        conversion.remark("gpt_j_residual", reason)


def _dropout(conversion: Conversion, defaults: Defaults) -> None:
    hidden = conversion.number("hidden_dropout", defaults.dropout)
    conversion.flag("--hidden-dropout", hidden)
    conversion.flag("--attention-dropout", conversion.number("attention_dropout", defaults.dropout))
    attention_bias, mlp_bias = has_biases(conversion)
    parallel = conversion.settings.get("gpt_j_residual")
    if hidden and not (mlp_bias and (attention_bias or not parallel)):
        reason = (
            "NeoX drops nothing where a matrix has no bias, and here dropout does not depend on biases: set it to 0"
        )
        conversion.refuse(f"hidden_dropout {hidden}", reason)
