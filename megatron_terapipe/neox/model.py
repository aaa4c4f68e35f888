"""Settings of the model."""

from megatron_terapipe.neox.attention import convert_attention
from megatron_terapipe.neox.conversion import Conversion
from megatron_terapipe.neox.defaults import Defaults
from megatron_terapipe.neox.mlp import convert_mlp

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
