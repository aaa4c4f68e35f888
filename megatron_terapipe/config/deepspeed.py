"""DeepSpeed's own settings: the section, the file that `--deepspeed-config` names, and the fields that it sets.

SETTINGS          settings of a DeepSpeed file that are fields of ours, too
DeepSpeedValues   values that a file gives to fields that nothing else sets
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron_terapipe.config.options import check_bounds, flag, option
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.errors import ConfigError

BUCKET_ELEMENTS = 50_000_000
"""Elements of ZeRO's buckets: DeepSpeed's default of 5e8 sets 2 GB aside on every rank, even for a toy on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """DeepSpeed."""

    deepspeed: bool = False
    """Accepted for scripts that pass it. Training always runs on DeepSpeed."""

    deepspeed_config: str | None = option(None, metavar="FILE")
    """JSON file with further DeepSpeed settings. `auto` leaves a setting to the trainer. A setting that contradicts a
    flag is an error."""

    zero_reduce_bucket_size: int | None = option(None, least=1, most=10**12)
    """Elements of gradients that ZeRO reduces at a time. Default: 50 million."""

    zero_allgather_bucket_size: int | None = option(None, least=1, most=10**12)
    """Elements of weights that ZeRO gathers at a time. Default: 50 million."""

    zero_reduce_scatter: bool = False
    """Use ZeRO's reduce-scatter, DeepSpeed's default. A DeepSpeed file that switches it off is an error."""

    zero_contiguous_gradients: bool = option(False, aliases=("--zero-contigious-gradients",))
    """Let ZeRO copy gradients into one buffer as they are computed."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_bounds(self)


FLAG = "--deepspeed-config"

NO_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "flops_profiler": "it times DeepSpeed's own forward, which token slices do not run",
        **{
            f"activation_checkpointing.{name}": "layers are recomputed with --recompute-granularity"
            for name in (
                "partition_activations",
                "cpu_checkpointing",
                "contiguous_memory_optimization",
                "synchronize_checkpoint_boundary",
                "number_checkpoints",
                "profile",
            )
        },
    }
)
"""Settings that concern operation only and do nothing here, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting that is decided by fields of ours."""

    fields: tuple[str, ...]
    """The fields."""

    read: Callable[[Any], tuple[Any, ...]] | None = None
    """Values of the fields that a value of the setting gives, () for nothing; raises ValueError with the kind of value
    that it has to be. None if the file cannot set the fields."""

    decided_by: str = ""
    """Flag that decides it, if that is not the flag of the fields."""

    @property
    def flags(self) -> str:
        """Flags that decide it, in words."""
        return self.decided_by or " or ".join(map(flag, self.fields))


def _whole(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number")
    return (value,)


def _number(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return (float(value),)


def _switch(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return (True,) if value else ()


def _fixed_scale(value: Any) -> tuple[Any, ...]:
    # 0 is DeepSpeed's word for a scale that adapts.
    return _number(value) if value else ()


def _power(value: Any) -> tuple[Any, ...]:
    (power,) = _whole(value)
    if not 0 <= power < 64:
        raise ValueError("a power from 0 to 63")
    return (float(2**power),)


def _numbers(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a list of two numbers")
    return tuple(number for part in value for number in _number(part))


def _accumulation(value: Any) -> tuple[Any, ...]:
    return (True,) if value == "fp32" else ()


def _optimizer(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, str):
        raise ValueError("a name")
    name = {"adamw": "adam", "fusedadam": "adam"}.get(value.lower(), value.lower())
    return (name,) if name in ("adam", "sgd") else ()


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "train_batch_size": Setting(fields=("global_batch_size",), read=_whole),
        "train_micro_batch_size_per_gpu": Setting(fields=("micro_batch_size",), read=_whole),
        "gradient_accumulation_steps": Setting(
            fields=("gradient_accumulation_steps",), read=_whole, decided_by="--global-batch-size"
        ),
        "sequence_parallel_size": Setting(fields=("ds_sequence_parallel_size",), read=_whole),
        "gradient_clipping": Setting(fields=("clip_grad",), read=_number),
        "zero_optimization.stage": Setting(fields=("zero_stage",), read=_whole),
        "zero_optimization.reduce_bucket_size": Setting(fields=("zero_reduce_bucket_size",)),
        "zero_optimization.allgather_bucket_size": Setting(fields=("zero_allgather_bucket_size",)),
        "zero_optimization.reduce_scatter": Setting(fields=("zero_reduce_scatter",)),
        "zero_optimization.contiguous_gradients": Setting(fields=("zero_contiguous_gradients",)),
        "bf16.enabled": Setting(fields=("bf16",), read=_switch),
        "fp16.enabled": Setting(fields=("fp16",), read=_switch),
        "fp16.loss_scale": Setting(fields=("loss_scale",), read=_fixed_scale),
        "fp16.initial_scale_power": Setting(fields=("initial_loss_scale",), read=_power),
        "fp16.loss_scale_window": Setting(fields=("loss_scale_window",), read=_whole),
        "fp16.hysteresis": Setting(fields=("hysteresis",), read=_whole),
        "fp16.min_loss_scale": Setting(fields=("min_loss_scale",), read=_number),
        "data_types.grad_accum_dtype": Setting(fields=("accumulate_allreduce_grads_in_fp32",), read=_accumulation),
        "pipeline.token_slices": Setting(fields=("token_slices",)),
        "pipeline.schedule": Setting(fields=("pipeline_schedule",)),
        "optimizer.type": Setting(fields=("optimizer",), read=_optimizer),
        "optimizer.params.lr": Setting(fields=("lr",), read=_number),
        "optimizer.params.betas": Setting(fields=("adam_beta1", "adam_beta2"), read=_numbers),
        "optimizer.params.eps": Setting(fields=("adam_eps",), read=_number),
        "optimizer.params.weight_decay": Setting(fields=("weight_decay",), read=_number),
        "optimizer.params.momentum": Setting(fields=("sgd_momentum",), read=_number),
    }
)
"""Each setting that fields of ours decide, by its name with dots."""


def read_deepspeed_settings(path: str) -> dict[str, Any]:
    """Read the file that `--deepspeed-config` names. What it leaves to us, by `auto` or null, is not in the answer."""
    document = read_json(path, FLAG)
    if not isinstance(document, dict):
        raise ConfigError(f"{FLAG} {path} is not a JSON object: write one")
    if "bfloat16" in document:  # DeepSpeed's older name; under it the conflict with --bf16 would go unseen.
        document["bf16"] = document.pop("bfloat16")
    return _without_auto(document)


def fields_of(settings: Mapping[str, Any], path: str) -> dict[str, tuple[str, Any]]:
    """Return the fields that a file sets, each with the name of the setting and the value of the field."""
    found: dict[str, tuple[str, Any]] = {}
    for name, setting in SETTINGS.items():
        value = _value(settings, name)
        if value is None or setting.read is None:
            continue
        try:
            values = setting.read(value)
        except ValueError as error:
            raise ConfigError(f"{FLAG} {path} sets {name} to {json.dumps(value)}, not to {error}: mend it") from None
        found |= {field: (name, each) for field, each in zip(setting.fields, values, strict=False)}
    return found


def without_effect(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of a file that are switched on and do nothing here, each with the reason."""
    return [f"{name} ({reason})" for name, reason in NO_EFFECT.items() if switched_on(_value(settings, name))]


