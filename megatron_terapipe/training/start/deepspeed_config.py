"""The settings that DeepSpeed is started with, and the user's own merged into them."""

from collections.abc import Mapping
from math import log2
from typing import Any

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.config import Config, DeepSpeedConfig, OptimizerConfig, PrecisionConfig
from megatron_terapipe.config.files.deepspeed import BUCKET_ELEMENTS
from megatron_terapipe.training.start.deepspeed_file import read_deepspeed_file

NEVER = 10**9
"""Steps between lines of DeepSpeed's own log. It divides by this number, so it cannot be left out."""


def deepspeed_config(config: Config, layout: ParallelLayout) -> dict[str, Any]:
    """Build DeepSpeed's settings from ours and the file that `--deepspeed-config` names.

    Settings of the file that we have no opinion on pass through; `auto` stands for ours.

    Args:
        config: the whole configuration, because its flags decide over settings of every kind.

    Raises:
        ConfigError: if the batch cannot be dealt to the ranks, the file cannot be read, or it contradicts a flag.
    """
    decided = _decided(config, layout)
    preferred = _preferred(config)
    file: dict[str, Any] = {}
    if (path := config.deepspeed.deepspeed_config) is not None:
        needs_zero = config.precision.needs_zero
        file = read_deepspeed_file(path, decided, _optimizer(config.optimizer), needs_zero=needs_zero)
    settings = _merge(decided, _merge(file, preferred))
    # The layout has it. DeepSpeed would take it for sequence parallelism of its own.
    del settings["sequence_parallel_size"]
    return settings


def _decided(config: Config, layout: ParallelLayout) -> dict[str, Any]:
    """Return what our flags and our engine decide; a file may repeat it, not change it."""
    data_parallel_size = layout.data_parallel_size
    precision = config.precision
    return {
        "train_batch_size": config.global_batch_size(data_parallel_size),
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
        "gradient_accumulation_steps": config.num_micro_batches(data_parallel_size),
        "sequence_parallel_size": layout.sequence_parallel_size,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": config.optimizer.zero_stage, **_zero(config.deepspeed)},
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


def _zero(settings: DeepSpeedConfig) -> dict[str, Any]:
    """Return what flags say of ZeRO's traffic."""
    sizes = {
        "reduce_bucket_size": settings.zero_reduce_bucket_size,
        "allgather_bucket_size": settings.zero_allgather_bucket_size,
        "reduce_scatter": settings.zero_reduce_scatter or None,
        "contiguous_gradients": settings.zero_contiguous_gradients or None,
    }
    return {name: value for name, value in sizes.items() if value is not None}


def _optimizer(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return what a file may say of the optimizer: names of its type, ours first, and its parameters."""
    params: dict[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.optimizer == "sgd":
        return {"type": ("sgd",), "params": params | {"momentum": optimizer.sgd_momentum, "nesterov": False}}
    # DeepSpeed's Adam decays weights apart from the gradient, too, unless told otherwise.
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
