"""Settings of the optimizer, number types, ZeRO and recomputation."""

from typing import Any

from megatron_terapipe.arguments.megatron_flags.unsupported_flags import TRAINING
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion, as_number
from megatron_terapipe.neox.defaults import Defaults

LOSS_SCALING = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
NUMBER_TYPES = {
    "fp16": ("enabled", "type", "fp16", *LOSS_SCALING),
    # What a file says of loss scaling in bf16, DeepSpeed does not read.
    "bf16": ("enabled", "bf16", *LOSS_SCALING),
    "data_types": ("grad_accum_dtype",),
}
"""Entries of each section that are read here, or have no effect."""

ADAMS = ("adam", "adamw", "cpu_adam", "cpu_torch_adam")


def convert_optimizer(conversion: Conversion, defaults: Defaults) -> None:
    """Convert the optimizer, but for its learning rate over time.

    Args:
        defaults: values of settings that are left out and whose default has changed.

    Raises:
        ConfigError: if its parameters are not written as NeoX takes them.
    """
    section = conversion.section("optimizer")
    params = section.get("params") or {}
    if not isinstance(params, dict):
        raise ConfigError(f"optimizer.params {params!r} is not a mapping: write it as {{...}}")
    kind = str(section.get("type", "Adam")).lower()
    decay = conversion.number("weight_decay", params.get("weight_decay", defaults.weight_decay))
    if kind == "sgd":
        conversion.flag("--optimizer", "sgd")
        conversion.flag("--sgd-momentum", as_number("optimizer.params.momentum", params.get("momentum", 0.0)))
    elif kind in ADAMS:
        _adam(conversion, params)
    else:
        conversion.refuse(f"optimizer {kind}", "it can be adam or sgd", TRAINING)
    if kind.startswith("cpu"):
        conversion.remark(f"optimizer {kind}", "the optimizer stays on the accelerator")
    if decay and False in (params.get("adam_w_mode"), params.get("adamw_mode")):
        conversion.refuse(f"weight_decay {decay} in the gradient", "weights decay apart from the gradient", TRAINING)
    known = {"lr", "betas", "eps", "weight_decay", "momentum", "torch_adam", "adam_w_mode", "adamw_mode"}
    for name in sorted(set(params) - known):
        conversion.refuse(f"optimizer.params.{name}", "the optimizer has no such parameter", TRAINING)
    conversion.flag("--lr", as_number("optimizer.params.lr", params.get("lr", 0.001)))
    conversion.flag("--weight-decay", decay)
    conversion.flag("--clip-grad", conversion.number("gradient_clipping", 1.0))


def _adam(conversion: Conversion, params: dict[str, Any]) -> None:
    conversion.flag("--optimizer", "adam")
    betas = params.get("betas", (0.9, 0.999))
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ConfigError(f"optimizer.params.betas {betas!r} are not two numbers: write them as [0.9, 0.95]")
    for name, beta in zip(("--adam-beta1", "--adam-beta2"), betas, strict=True):
        conversion.flag(name, as_number("optimizer.params.betas", beta))
    conversion.flag("--adam-eps", as_number("optimizer.params.eps", params.get("eps", 1e-8)))


def convert_precision(conversion: Conversion) -> str:
    """Convert number types and loss scaling. Returns `fp32`, `fp16` or `bf16`."""
    half, brain = conversion.section("fp16"), conversion.section("bf16")
    precision = {"bfloat16": "bf16", "bf16": "bf16", "fp16": "fp16"}.get(str(conversion.take("precision")), "fp32")
    if brain.get("enabled") or (half.get("enabled") and half.get("type") == "bfloat16"):
        precision = "bf16"
    elif half.get("enabled"):
        precision = "fp16"
    types = conversion.section("data_types")
    for owner, names in NUMBER_TYPES.items():
        for name, value in conversion.section(owner).items():
            if name not in names and value:
                remedy = "give it in a file for --deepspeed-config, and leave it out here"
                conversion.refuse(f"{owner}.{name}", "no flag decides it", remedy)
    if precision != "fp32":
        conversion.flag(f"--{precision}")
    if types.get("grad_accum_dtype") == "fp32" and precision == "fp16":
        conversion.flag("--accumulate-allreduce-grads-in-fp32")
    if precision == "fp16":
        _loss_scale(conversion, half)
    return precision


def _loss_scale(conversion: Conversion, half: dict[str, Any]) -> None:
    scale = as_number("fp16.loss_scale", half.get("loss_scale", 0))
    if scale:
        conversion.flag("--loss-scale", scale)
    power = as_number("fp16.initial_scale_power", half.get("initial_scale_power", 16))
    conversion.flag("--initial-loss-scale", 2 ** int(power))
    for name, default in (("loss_scale_window", 1000), ("hysteresis", 2), ("min_loss_scale", 1)):
        conversion.flag(f"--{name.replace('_', '-')}", int(as_number(f"fp16.{name}", half.get(name, default))))


def convert_zero(conversion: Conversion, precision: str) -> None:
    """Convert the ZeRO stage. All stages compute the same update.

    Args:
        precision: `fp32`, `fp16` or `bf16`.
    """
    zero = conversion.section("zero_optimization")
    stage = int(as_number("zero_optimization.stage", zero.pop("stage", 0)))
    ours = min(stage, 1)
    if stage > 1:
        reason = "ZeRO 2 and 3 do not go with pipelines; 1 computes the same, with more memory"
        conversion.remark(f"zero_optimization.stage {stage}", reason)
    if ours == 0 and precision != "fp32":
        ours = 1
        conversion.remark("zero_optimization.stage 0", f"{precision} takes ZeRO 1 here; it computes the same")
    conversion.flag("--zero-stage", ours)
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        if name in zero:
            conversion.flag(
                f"--zero-{name.replace('_', '-')}", int(as_number(f"zero_optimization.{name}", zero.pop(name)))
            )
    for name in ("reduce_scatter", "contiguous_gradients"):
        if zero.get(name) is True:
            conversion.flag(f"--zero-{name.replace('_', '-')}")
            zero.pop(name)
    for name, value in zero.items():
        if value is False:  # What is off needs no word.
            continue
        offload = "offload" in name
        reason = "nothing is offloaded" if offload else "it can stand in a file for --deepspeed-config"
        conversion.remark(f"zero_optimization.{name}", reason)


def convert_recomputation(conversion: Conversion) -> None:
    """Convert the recomputation of activations."""
    layers = conversion.count("checkpoint_num_layers", 1) or 1
    if conversion.take("checkpoint_activations", False):
        conversion.flag("--recompute-granularity", "full")
        conversion.flag("--recompute-num-layers", layers)
