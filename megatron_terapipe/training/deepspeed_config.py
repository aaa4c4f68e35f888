"""The settings that DeepSpeed is started with, and the user's own merged into them."""

import json
from collections.abc import Mapping
from math import log2
from typing import Any

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.config import Config, PrecisionConfig
from megatron_terapipe.config.json_files import read_json
from megatron_terapipe.errors import ConfigError

BUCKET_ELEMENTS = 50_000_000
"""Elements of ZeRO's buckets: DeepSpeed's default of 5e8 sets 2 GB aside on every rank, even for a toy on a CPU."""

NEVER = 10**9
"""Steps between lines of DeepSpeed's own log. It divides by this number, so it cannot be left out."""

FLAGS = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_accumulation_steps": "--global-batch-size",
    "gradient_clipping": "--clip-grad",
    "zero_optimization.stage": "--zero-stage",
    "bf16.enabled": "--bf16",
    "fp16.enabled": "--fp16",
    "fp16.loss_scale": "--loss-scale",
    "fp16.initial_scale_power": "--initial-loss-scale",
    "fp16.loss_scale_window": "--loss-scale-window",
    "fp16.hysteresis": "--hysteresis",
    "fp16.min_loss_scale": "--min-loss-scale",
    "data_types.grad_accum_dtype": "--accumulate-allreduce-grads-in-fp32",
    "pipeline.token_slices": "--token-slices",
    "pipeline.schedule": "--pipeline-schedule",
}
"""Flag that decides each setting; the rest of what we set follows from no flag."""

OURS_ALONE = {
    "optimizer": "the optimizer is built from --optimizer, --lr and their like",
    "scheduler": "the learning rate is built from --lr-decay-style and its like",
    "flops_profiler": "it times DeepSpeed's own forward, which token slices do not run",
    "data_parallel_size": "it follows from the world size",
    "sequence_parallel_size": "sequences are cut with --num-token-slices",
}
"""Settings that a user's file may not hold, and why."""


def deepspeed_config(config: Config, layout: ParallelLayout) -> dict[str, Any]:
    """Build DeepSpeed's settings from ours and the file that `--deepspeed-config` names.

    Settings of the file that we have no opinion on pass through; `auto` stands for ours.

    Args:
        config: the whole configuration, because its flags decide over settings of every kind.
        layout: how the run is laid out over ranks.

    Raises:
        ConfigError: if the batch cannot be dealt to the ranks, the file cannot be read, or it contradicts a flag.
    """
    decided = _decided(config, layout)
    preferred = _preferred(config)
    path = config.deepspeed.deepspeed_config
    if path is None:
        return _merge(decided, preferred)
    file = read_json(path, "--deepspeed-config")
    if not isinstance(file, dict):
        raise ConfigError(f"--deepspeed-config {path} is not a JSON object: write one")
    if "bfloat16" in file:  # DeepSpeed's older name; under it the conflict with --bf16 would go unseen.
        file["bf16"] = file.pop("bfloat16")
    for key, reason in OURS_ALONE.items():
        if key in file:
            raise ConfigError(f"--deepspeed-config {path} sets {key}, but {reason}: remove it from the file")
    file = _without_auto(file)
    _check_agreement(file, decided, path)
    return _merge(decided, _merge(file, preferred))


def _decided(config: Config, layout: ParallelLayout) -> dict[str, Any]:
    """Return what our flags and our engine decide; a file may repeat it, not change it."""
    data_parallel_size = layout.data_parallel_size
    precision = config.precision
    return {
        "train_batch_size": config.global_batch_size(data_parallel_size),
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
        "gradient_accumulation_steps": config.num_micro_batches(data_parallel_size),
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": config.optimizer.zero_stage},
        # ZeRO knows torch's AdamW, but takes its SGD only on our word; both update element by element.
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision.bf16},
        "fp16": _fp16(precision),
        "data_types": {"grad_accum_dtype": _accumulation_dtype(config)},
        "pipeline": {
            "token_slices": list(config.token_slices().lengths),
            "schedule": config.parallel.pipeline_schedule,
            # DeepSpeed would spread what flows between stages over tensor-parallel ranks, one shape for all.
            "pipe_partitioned": False,
            "grad_partitioned": False,
        },
    }


def _preferred(config: Config) -> dict[str, Any]:
    """Return defaults of ours that a file may change."""
    zero = {
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        # With it DeepSpeed asks to be called for every gradient of every token slice, and weight gradients could not
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


def _without_auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the settings that a file leaves to us."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if value != "auto"
    }


def _check_agreement(file: Mapping[str, Any], decided: Mapping[str, Any], path: str, prefix: str = "") -> None:
    for key, ours in decided.items():
        if key not in file:
            continue
        theirs, name = file[key], prefix + key
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            _check_agreement(theirs, ours, path, f"{name}.")
        elif theirs != ours:
            owner = f"{FLAGS[name]} makes it" if name in FLAGS else "it must be"
            remedy = "change the flag, or " if name in FLAGS else ""
            raise ConfigError(
                f"--deepspeed-config {path} sets {name} to {json.dumps(theirs)}, but {owner} {json.dumps(ours)}: "
                f"{remedy}remove it from the file"
            )


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, section by section; the first wins."""
    merged = {**second, **first}
    for key in first.keys() & second.keys():
        if isinstance(first[key], Mapping) and isinstance(second[key], Mapping):
            merged[key] = _merge(first[key], second[key])
    return merged
