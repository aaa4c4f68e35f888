"""Convert NeoX's settings to a command: ranks and batch, learning rate, optimizer, data, checkpoints, launcher.

Read `convert`, at the end, first. The model has a module of its own.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import option_of
from megatron_terapipe.config.parsing import check_host_name
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, TRAINING_CANNOT_BE_RUN, ConfigError
from megatron_terapipe.neox.model import convert_initial_weights, convert_model
from megatron_terapipe.neox.settings import (
    MODELS,
    OPERATION,
    SINCE_2023_12,
    SWITCHES,
    TRAININGS,
    VALUES,
    Conversion,
    Defaults,
    as_number,
)

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


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
            conversion.remark("pipe_partition_method", reason)


def convert_batch(conversion: Conversion, world_size: int | None) -> None:
    """Convert the batch sizes. NeoX computes the global batch size from the others and the number of processes.

    Args:
        world_size: number of processes; None if it is not known.

    Raises:
        ConfigError: if the sizes do not fit together, or depend on a number of processes that is not known.
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
    if micro is None and whole is not None:
        raise ConfigError(f"{BATCH[0]} {whole} is dealt to the processes of the run: give their number, --world-size N")
    if micro is not None and whole is None and (accumulated or 1) > 1:
        raise ConfigError(
            f"{BATCH[2]} {accumulated} makes a batch that grows with the processes of the run: give their number, "
            "--world-size N"
        )
    if micro is not None:
        conversion.flag("--micro-batch-size", micro)
    if whole is not None:
        conversion.flag("--global-batch-size", whole)


def _replicas(conversion: Conversion, world_size: int | None) -> int | None:
    """Return the data-parallel size, if it can be known."""
    everywhere = conversion.count("global_num_gpus")
    machine = [conversion.settings.get(key) for key in ("num_nodes", "num_gpus")]
    if world_size is None and everywhere:
        world_size = everywhere
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Decay:
    """A decay as the trainer takes it."""

    end: int
    """Iteration at which the learning rate is `min_lr`."""
    warmup_fraction: float
    """Iterations of the rise, as a share of those."""
    exact: bool = True
    """Whether the shape is NeoX's to the last digit."""


def convert_learning_rate(conversion: Conversion) -> None:
    """Convert rise and decay.

    Raises:
        ConfigError: if the end of the decay is given twice.
    """
    style = conversion.take("lr_decay_style", "linear")
    lowest = _lowest(conversion)
    if style not in ("constant", "linear", "cosine"):
        conversion.refuse(f"lr_decay_style {style}", "it can be constant, linear or cosine", TRAINING_CANNOT_BE_RUN)
    conversion.flag("--lr-decay-style", style)
    conversion.flag("--min-lr", lowest)
    iterations, end = conversion.count("train_iters"), _end(conversion)
    last = end or iterations
    warmup = _warmup(conversion, last)
    if style == "linear" and lowest and last is not None:
        decay = cut_off(last, warmup, highest=_highest(conversion), lowest=lowest)
        conversion.flag("--lr-decay-iters", decay.end)
        conversion.flag("--lr-warmup-fraction", repr(decay.warmup_fraction))
        if not decay.exact:
            reason = f"min_lr is reached within half an iteration of where NeoX reaches it, at {decay.end}"
            conversion.remark("lr_decay_style", reason)
        return
    if end is not None:
        conversion.flag("--lr-decay-iters", end)
    conversion.flag("--lr-warmup-fraction", warmup)
    if style == "cosine" and end is not None and iterations is not None and end < iterations:
        conversion.remark("lr_decay_iters", f"the rate stays at min_lr after {end}; NeoX's cosine rises again")


def cut_off(last: int, warmup: float, *, highest: float, lowest: float) -> Decay:
    """Return the decay that equals NeoX's linear one, which aims at 0 and is cut off at `min_lr`.

    NeoX's rate falls from its peak at iteration W on a line to 0 at iteration E. It has come down to the lowest rate at
    W + (E - W)(1 - lowest / highest), where the trainer's line ends.
    """
    rise = warmup * last
    reached = rise + (last - rise) * (1 - lowest / highest)
    end = max(1, round(reached))
    return Decay(end=end, warmup_fraction=rise / end, exact=abs(end - reached) <= 1e-9 * last)


