"""The configuration of DeepSpeed: the user's file, checked against the flags and merged into our settings."""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from math import log2
from typing import Any, Literal

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.config import Config, DeepSpeedConfig, OptimizerConfig, PrecisionConfig
from megatron_terapipe.config.deepspeed import (
    BUCKET_ELEMENTS,
    FLAG,
    NO_EFFECT,
    SETTINGS,
    read_deepspeed_settings,
    setting_of,
    switched_on,
)
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN, ConfigError

NOT_HERE = {
    "scheduler": "the learning rate is built from --lr-decay-style and its like",
    "data_parallel_size": "it follows from the world size",
    "tensor_parallel": "layers are spread with --tensor-model-parallel-size",
    "amp": "number types are chosen with --fp16 and --bf16",
    "torch_autocast": "number types are chosen with --fp16 and --bf16",
    "elasticity": "it is no longer in DeepSpeed",
    "autotuning": "it needs a launcher of its own",
    "hybrid_engine": "the engine is the one of token slices",
}
"""Settings that cannot work here, and why. A file may have them switched off."""

OTHER_TRAININGS = {
    "curriculum_learning": "sequences have one length",
    "data_efficiency": "sequences have one length, and every layer sees all tokens",
    "progressive_layer_drop": "every layer is always trained",
    "compression_training": "weights are neither pruned nor quantized",
    "weight_quantization": "weights are neither pruned nor quantized",
    "eigenvalue": "weights are neither pruned nor quantized",
    "sparse_attention": "attention is dense",
}
"""Settings without which another training would be run, and why they are not here."""

OTHERS = {
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "disable_python_gc"),
    *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "sparse_gradients", "fp32_allreduce"),
    *("communication_data_type", "seq_parallel_communication_data_type", "disable_allgather", "vocabulary_size"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "use_data_before_expert_parallelism"),
    *("managed_gradient_accumulation", "dataloader_drop_last", "checkpoint", "aio", "datastates_ckpt", "nebula"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "timers", "compile", "expert_parallel"),
    *("activation_checkpointing"),
}
"""Sections and settings of DeepSpeed's that pass through."""

BUILDERS = ("torch_adam", "fused", "foreach")
"""Parameters of an optimizer that choose its implementation."""


Fault = tuple[str, Literal["training", "flag", "file"]]
"""A fault of a file after the word `sets`, and its kind: another training, against a flag, or of the file only."""


def read_deepspeed_file(
    path: str, decided: Mapping[str, Any], optimizer: Mapping[str, Any], *, needs_zero: bool = False
) -> dict[str, Any]:
    """Read the file that `--deepspeed-config` names; `auto` and null leave a setting to us.

    Args:
        decided: settings that flags and the engine decide; the file may repeat them, not change them.
        optimizer: type and params of the optimizer that the file may repeat; DeepSpeed does not build it.
    """
    file = read_deepspeed_settings(path)
    zero = file.get("zero_optimization")
    if isinstance(zero, dict):
        if decided["zero_optimization"]["stage"] == 1 and zero.get("stage") in ((0, 2, 3) if needs_zero else (2, 3)):
            zero["stage"] = 1
        kept = {name: value for name, value in zero.items() if f"zero_optimization.{name}" not in NO_EFFECT}
        file["zero_optimization"] = kept
    # DeepSpeed's guard against optimizers that it has not been tested with.
    file.pop("zero_allow_untested_optimizer", None)
    refused = {name.split(".")[0] for name in (*NOT_HERE, *OTHER_TRAININGS, *NO_EFFECT)}
    faults = [
        *_unknown(file, {*decided, *OTHERS, "optimizer", *refused}),
        *_not_here(file),
        *_disagreements(file, {**decided, "optimizer": optimizer}),
        *_other_parameters(file, optimizer),
        *_malformed(file),
    ]
    if faults:
        raise ConfigError(f"{FLAG} {path} {_refusal(faults)}")
    return {key: value for key, value in file.items() if key not in ("optimizer", "scheduler")}