def switched_on(value: object) -> bool:
    """Whether a setting or a section asks for anything."""
    if not isinstance(value, Mapping):
        return bool(value)
    if "enabled" in value:
        return bool(value["enabled"])
    if "device" in value:
        return bool(value["device"] != "none")
    # A section whose params are all left to us says nothing.
    return bool(value.get("params") if "params" in value else value)


def _value(settings: Mapping[str, Any], name: str) -> Any:
    """Return the setting of a name with dots; None if there is none."""
    value: Any = settings
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _without_auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the settings that a file leaves to us."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if value is not None and value != "auto"
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedValues:
    """Values of our fields that a DeepSpeed file gives."""

    path: str | None
    """The file; None if there is none."""

    fields: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Name of the setting, and value of the field, by field that nothing else sets."""

    without_effect: tuple[str, ...] = ()
    """Settings that are switched on and do nothing here, each with the reason."""

    @classmethod
    def read(cls, path: str | None, given: Mapping[str, Any]) -> "DeepSpeedValues":
        """Read a file, if there is one. What contradicts the rest is found when the run is prepared."""
        if path is None:
            return cls(path=None)
        settings = read_deepspeed_settings(path)
        found = fields_of(settings, path)
        if "global_batch_size" in {*given, *found}:
            # The number of micro-batches follows from it.
            found.pop("gradient_accumulation_steps", None)
        return cls(
            path=path,
            fields={name: pair for name, pair in found.items() if name not in given},
            without_effect=tuple(without_effect(settings)),
        )

    def values(self) -> dict[str, Any]:
        """Return the value of each field that only the file sets."""
        return {name: value for name, (_, value) in self.fields.items()}

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Name the setting in an error about a field that the file may have set: nobody typed its flag."""
        try:
            yield
        except ConfigError as error:
            named = [
                setting
                for name, (setting, _) in self.fields.items()
                if re.search(rf"{flag(name)}(?![\w-])", str(error))
            ]
            if not named:
                raise
            raise ConfigError(f"{error} ({FLAG} {self.path} sets {', '.join(named)})") from None

    def notices(self) -> Iterator[str]:
        """Yield a line about settings that do nothing here."""
        if self.without_effect:
            yield f"These settings of {FLAG} {self.path} have no effect here: {'; '.join(self.without_effect)}"