def _end(conversion: Conversion) -> int | None:
    """Return the iteration at which the decay ends; None if it is the last one."""
    end, fraction = conversion.count("lr_decay_iters"), conversion.number("lr_decay_fraction")
    iterations = conversion.count("train_iters")
    if end is not None and fraction is not None:
        raise ConfigError(f"lr_decay_iters {end} and lr_decay_fraction {fraction} both end the decay: remove one")
    if fraction is not None and iterations is not None:
        return int(fraction * iterations)
    return end


def _warmup(conversion: Conversion, last: int | None) -> float:
    """Return the share of the decay that the rate rises in. Files of Llemma give its iterations."""
    fraction, rise = conversion.number("warmup"), conversion.number("warmup_iters")
    if fraction is not None and rise is not None:
        raise ConfigError(f"warmup {fraction} and warmup_iters {rise} both say how long the rate rises: remove one")
    if rise is not None and last:
        return float(rise / last)
    return 0.01 if fraction is None else float(fraction)


def _lowest(conversion: Conversion) -> float:
    """Return the lowest rate. Files of Llemma give it as a share of the highest."""
    rate, share = conversion.number("min_lr"), conversion.number("decay_lr_to")
    if rate is not None and share is not None:
        raise ConfigError(f"min_lr {rate} and decay_lr_to {share} both give the lowest rate: remove one")
    return float(rate or 0.0 if share is None else share * _highest(conversion))


def _highest(conversion: Conversion) -> float:
    params = conversion.section("optimizer").get("params") or {}
    return float(as_number("optimizer.params.lr", params.get("lr", 0.001)))


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
        conversion.refuse(f"optimizer {kind}", "it can be adam or sgd", TRAINING_CANNOT_BE_RUN)
    if kind.startswith("cpu"):
        conversion.remark(f"optimizer {kind}", "the optimizer stays on the accelerator")
    if decay and False in (params.get("adam_w_mode"), params.get("adamw_mode")):
        conversion.refuse(
            f"weight_decay {decay} in the gradient", "weights decay apart from the gradient", TRAINING_CANNOT_BE_RUN
        )
    known = {"lr", "betas", "eps", "weight_decay", "momentum", "torch_adam", "adam_w_mode", "adamw_mode"}
    for name in sorted(set(params) - known):
        conversion.refuse(f"optimizer.params.{name}", "the optimizer has no such parameter", TRAINING_CANNOT_BE_RUN)
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


LAUNCHER = {
    "hostfile": ("--hostfile", None),
    "include": ("--include", None),
    "exclude": ("--exclude", None),
    "num_nodes": ("--num_nodes", -1),
    "num_gpus": ("--num_gpus", None),
    "master_addr": ("--master_addr", None),
    "master_port": ("--master_port", 29500),
    "launcher": ("--launcher", "pdsh"),
}
"""Flag of the launcher for each setting, and the value that needs none."""


def convert_data(conversion: Conversion) -> None:
    """Convert what is read."""
    path = conversion.take("data_path")
    split = str(conversion.take("split", "969, 30, 1")).replace(" ", "")
    if path is not None:
        conversion.flag("--data-path", path)
        conversion.flag("--split", split)
    for part in ("train", "valid", "test"):
        single = conversion.take(f"{part}_data_paths")
        paths = [single] if isinstance(single, str) else conversion.several(f"{part}_data_paths")
        weights = conversion.several(f"{part}_data_weights") or [1.0] * len(paths)
        if len(weights) != len(paths):
            raise ConfigError(
                f"{part}_data_weights has {len(weights)} entries and {part}_data_paths {len(paths)}: give one for each"
            )
        pairs = [word for pair in zip(weights, paths, strict=True) for word in pair]
        if paths:
            conversion.flag(f"--{part}-data-path", *(pairs if len(paths) > 1 else paths))


