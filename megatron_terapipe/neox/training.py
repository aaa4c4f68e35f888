"""Settings of the batch, the optimizer, the schedule, number types and ZeRO."""

from math import prod
from typing import Any

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion, Effect, as_number

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
LOSS_SCALING = (
    *("enabled", "type", "fp16", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
    "min_loss_scale",
)
ADAMS = ("adam", "adamw", "cpu_adam", "cpu_torch_adam")


def convert_parallel(conversion: Conversion) -> None:
    """Convert the ranks that share layers, the stages, and how layers are dealt to them."""
    # 0 stands for 1.
    conversion.flag("--tensor-model-parallel-size", max(1, conversion.count("model_parallel_size", 1) or 1))
    stages = max(1, conversion.count("pipe_parallel_size", 0) or 1)
    conversion.flag("--pipeline-model-parallel-size", stages)
    method = conversion.take("pipe_partition_method", "type:transformer|mlp")
    if stages > 1:
        ours = "parameters" if method == "parameters" else "uniform"
        conversion.flag("--stage-partition", ours)
        if not str(method).startswith("type:transformer") and method != "parameters":
            reason = "stages get the same number of transformer layers; see --stage-partition"
            conversion.note("pipe_partition_method", Effect.NONE, reason)


def convert_batch(conversion: Conversion, world_size: int | None) -> None:
    """Convert the batch sizes. NeoX computes the global batch size from the others and the number of processes.

    Args:
        conversion: settings, and the flags found so far.
        world_size: number of processes; None if it is not known.

    Raises:
        ConfigError: if the sizes do not fit together.
    """
    given = {key: None if conversion.take(key) == "auto" else conversion.count(key) for key in BATCH}
    whole, micro, accumulated = given.values()
    replicas = _replicas(conversion, world_size)
    if replicas is not None and whole is not None and micro is None:
        micro = whole // (replicas * (accumulated or 1))
    if replicas is not None and whole is None and micro is not None:
        whole = micro * replicas * (accumulated or 1)
    sequences = (micro or 1) * (replicas or 1) * (accumulated or 1)
    if micro == 0 or (whole is not None and (whole % sequences or (replicas and accumulated and whole != sequences))):
        listed = ", ".join(f"{key} {value}" for key, value in given.items() if value is not None)
        ranks = f"{replicas} data-parallel ranks" if replicas else "each other"
        raise ConfigError(f"{listed} do not fit {ranks}: change one of them")
    if micro is not None:
        conversion.flag("--micro-batch-size", micro)
    if whole is not None:
        conversion.flag("--global-batch-size", whole)
    if micro is None or (whole is None and (accumulated or 1) > 1):
        key, size = (BATCH[1], "micro-batch size") if micro is None else (BATCH[2], "global batch size")
        conversion.note(key, Effect.CHANGES, f"the {size} takes the number of processes: give --world-size")


def _replicas(conversion: Conversion, world_size: int | None) -> int | None:
    """Return the data-parallel size, if it can be known."""
    machine = [conversion.settings.get(key) for key in ("num_nodes", "num_gpus")]
    if world_size is None and all(isinstance(count, int) and count > 0 for count in machine):
        world_size = prod(machine)  # type: ignore[arg-type]
    if world_size is None:
        return None
    # 0 stands for 1.
    ranks = prod(max(1, conversion.count(key) or 1) for key in ("pipe_parallel_size", "model_parallel_size"))
    if world_size % ranks:
        raise ConfigError(
            f"{world_size} processes are not a multiple of the {ranks} ranks of a model: change one of them"
        )
    return world_size // ranks


def convert_optimizer(conversion: Conversion) -> None:
    """Convert the optimizer and its learning rate."""
    section = conversion.section("optimizer")
    params = section.get("params") or {}
    if not isinstance(params, dict):
        raise ConfigError(f"optimizer.params {params!r} is not a mapping: write it as {{...}}")
    kind = str(section.get("type", "Adam")).lower()
    if kind in ADAMS or kind != "sgd":
        if kind not in ADAMS:
            conversion.note("optimizer", Effect.CHANGES, f"{kind} is not here; it is adam in this command")
        elif kind.startswith("cpu"):
            conversion.note("optimizer", Effect.NONE, "the optimizer stays on the accelerator")
        conversion.flag("--optimizer", "adam")
        betas = params.get("betas", (0.9, 0.999))
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ConfigError(f"optimizer.params.betas {betas!r} are not two numbers: write them as [0.9, 0.95]")
        for name, beta in zip(("--adam-beta1", "--adam-beta2"), betas, strict=True):
            conversion.flag(name, as_number("optimizer.params.betas", beta))
        conversion.flag("--adam-eps", as_number("optimizer.params.eps", params.get("eps", 1e-8)))
    else:
        conversion.flag("--optimizer", "sgd")
        conversion.flag("--sgd-momentum", as_number("optimizer.params.momentum", params.get("momentum", 0.0)))
    known = {"lr", "betas", "eps", "weight_decay", "momentum", "torch_adam", "adam_w_mode"}
    for name in sorted(set(params) - known):
        conversion.note(f"optimizer.params.{name}", Effect.CHANGES, "the optimizer has no such parameter")
    if params.get("adam_w_mode") is False:
        conversion.note("optimizer.params.adam_w_mode", Effect.CHANGES, "weight decay is apart from the gradient")
    conversion.flag("--lr", as_number("optimizer.params.lr", params.get("lr", 0.001)))
    decay = conversion.number("weight_decay", params.get("weight_decay", 0.01))
    conversion.flag("--weight-decay", decay)
    conversion.flag("--clip-grad", conversion.number("gradient_clipping", 1.0))


def convert_schedule(conversion: Conversion) -> None:
    """Convert the shape of the learning rate."""
    style = conversion.take("lr_decay_style", "linear")
    if style not in ("constant", "linear", "cosine"):
        conversion.note("lr_decay_style", Effect.CHANGES, f"it cannot be {style}; it is linear in this command")
        style = "linear"
    conversion.flag("--lr-decay-style", style)
    fraction = conversion.number("lr_decay_fraction")
    iterations = conversion.count("train_iters")
    if fraction is not None and iterations is not None and conversion.settings.get("lr_decay_iters") is None:
        conversion.flag("--lr-decay-iters", int(fraction * iterations))
    if style != "constant":
        reason = "the decay ends with min_lr at lr_decay_iters, as Megatron's; NeoX's is cut off at min_lr"
        conversion.note("lr_decay_style", Effect.NEAR, reason)


def convert_precision(conversion: Conversion) -> str:
    """Convert number types and loss scaling. Returns `fp32`, `fp16` or `bf16`."""
    half, brain = conversion.section("fp16"), conversion.section("bf16")
    precision = {"bfloat16": "bf16", "bf16": "bf16", "fp16": "fp16"}.get(str(conversion.take("precision")), "fp32")
    if brain.get("enabled") or (half.get("enabled") and half.get("type") == "bfloat16"):
        precision = "bf16"
    elif half.get("enabled"):
        precision = "fp16"
    types = conversion.section("data_types")
    known = {"fp16": (half, LOSS_SCALING), "bf16": (brain, ("enabled",)), "data_types": (types, ("grad_accum_dtype",))}
    for owner, (section, names) in known.items():
        for name in sorted(section.keys() - set(names)):
            conversion.note(f"{owner}.{name}", Effect.NEAR, "it can stand in a file for --deepspeed-config")
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
        conversion: settings, and the flags found so far.
        precision: `fp32`, `fp16` or `bf16`.
    """
    zero = conversion.section("zero_optimization")
    stage = int(as_number("zero_optimization.stage", zero.pop("stage", 0)))
    ours = min(stage, 1)
    if stage > 1:
        reason = "ZeRO 2 and 3 do not go with pipelines; 1 computes the same, with more memory"
        conversion.note("zero_optimization.stage", Effect.NONE, reason)
    if ours == 0 and precision != "fp32":
        ours = 1
        conversion.note("zero_optimization.stage", Effect.NONE, f"{precision} takes ZeRO 1 here; it computes the same")
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
    for name in zero:
        offload = "offload" in name
        reason = "nothing is offloaded" if offload else "it can stand in a file for --deepspeed-config"
        conversion.note(f"zero_optimization.{name}", Effect.NONE, reason)


def convert_recomputation(conversion: Conversion) -> None:
    """Convert the recomputation of activations."""
    layers = conversion.count("checkpoint_num_layers", 1) or 1
    if conversion.take("checkpoint_activations", False):
        conversion.flag("--recompute-granularity", "full")
        conversion.flag("--recompute-num-layers", layers)
