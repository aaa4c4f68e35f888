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


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number")
    return value


def _switch(value: Any) -> bool | None:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value or None


def _power(value: Any) -> float:
    if not 0 <= _whole(value) < 64:
        raise ValueError("a power from 0 to 63")
    return float(2**value)


def _two_numbers(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a list of two numbers")
    return tuple(map(_number, value))


def _optimizer(value: Any) -> str | None:
    if not isinstance(value, str):
        raise ValueError("a name")
    name = {"adamw": "adam", "fusedadam": "adam"}.get(value.lower(), value.lower())
    return name if name in ("adam", "sgd") else None


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that is decided by fields of ours."""

    field: str
    """The field; of several, with commas between them."""

    read: Callable[[Any], Any] | None = None
    """Value of the field by that of the setting, None for nothing; raises ValueError with the kind of value that it has
    to be. None if the file cannot set the field."""

    decided_by: str = ""
    """Flag that decides it, if that is not the flag of the field."""

    @property
    def fields(self) -> list[str]:
        """The fields."""
        return self.field.split(",")

    @property
    def flags(self) -> str:
        """Flags that decide it, in words."""
        return self.decided_by or " or ".join(map(flag, self.fields))


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "train_batch_size": Setting("global_batch_size", _whole),
        "train_micro_batch_size_per_gpu": Setting("micro_batch_size", _whole),
        "gradient_accumulation_steps": Setting("gradient_accumulation_steps", _whole, "--global-batch-size"),
        "sequence_parallel_size": Setting("ds_sequence_parallel_size", _whole),
        "gradient_clipping": Setting("clip_grad", _number),
        "zero_optimization.stage": Setting("zero_stage", _whole),
        "zero_optimization.reduce_bucket_size": Setting("zero_reduce_bucket_size"),
        "zero_optimization.allgather_bucket_size": Setting("zero_allgather_bucket_size"),
        "zero_optimization.reduce_scatter": Setting("zero_reduce_scatter"),
        "zero_optimization.contiguous_gradients": Setting("zero_contiguous_gradients"),
        "bf16.enabled": Setting("bf16", _switch),
        "fp16.enabled": Setting("fp16", _switch),
        # 0 is DeepSpeed's word for a scale that adapts.
        "fp16.loss_scale": Setting("loss_scale", lambda scale: _number(scale) if scale else None),
        "fp16.initial_scale_power": Setting("initial_loss_scale", _power),
        "fp16.loss_scale_window": Setting("loss_scale_window", _whole),
        "fp16.hysteresis": Setting("hysteresis", _whole),
        "fp16.min_loss_scale": Setting("min_loss_scale", _number),
        "data_types.grad_accum_dtype": Setting(
            "accumulate_allreduce_grads_in_fp32", lambda dtype: True if dtype == "fp32" else None
        ),
        "pipeline.token_slices": Setting("token_slices"),
        "pipeline.schedule": Setting("pipeline_schedule"),
        "optimizer.type": Setting("optimizer", _optimizer),
        "optimizer.params.lr": Setting("lr", _number),
        "optimizer.params.betas": Setting("adam_beta1,adam_beta2", _two_numbers),
        "optimizer.params.eps": Setting("adam_eps", _number),
        "optimizer.params.weight_decay": Setting("weight_decay", _number),
        "optimizer.params.momentum": Setting("sgd_momentum", _number),
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
    """Values of our fields that a DeepSpeed file gives. What contradicts the rest is found when the run is prepared."""

    path: str | None
    """The file; None if there is none."""

    fields: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Name of the setting, and value of the field, by field that nothing else sets."""

    without_effect: tuple[str, ...] = ()
    """Settings that are switched on and do nothing here, each with the reason."""

    @classmethod
    def read(cls, path: str | None, given: Mapping[str, Any]) -> "DeepSpeedValues":
        """Read a file, if there is one; `given` are the values of fields that something else sets."""
        if path is None:
            return cls(path=None)
        settings = read_deepspeed_settings(path)
        found: dict[str, tuple[str, Any]] = {}
        for name, setting in SETTINGS.items():
            value = _value(settings, name)
            if value is None or setting.read is None:
                continue
            try:
                ours = setting.read(value)
            except ValueError as error:
                wrong = f"{FLAG} {path} sets {name} to {json.dumps(value)}, not to {error}: mend it"
                raise ConfigError(wrong) from None
            if ours is not None:
                values = ours if isinstance(ours, tuple) else (ours,)
                found |= {each: (name, part) for each, part in zip(setting.fields, values, strict=True)}
        if "global_batch_size" in {*given, *found}:
            # The number of micro-batches follows from it.
            found.pop("gradient_accumulation_steps", None)
        idle = (f"{name} ({reason})" for name, reason in NO_EFFECT.items() if switched_on(_value(settings, name)))
        only_here = {name: pair for name, pair in found.items() if name not in given}
        return cls(path=path, fields=only_here, without_effect=tuple(idle))

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