def convert_tokenizer(conversion: Conversion) -> None:
    """Convert the tokenizer; NeoX names its file `vocab_file`, whatever it is."""
    kind = conversion.take("tokenizer_type", "GPT2BPETokenizer")
    vocabulary, merges = conversion.take("vocab_file"), conversion.take("merge_file")
    if kind == "GPT2BPETokenizer":
        files = {"--vocab-file": vocabulary, "--merge-file": merges}
    elif kind in ("HFTokenizer", "SPMTokenizer"):
        files = {"--tokenizer-model": vocabulary}
    else:
        conversion.refuse(f"tokenizer_type {kind}", "it is not here", "tokenize the data with another")
        return
    conversion.flag("--tokenizer-type", kind)
    for flag, name in files.items():
        if name is not None:
            conversion.flag(flag, name)


def convert_checkpoints(conversion: Conversion) -> None:
    """Convert when checkpoints are saved.

    Raises:
        ConfigError: if the iterations are no numbers that iterations have.
    """
    factor, scale = conversion.number("checkpoint_factor"), conversion.take("checkpoint_scale", "linear")
    extra = {_iteration(each) for each in conversion.several("extra_save_iters")}
    kept = conversion.count("keep_last_n_checkpoints")
    older = conversion.count("save_interval")
    if conversion.settings.get("save") is not None:
        if scale == "log" and factor:
            extra |= powers(factor, conversion.count("train_iters") or 0)
        elif factor or older:
            conversion.flag("--save-interval", _iteration(factor) if factor else older)
        if extra:
            conversion.flag("--extra-save-iterations", *sorted(extra))
        if kept:
            conversion.flag("--keep-last-n-checkpoints", kept)
    if conversion.settings.get("load") is not None:
        reason = (
            "it takes checkpoints of this trainer, and in Hugging Face's format, to which NeoX's tools convert its own"
        )
        conversion.remark("load", reason)


def powers(factor: float, last: int) -> set[int]:
    """Return the iterations before the last one that `checkpoint_scale: log` saves: whole powers of a factor.

    Args:
        factor: what each is multiplied by to give the next.
        last: the last iteration, which is saved in any case.

    Raises:
        ConfigError: if the powers do not grow.
    """
    if factor <= 1:
        raise ConfigError(f"checkpoint_factor {factor} does not grow with checkpoint_scale log: give more than 1")
    found, step = set(), factor
    while step < last:
        if step == int(step):
            found.add(int(step))
        step *= factor
    return found


def _iteration(value: object) -> int:
    number = as_number("extra_save_iters or checkpoint_factor", value)
    if number is None or number != int(number) or number < 0:
        raise ConfigError(f"extra_save_iters or checkpoint_factor {value} is no number of iterations: give whole ones")
    return int(number)


def convert_reports(conversion: Conversion) -> None:
    """Convert Weights & Biases, and profiles."""
    project, name = conversion.take("wandb_project", "neox"), conversion.take("wandb_run_name")
    if conversion.take("use_wandb", False):
        conversion.flag("--wandb-project", project)
        if name is not None:
            conversion.flag("--wandb-exp-name", name)
    begin, end = conversion.count("profile_step_start", 10), conversion.count("profile_step_stop", 12)
    if conversion.take("profile", False):
        conversion.flag("--profile")
        conversion.flag("--profile-step-start", begin)
        conversion.flag("--profile-step-end", end)


def convert_launch(conversion: Conversion) -> None:
    """Convert how processes are started.

    Raises:
        ConfigError: if the first host has no host name, which the shells of all hosts would read.
    """
    first_host = conversion.take("master_addr")
    if first_host is not None:
        check_host_name(str(first_host), "master_addr")
    for key, (flag, needless) in LAUNCHER.items():
        value = conversion.take(key)
        if value is not None and value != needless:
            conversion.launcher.append((flag, str(value)))
    comment = conversion.take("comment")
    if comment is not None:
        # DeepSpeed splits this into words as a shell does: a comment of several must come out as one.
        conversion.launcher.append(("--launcher_args", shlex.quote(f"--comment={comment}")))
    for key in ("force_multi", "no_ssh_check"):
        if conversion.take(key, False):
            conversion.launcher.append((f"--{key}",))
    for key, launcher in (("deepspeed_slurm", "slurm"), ("deepspeed_mpi", "openmpi")):
        if conversion.take(key, False) and conversion.settings.get("launcher") is None:
            conversion.launcher.append(("--launcher", launcher))


