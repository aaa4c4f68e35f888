"""DeepSpeed's own settings: the section, the file that `--deepspeed-config` names, and the fields that it sets.

SETTINGS          settings of a DeepSpeed file that are fields of ours, too
DeepSpeedValues   values that a file gives to fields that no flag sets
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron_terapipe.config.options import check, flag, option
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.errors import ConfigError

BUCKET_ELEMENTS = 50_000_000
"""Elements of ZeRO's buckets: DeepSpeed's default of 5e8 sets 2 GB aside on every rank, even for a toy on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """DeepSpeed."""

    deepspeed_config: str | None = option(None, metavar="FILE")
    """JSON file with further DeepSpeed settings. `auto` leaves a setting to the trainer. A setting that contradicts a
    flag is an error."""

    zero_reduce_bucket_size: int | None = option(None, least=1, most=10**12)
    """Elements of gradients that ZeRO reduces at a time. Default: 50 million."""

    zero_allgather_bucket_size: int | None = option(None, least=1, most=10**12)
    """Elements of weights that ZeRO gathers at a time, with `--overlap-param-gather` at most 33 million. Default: 50
    million."""

    zero_reduce_scatter: bool = False
    """Use ZeRO's reduce-scatter, DeepSpeed's default. A DeepSpeed file that switches it off is an error."""

    zero_contiguous_gradients: bool = option(False, aliases=("--zero-contigious-gradients",))
    """Let ZeRO copy gradients into one buffer as they are computed."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check(self)


FLAG = "--deepspeed-config"

NO_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("zero_optimization.offload_optimizer", "zero_optimization.cpu_offload", "zero_optimization.offload_param"),
            "weights and states stay on the accelerator, which trains the same with more memory there",
        ),
        "flops_profiler": "it times DeepSpeed's own forward, which token slices do not run",
        **{
            f"activation_checkpointing.{name}": "layers are recomputed with --recompute-granularity"
            for name in (
                *("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "profile"),
                *("synchronize_checkpoint_boundary", "number_checkpoints"),
            )
        },
    }
)
"""Settings that concern operation only and have no effect here, and why."""


RUN_UNDER_ZERO_1 = "run as ZeRO 1, which trains the same with more memory: DeepSpeed has 2 and 3 without pipelines only"


KINDS: Mapping[type[Any], str] = MappingProxyType(
    {int: "a whole number", float: "a number", bool: "true or false", str: "a name", list: "a list of two numbers"}
)
"""Types of settings, in words."""


def _typed(value: Any, kind: type[Any]) -> Any:
    """Return a value of a file as one of a type; raise ValueError with the words for the type if it has another."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(KINDS[kind])
    return value


def _power(exponent: int) -> float:
    if not 0 <= exponent < 64:
        raise ValueError("a power from 0 to 63")
    return float(2**exponent)