def _refusal(faults: Sequence[Fault]) -> str:
    """Return one line: first settings of another training, then all others with the remedy."""
    trainings = [f"sets {text}" for text, kind in faults if kind == "training"]
    lines = [f"{'; '.join(trainings)}: {TRAINING_CANNOT_BE_RUN}"] if trainings else []
    others = list(dict.fromkeys(f"sets {text}" for text, kind in faults if kind != "training"))
    by_flag = sum(kind == "flag" for _, kind in faults)
    if others:
        remedy = f"change the flag{'s' if by_flag > 1 else ''}, or " if by_flag else ""
        lines.append(f"{'; '.join(others)}: {remedy}remove {'them' if len(others) > 1 else 'it'} from the file")
    return "; ".join(lines)


def _unknown(file: Mapping[str, Any], known: set[str]) -> Iterator[Fault]:
    """Yield the settings that DeepSpeed would ignore, such as misspelled ones."""
    for key in file:
        if key not in known:
            nearest = get_close_matches(key, sorted(known), n=1)
            yield f"{key}, which is not a setting of DeepSpeed{f' ({nearest[0]}?)' if nearest else ''}", "file"


def _not_here(file: Mapping[str, Any]) -> Iterator[Fault]:
    for name, reason in {**NOT_HERE, **OTHER_TRAININGS}.items():
        if switched_on(setting_of(file, name)):
            yield f"{name}, but {reason}", "training" if name in OTHER_TRAININGS else "file"


def _disagreements(file: Mapping[str, Any], decided: Mapping[str, Any], prefix: str = "") -> Iterator[Fault]:
    """Yield the settings that differ from ours, a tuple of which is several names of one value."""
    for key, ours in decided.items():
        if key not in file:
            continue
        theirs, name = file[key], prefix + key
        if isinstance(ours, Mapping):
            if isinstance(theirs, Mapping):
                yield from _disagreements(theirs, ours, f"{name}.")
            else:
                yield f"{name} to {json.dumps(theirs)}, which is not an object", "file"
        elif str(theirs).lower() not in ours if isinstance(ours, tuple) else theirs != ours:
            owner = f"{SETTINGS[name].flags} makes it" if name in SETTINGS else "it must be"
            shown = json.dumps(ours[0] if isinstance(ours, tuple) else ours)
            yield f"{name} to {json.dumps(theirs)}, but {owner} {shown}", "flag" if name in SETTINGS else "file"


def _other_parameters(file: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Fault]:
    params = setting_of(file, "optimizer.params")
    for key in params if isinstance(params, Mapping) else ():
        if key not in ours["params"] and key not in BUILDERS:
            yield f"optimizer.params.{key}, but the optimizer is built from --optimizer, --lr and their like", "file"


def _malformed(file: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults that DeepSpeed would refuse, in many lines, once the process group is built."""
    # Imported where a file has been named: DeepSpeed takes seconds.
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    models = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    for name, model in models.items():
        section = file.get(name, {})
        if not isinstance(section, Mapping):
            continue
        try:
            model(**section)
        except ValidationError as errors:
            for error in errors.errors():
                key = ".".join(map(str, error["loc"]))
                if error["type"] == "extra_forbidden":
                    yield from ((f"{name}.{text}", kind) for text, kind in _unknown({key: 0}, set(model.model_fields)))
                else:
                    yield f"{name}.{key} to {json.dumps(error['input'])}, which DeepSpeed does not take", "file"


NEVER = 10**9
"""Steps between lines of DeepSpeed's own log, which divides by this number, so that it cannot be left out."""


def deepspeed_config(config: Config, layout: ParallelLayout) -> dict[str, Any]:
    """Build DeepSpeed's settings from ours and the file that `--deepspeed-config` names.

    Settings of the file that we do not decide pass through; `auto` leaves a setting to us.
    """
    decided = _decided(config, layout)
    file: dict[str, Any] = {}
    if (path := config.deepspeed.deepspeed_config) is not None:
        needs_zero = config.precision.needs_zero
        file = read_deepspeed_file(path, decided, _optimizer(config.optimizer), needs_zero=needs_zero)
    settings = _merge(decided, _merge(file, _preferred(config)))
    # The layout has it. DeepSpeed would use it for its own sequence parallelism.
    del settings["sequence_parallel_size"]
    if layout.expert_parallel_size > 1:
        _check_reductions(settings, layout.expert_parallel_size)
    return settings


def _check_reductions(settings: Mapping[str, Any], expert_parallel_size: int) -> None:
    """Refuse settings with which DeepSpeed itself reduces gradients."""
    zero = settings["zero_optimization"]
    found = [f"zero_optimization.{name}" for name in ("contiguous_gradients", "offload_optimizer") if zero.get(name)]
    if settings["fp16"]["enabled"] and settings["data_types"]["grad_accum_dtype"] == "fp32":
        found.append("--accumulate-allreduce-grads-in-fp32 in fp16")
    if found:
        raise ConfigError(
            f"{' and '.join(found)} with --expert-model-parallel-size {expert_parallel_size}: DeepSpeed would reduce "
            "gradients itself, also over ranks with other experts: drop the former"
        )


def _decided(config: Config, layout: ParallelLayout) -> dict[str, Any]:
    """Return the settings that our flags and our engine decide; a file may repeat them, not change them."""
    data_parallel_size = layout.data_parallel_size
    precision = config.precision
    return {
        "train_batch_size": config.global_batch_size(data_parallel_size),
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
        "gradient_accumulation_steps": config.num_micro_batches(data_parallel_size),
        "sequence_parallel_size": layout.sequence_parallel_size,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": config.optimizer.zero_stage, **_zero(config.deepspeed)},
        # ZeRO accepts torch's AdamW, and its SGD only with this; both update element by element.
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision.bf16},
        "fp16": _fp16(precision),
        "data_types": {"grad_accum_dtype": _accumulation_dtype(config)},
        "pipeline": {
            "token_slices": list(config.token_slices().lengths),
            "schedule": config.parallel.pipeline_schedule,
            # DeepSpeed would spread messages between stages over tensor-parallel ranks, with one shape for all.
            "pipe_partitioned": False,
            "grad_partitioned": False,
        },
    }