def convert(
    settings: Mapping[str, Any], world_size: int | None = None, *, defaults: Defaults = SINCE_2023_12
) -> Conversion:
    """Convert settings.

    Args:
        settings: settings of NeoX, by key with underscores.
        world_size: processes of the run; None = not known.
        defaults: values of settings that are left out and whose default has changed.

    Raises:
        ConfigError: if a value is not what NeoX takes, or a setting that decides what is trained has no counterpart.
    """
    conversion = Conversion(settings=_with_extra_settings(settings))
    _check_sizes(conversion)
    for key, (flag, default) in VALUES.items():
        value = conversion.take(key, default)
        if value is not None:
            conversion.flag(flag, value)
    for key, flag in SWITCHES.items():
        if conversion.take(key, False):
            conversion.flag(flag)
    convert_model(conversion, defaults)
    convert_initial_weights(conversion)
    convert_parallel(conversion)
    convert_batch(conversion, world_size)
    convert_optimizer(conversion, defaults)
    convert_learning_rate(conversion)
    convert_zero(conversion, convert_precision(conversion))
    convert_recomputation(conversion)
    convert_data(conversion)
    convert_tokenizer(conversion)
    convert_checkpoints(conversion)
    convert_reports(conversion)
    convert_launch(conversion)
    _fixed(conversion)
    _rest(conversion)
    conversion.check()
    return conversion


NEEDED = (
    *(("num_layers",), ("hidden_size",), ("num_attention_heads",), ("seq_length",), ("optimizer",), ("train_iters",)),
    ("train_micro_batch_size_per_gpu", "train_batch_size"),
    ("data_path", "train_data_paths"),
    ("vocab_file",),
)
"""Settings that no run does without; of several, one is enough."""


def left_open(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that a run needs and the files do not give."""
    return [either[0] for either in NEEDED if all(settings.get(key) is None for key in either)]


def _check_sizes(conversion: Conversion) -> None:
    """See that sizes that others are computed from are those of a model; the trainer checks all the rest."""
    most = {each.name: option_of(each).most for each in fields(ModelConfig)}
    for key in ("num_layers", "hidden_size", "num_attention_heads"):
        size = conversion.count(key)
        if size is not None and not 1 <= size <= (most[key] or size):
            raise ConfigError(f"{key} {size} is no size of a model: give 1 to {most[key]:,}")


def _with_extra_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Put the settings of `deepspeed_extra_args` beside the others: NeoX hands both to DeepSpeed.

    Raises:
        ConfigError: if one stands in both places.
    """
    extra = settings.get("deepspeed_extra_args") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"deepspeed_extra_args {extra!r} is not a mapping: write it as {{...}}")
    for key in extra:
        if settings.get(key) is not None:
            raise ConfigError(f"{key} stands in deepspeed_extra_args and outside: remove one")
    return {**{key: value for key, value in settings.items() if key != "deepspeed_extra_args"}, **extra}


def _fixed(conversion: Conversion) -> None:
    for end, table in {MODEL_CANNOT_BE_TRAINED: MODELS, TRAINING_CANNOT_BE_RUN: TRAININGS}.items():
        for key, (agreeing, reason) in table.items():
            value = conversion.take(key)
            off = isinstance(value, Mapping) and not value.get("enabled", bool(value))
            if value is not None and value not in agreeing and not off:
                conversion.refuse(_with_value(key, value), reason, end)


def _rest(conversion: Conversion) -> None:
    for key, value in conversion.settings.items():
        if key in conversion.taken or value is None:
            continue
        if key not in OPERATION:
            conversion.refuse(
                _with_value(key, value), "no setting of NeoX that is known here", "check how it is written"
            )
        elif value is not False:  # What is off needs no word.
            conversion.remark(key, OPERATION[key])


def _with_value(key: str, value: object) -> str:
    """Return a setting with its value, where that is short."""
    return f"{key} {value}" if isinstance(value, str | int | float) else key
