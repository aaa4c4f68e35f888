"""Settings of the model."""

from math import isclose, sqrt

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion, Effect

POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
NORMS = {"layernorm": ("layernorm_epsilon", 1e-5), "rmsnorm": ("rms_norm_epsilon", 1e-8)}
GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")


def convert_model(conversion: Conversion) -> None:
    """Convert what the layers are made of."""
    _positions(conversion)
    _norm(conversion)
    _mlp(conversion)
    _biases(conversion)
    _attention(conversion)
    _initial_weights(conversion)


def _positions(conversion: Conversion) -> None:
    name = conversion.take("pos_emb", "learned")
    percent, base = conversion.number("rotary_pct", 1.0), conversion.number("rotary_emb_base", 10000)
    if name not in POSITIONS:
        conversion.note("pos_emb", Effect.CHANGES, f"positions cannot be {name}; they are learned in this command")
    conversion.flag("--position-embedding-type", POSITIONS.get(name, "learned_absolute"))
    if name == "rotary":
        conversion.flag("--rotary-base", base)
        conversion.flag("--rotary-percent", percent)


def _norm(conversion: Conversion) -> None:
    name = conversion.take("norm", "layernorm")
    epsilons = {key: conversion.number(key, default) for key, default in NORMS.values()}
    if name not in NORMS:
        conversion.note("norm", Effect.CHANGES, f"the norm cannot be {name}; it is layernorm in this command")
        name = "layernorm"
    biases = conversion.take("use_bias_in_norms", True)
    if not biases and name == "layernorm":
        conversion.note("use_bias_in_norms", Effect.CHANGES, "LayerNorm has a bias")
    conversion.flag("--normalization", name)
    conversion.flag("--layernorm-epsilon", epsilons[NORMS[name][0]])


def _mlp(conversion: Conversion) -> None:
    name = conversion.take("activation", "gelu")
    fused = conversion.take("bias_gelu_fusion", False) or conversion.take("openai_gelu", False)
    # NeoX's GELU has the error function; its fused kernel has the tanh form.
    activation = {"gelu": "gelu" if fused else "gelu-exact", "relu": "relu", "swiglu": "swiglu"}.get(name)
    gated_by_type = conversion.take("mlp_type", "regular") == "llama"
    if gated_by_type:
        activation = "swiglu" if name in ("silu", "swish", "swiglu") else None
    if activation is None:
        conversion.note("activation", Effect.CHANGES, f"the activation cannot be {name}; it is gelu in this command")
    conversion.flag("--activation", activation or "gelu")
    hidden_size = conversion.count("hidden_size")
    if hidden_size is not None:
        width = _mlp_width(conversion, hidden_size, scaled=name in GATED and not gated_by_type, gated=gated_by_type)
        conversion.flag("--ffn-hidden-size", width)


def _mlp_width(conversion: Conversion, hidden_size: int, *, scaled: bool, gated: bool) -> int:
    """Return the width of the MLP as NeoX computes it.

    A gated activation has two thirds of the width that is asked for, and half of that on each side of the gate. The
    older `mlp_type: llama` takes two thirds of 4h, in multiples of 256.
    """
    given = conversion.count("intermediate_size")
    multiple = conversion.count("mlp_multiple_of", 256 if gated else 1) or 1
    if gated:
        width = given or int(2 * 4 * hidden_size / 3)
    else:
        width = given or 4 * hidden_size
        if scaled:
            width = int(width * 2 / 3) // 2
    return -(-width // multiple) * multiple


def _biases(conversion: Conversion) -> None:
    attention = bool(conversion.take("use_bias_in_attn_linear", True))
    mlp, cause = bool(conversion.take("use_bias_in_mlp", True)), "use_bias_in_mlp"
    if conversion.take("mlp_type") == "llama":
        mlp, cause = False, "mlp_type"
    if attention != mlp:
        reason = "all linear layers have biases or none; they have them in this command"
        conversion.note(cause if attention else "use_bias_in_attn_linear", Effect.CHANGES, reason)
    if not attention and not mlp:
        conversion.flag("--disable-bias-linear")


def _attention(conversion: Conversion) -> None:
    groups = conversion.count("num_kv_heads")
    if groups:
        conversion.flag("--num-key-value-heads", groups)
    config = conversion.take("attention_config", [])
    try:
        kinds = {kind for kinds, _ in config for kind in kinds}
    except (TypeError, ValueError):
        raise ConfigError(f'attention_config {config!r} is not a list such as [[["flash"], 12]]: write one') from None
    others = sorted(kinds - {"global", "flash"})
    if others:
        conversion.note("attention_config", Effect.CHANGES, f"attention is global in every layer, never {others[0]}")


def _initial_weights(conversion: Conversion) -> None:
    std = conversion.number("init_method_std", 0.02)
    hidden_size, layers = conversion.count("hidden_size"), conversion.count("num_layers")
    method = conversion.take("init_method", "normal")
    output = conversion.take("output_layer_init_method", "scaled_normal")
    if not hidden_size or not layers:
        return
    known = {
        "normal": std,
        "scaled_normal": std / sqrt(2 * layers),
        "small_init": sqrt(2 / (5 * hidden_size)),
        "wang_init": 2 / (layers * sqrt(hidden_size)),
    }
    if method not in known:
        conversion.note("init_method", Effect.CHANGES, f"weights start from a normal distribution, not {method}")
    start = known.get(method, std)
    conversion.flag("--init-method-std", float(f"{start:.8g}"))
    ours = start / sqrt(2 * layers)
    if output not in known:
        reason = f"weights start from a normal distribution, not {output}"
        conversion.note("output_layer_init_method", Effect.CHANGES, reason)
    elif not isclose(ours, known[output], rel_tol=1e-6):
        reason = f"projections into the residual stream start with a standard deviation of {ours:.4g}, not "
        conversion.note("output_layer_init_method", Effect.NEAR, f"{reason}{known[output]:.4g}")