def _two_numbers(values: list[Any]) -> tuple[float, ...]:
    if len(values) != 2:
        raise ValueError(KINDS[list])
    return tuple(_typed(each, float) for each in values)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that is decided by fields of ours."""

    field: str
    """The field; several have commas between them."""

    kind: type[Any] | None = None
    """Type of its values; None if the file cannot set the field."""

    convert: Callable[[Any], Any] = lambda value: value
    """Value of the field by the value of the setting; None = the setting sets nothing."""

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

    def read(self, value: Any) -> dict[str, Any]:
        """Return the values of the fields; raises ValueError with the kind of value that the setting takes."""
        if self.kind is None:
            return {}
        ours = self.convert(_typed(value, self.kind))
        values = ours if isinstance(ours, tuple) else (ours,)
        return {} if ours is None else dict(zip(self.fields, values, strict=True))


_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd"}
_ZERO = ("reduce_bucket_size", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients")

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "train_batch_size": Setting("global_batch_size", int),
        "train_micro_batch_size_per_gpu": Setting("micro_batch_size", int),
        "gradient_accumulation_steps": Setting("gradient_accumulation_steps", int, decided_by="--global-batch-size"),
        "sequence_parallel_size": Setting("ds_sequence_parallel_size", int),
        "gradient_clipping": Setting("clip_grad", float),
        "zero_optimization.stage": Setting("zero_stage", int, lambda stage: 1 if stage in (2, 3) else stage),
        **{f"zero_optimization.{name}": Setting(f"zero_{name}") for name in _ZERO},
        "bf16.enabled": Setting("bf16", bool, lambda on: on or None),
        "fp16.enabled": Setting("fp16", bool, lambda on: on or None),
        # In DeepSpeed 0 stands for a scale that adapts.
        "fp16.loss_scale": Setting("loss_scale", float, lambda scale: scale or None),
        "fp16.initial_scale_power": Setting("initial_loss_scale", int, _power),
        "fp16.loss_scale_window": Setting("loss_scale_window", int),
        "fp16.hysteresis": Setting("hysteresis", int),
        "fp16.min_loss_scale": Setting("min_loss_scale", float),
        "data_types.grad_accum_dtype": Setting(
            "accumulate_allreduce_grads_in_fp32", str, lambda dtype: True if dtype == "fp32" else None
        ),
        "pipeline.token_slices": Setting("token_slices"),
        "pipeline.schedule": Setting("pipeline_schedule"),
        "optimizer.type": Setting("optimizer", str, lambda name: _OPTIMIZERS.get(name.lower())),
        "optimizer.params.lr": Setting("lr", float),
        "optimizer.params.betas": Setting("adam_beta1,adam_beta2", list, _two_numbers),
        "optimizer.params.eps": Setting("adam_eps", float),
        "optimizer.params.weight_decay": Setting("weight_decay", float),
        "optimizer.params.momentum": Setting("sgd_momentum", float),
    }
)
"""Each setting that fields of ours decide, by its name with dots."""


def read_deepspeed_settings(path: str) -> dict[str, Any]:
    """Read the file that `--deepspeed-config` names, without the settings that it leaves to us by `auto` or null."""
    document = read_json(path, FLAG)
    if not isinstance(document, dict):
        raise ConfigError(f"{FLAG} {path} is not a JSON object: write one")
    if "bfloat16" in document:  # DeepSpeed's older name; with it the conflict with --bf16 would not be found.
        document["bf16"] = document.pop("bfloat16")
    return _without_auto(document)


def switched_on(value: object) -> bool:
    """Whether a setting or a section switches anything on."""
    if not isinstance(value, Mapping):
        return bool(value)
    if "enabled" in value:
        return bool(value["enabled"])
    if "device" in value:
        return bool(value["device"] != "none")
    # A section may leave all of its params to us.
    return bool(value.get("params") if "params" in value else value)


def setting_of(settings: Mapping[str, Any], name: str) -> Any:
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
    """Values that a DeepSpeed file gives to our fields; those that contradict flags are refused before the run."""

    path: str | None
    """The file; None if there is none."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Value of each field that only the file sets."""

    set_by: Mapping[str, str] = field(default_factory=dict)
    """Name of the setting, by field."""

    without_effect: tuple[str, ...] = ()
    """Settings that are switched on and have no effect here, each with the reason."""

    @classmethod
    def read(cls, path: str | None, given: Mapping[str, Any]) -> "DeepSpeedValues":
        """Read a file, if there is one; `given` are the values of fields from flags and other files."""
        if path is None:
            return cls(path=None)
        settings = read_deepspeed_settings(path)
        values: dict[str, Any] = {}
        set_by: dict[str, str] = {}
        for name, setting in SETTINGS.items():
            value = setting_of(settings, name)
            if value is None:
                continue
            try:
                found = setting.read(value)
            except ValueError as error:
                wrong = f"{FLAG} {path} sets {name} to {json.dumps(value)}, not to {error}: fix it"
                raise ConfigError(wrong) from None
            values |= {each: part for each, part in found.items() if each not in given}
            set_by |= dict.fromkeys(found, name)
        if "global_batch_size" in {*given, *values}:
            # The number of micro-batches follows from it.
            values.pop("gradient_accumulation_steps", None)
        idle = [f"{name} ({reason})" for name, reason in NO_EFFECT.items() if switched_on(setting_of(settings, name))]
        stage = setting_of(settings, "zero_optimization.stage")
        idle += [f"zero_optimization.stage {stage} ({RUN_UNDER_ZERO_1})"] if stage in (2, 3) else []
        return cls(path=path, values=values, set_by=set_by, without_effect=tuple(idle))

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Name the setting in an error about a field that the file sets, as its flag is not on the command line."""
        try:
            yield
        except ConfigError as error:
            flags = {name: rf"{flag(name)}(?![\w-])" for name in self.values}
            named = [self.set_by[name] for name, pattern in flags.items() if re.search(pattern, str(error))]
            if not named:
                raise
            raise ConfigError(f"{error} ({FLAG} {self.path} sets {', '.join(named)})") from None

    def notices(self) -> Iterator[str]:
        """Yield a line about settings without effect."""
        if self.without_effect:
            yield f"These settings of {FLAG} {self.path} have no effect here: {'; '.join(self.without_effect)}"
