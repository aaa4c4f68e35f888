"""A DeepSpeed configuration of the user's: held against the flags, all that is wrong with it said at once."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from megatron_terapipe.config.files.deepspeed_settings import (
    FLAG,
    NO_EFFECT,
    SETTINGS,
    read_deepspeed_settings,
    switched_on,
)
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN, ConfigError

NOT_HERE = {
    "scheduler": "the learning rate is built from --lr-decay-style and its like",
    "data_parallel_size": "it follows from the world size",
    "tensor_parallel": "layers are spread with --tensor-model-parallel-size",
    "zero_optimization.cpu_offload": "the optimizer stays on the accelerator",
    "zero_optimization.offload_optimizer": "the optimizer stays on the accelerator",
    "zero_optimization.offload_param": "weights stay on the accelerator",
    "amp": "number types are chosen with --fp16 and --bf16",
    "torch_autocast": "number types are chosen with --fp16 and --bf16",
    "elasticity": "it is no longer in DeepSpeed",
    "autotuning": "it needs a launcher of its own",
    "hybrid_engine": "the engine is the one of token slices",
}
"""Settings that cannot work here, and why. Switched off, they may stand in a file."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fault:
    """A fault of a file."""

    text: str
    by_flag: bool = False
    is_another_training: bool = False


def read_deepspeed_file(
    path: str, decided: Mapping[str, Any], optimizer: Mapping[str, Any], *, needs_zero: bool = False
) -> dict[str, Any]:
    """Read the file that `--deepspeed-config` names; `auto` and null stand for what we decide.

    Args:
        decided: settings that flags and the engine decide; the file may repeat them, not change them.
        optimizer: type and params of the optimizer that the file may repeat; DeepSpeed does not build it.
        needs_zero: whether a file that asks for ZeRO 0 is run under ZeRO 1.

    Returns:
        The settings that are left to hand to DeepSpeed.

    Raises:
        ConfigError: if it cannot be read, or for all that is wrong with it, in one line.
    """
    file = read_deepspeed_settings(path)
    zero = file.get("zero_optimization")
    if needs_zero and isinstance(zero, dict) and zero.get("stage") == 0:
        zero["stage"] = 1
    faults = [
        *_unknown(
            file,
            {
                *decided,
                *OTHERS,
                "optimizer",
                *(name.split(".")[0] for name in (*NOT_HERE, *OTHER_TRAININGS, *NO_EFFECT)),
            },
        ),
        *_not_here(file),
        *_disagreements({key: value for key, value in file.items() if key != "optimizer"}, decided),
        *_optimizer_faults(file.get("optimizer", {}), optimizer),
        *_malformed(file),
    ]
    if faults:
        raise ConfigError(f"{FLAG} {path} {_line(faults)}")
    return {key: value for key, value in file.items() if key not in ("optimizer", "scheduler")}


def _line(faults: list[_Fault]) -> str:
    """Say which faults end the run for good, then the others with their remedy."""
    trainings = [f"sets {fault.text}" for fault in faults if fault.is_another_training]
    lines = [f"{'; '.join(trainings)}: {TRAINING_CANNOT_BE_RUN}"] if trainings else []
    others = [fault for fault in faults if not fault.is_another_training]
    return "; ".join([*lines, _with_remedy(others)] if others else lines)


def _with_remedy(faults: list[_Fault]) -> str:
    texts = list(dict.fromkeys(f"sets {fault.text}" for fault in faults))
    several = len(texts) > 1
    by_flag = sum(fault.by_flag for fault in faults)
    remedy = f"change the flag{'s' if by_flag > 1 else ''}, or " if by_flag else ""
    return f"{'; '.join(texts)}: {remedy}remove {'them' if several else 'it'} from the file"


def _unknown(file: Mapping[str, Any], known: set[str]) -> Iterator[_Fault]:
    """DeepSpeed ignores what it does not know, and a misspelt setting with it."""
    for key in file:
        if key not in known:
            nearest = get_close_matches(key, sorted(known), n=1)
            yield _Fault(text=f"{key}, which DeepSpeed does not know{f' ({nearest[0]}?)' if nearest else ''}")


def _not_here(file: Mapping[str, Any]) -> Iterator[_Fault]:
    for name, reason in {**NOT_HERE, **OTHER_TRAININGS}.items():
        first, _, second = name.partition(".")
        value = file.get(first)
        if second:
            value = value.get(second) if isinstance(value, Mapping) else None
        if switched_on(value):
            yield _Fault(text=f"{name}, but {reason}", is_another_training=name in OTHER_TRAININGS)


def _disagreements(file: Mapping[str, Any], decided: Mapping[str, Any], prefix: str = "") -> Iterator[_Fault]:
    for key, ours in decided.items():
        if key not in file:
            continue
        theirs, name = file[key], prefix + key
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            yield from _disagreements(theirs, ours, f"{name}.")
        elif theirs != ours:
            owner = f"{SETTINGS[name].flags} makes it" if name in SETTINGS else "it must be"
            text = f"{name} to {json.dumps(theirs)}, but {owner} {json.dumps(ours)}"
            yield _Fault(text=text, by_flag=name in SETTINGS)


def _optimizer_faults(file: object, ours: Mapping[str, Any]) -> Iterator[_Fault]:
    built = "the optimizer is built from --optimizer, --lr and their like"
    if not isinstance(file, Mapping) or not isinstance(file.get("params", {}), Mapping):
        yield _Fault(text=f"optimizer, but {built}")
        return
    types = ours["type"]
    if "type" in file and str(file["type"]).lower() not in types:
        text = f"optimizer.type to {json.dumps(file['type'])}, but --optimizer makes it {json.dumps(types[0])}"
        yield _Fault(text=text, by_flag=True)
        return
    yield from _disagreements({"params": file.get("params", {})}, {"params": ours["params"]}, "optimizer.")
    for key in file.get("params", {}):
        if key not in ours["params"] and key not in BUILDERS:
            yield _Fault(text=f"optimizer.params.{key}, but {built}")


def _malformed(file: Mapping[str, Any]) -> Iterator[_Fault]:
    """Yield the faults that DeepSpeed itself would refuse, in many lines, once the process group is built."""
    # Imported where a file has been named: DeepSpeed takes seconds.
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    models = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}
    for name, model in models.items():
        section = file.get(name, {})
        if not isinstance(section, Mapping):
            yield _Fault(text=f"{name} to {json.dumps(section)}, which is not an object")
            continue
        try:
            model(**section)
        except ValidationError as errors:
            for error in errors.errors():
                key = ".".join(map(str, error["loc"]))
                if error["type"] == "extra_forbidden":
                    yield from (
                        _Fault(text=f"{name}.{fault.text}") for fault in _unknown({key: 0}, set(model.model_fields))
                    )
                else:
                    value = json.dumps(error["input"])
                    yield _Fault(text=f"{name}.{key} to {value}, which DeepSpeed does not take")