def _preferred(config: Config) -> dict[str, Any]:
    """Return defaults of ours that a file may change."""
    zero = {
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        # With it DeepSpeed must be called for every gradient of every token slice, and weight gradients could not
        # add up inside their products.
        "contiguous_gradients": False,
    }
    preferred: dict[str, Any] = {
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        "zero_optimization": zero if config.optimizer.zero_stage else {},
    }
    if config.precision.bf16 and _accumulation_dtype(config) == "fp32":
        # DeepSpeed would round gradients that were added up in fp32 to bf16 to reduce them over replicas.
        preferred["communication_data_type"] = "fp32"
    return preferred


def _zero(settings: DeepSpeedConfig) -> dict[str, Any]:
    sizes = {
        "reduce_bucket_size": settings.zero_reduce_bucket_size,
        "allgather_bucket_size": settings.zero_allgather_bucket_size,
        "reduce_scatter": settings.zero_reduce_scatter or None,
        "contiguous_gradients": settings.zero_contiguous_gradients or None,
    }
    return {name: value for name, value in sizes.items() if value is not None}


def _optimizer(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the settings of the optimizer: names of its type, ours first, and its parameters."""
    params: dict[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.optimizer == "sgd":
        return {"type": ("sgd",), "params": params | {"momentum": optimizer.sgd_momentum, "nesterov": False}}
    # DeepSpeed's Adam decays weights apart from the gradient, too, by default.
    own = {"betas": [optimizer.adam_beta1, optimizer.adam_beta2], "eps": optimizer.adam_eps}
    fixed = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
    return {"type": ("adam", "adamw", "fusedadam"), "params": params | own | fixed}


def _fp16(precision: PrecisionConfig) -> dict[str, Any]:
    if not precision.fp16:
        return {"enabled": False}
    return {
        "enabled": True,
        "loss_scale": precision.loss_scale or 0,  # 0 = adaptive
        "initial_scale_power": int(log2(precision.initial_loss_scale)),
        "loss_scale_window": precision.loss_scale_window,
        "hysteresis": precision.hysteresis,
        "min_loss_scale": int(precision.min_loss_scale),
    }


def _accumulation_dtype(config: Config) -> str:
    """Return the type that gradients add up in.

    bf16 has too few digits for a sum over micro-batches and token slices, so it adds up in fp32 wherever
    DeepSpeed can, which is under ZeRO 1.
    """
    precision = config.precision
    bf16_in_fp32 = precision.bf16 and config.optimizer.zero_stage == 1
    return "fp32" if bf16_in_fp32 or precision.accumulate_allreduce_grads_in_fp32 else precision.dtype


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, section by section; the first wins."""
    merged = {**second, **first}
    for key in first.keys() & second.keys():
        if isinstance(first[key], Mapping) and isinstance(second[key], Mapping):
            merged[key] = _merge(first[key], second[key])
    return merged
