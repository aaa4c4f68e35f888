"""DeepSpeed's own settings: the section, the file that `--deepspeed-config` names, and the fields that it sets.

SETTINGS          settings of a DeepSpeed file that are fields of ours, too
DeepSpeedFile     the values that a file gives to these fields
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
        check(self)


FLAG = "--deepspeed-config"

NO_EFFECT: Mapping[str, str] = {
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
"""Settings that concern operation only and have no effect here, and why."""


RUN_UNDER_ZERO_1 = "run as ZeRO 1, which trains the same with more memory: DeepSpeed has 2 and 3 without pipelines only"


KINDS: Mapping[type[Any], str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}
"""Types of settings, in words."""
PAIR = "a list of two numbers"


def _of_type(kind: type[Any], convert: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Any]:
    """Return a reader of values of a type; a whole number is a number, too."""

    def read(value: Any) -> Any:
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(KINDS.get(kind, PAIR))
        return convert(value)

    return read


def _power(exponent: int) -> float:
    if not 0 <= exponent < 64:
        raise ValueError("a power from 0 to 63")
    return float(2**exponent)


def _two_numbers(values: list[Any]) -> tuple[float, ...]:
    if len(values) != 2:
        raise ValueError(PAIR)
    return tuple(map(_number, values))


_whole, _number, _switch = _of_type(int), _of_type(float), _of_type(bool, lambda on: on or None)


class Decided(NamedTuple):
    """A row of `SETTINGS`."""

    field: str
    """The field that decides it; several have commas between them."""

    read: Callable[[Any], Any] | None = None
    """Value of the field by the value of the setting, several in a tuple; None = the setting sets nothing. It raises
    ValueError with the kind of value that the setting takes. None = the file cannot set the field."""

    decided_by: str = ""
    """Flag that decides it, if that is not the flag of the field."""

    @property
    def flags(self) -> str:
        """Flags that decide it, in words."""
        return self.decided_by or " or ".join(map(flag, self.field.split(",")))

    def values(self, value: Any) -> dict[str, Any]:
        """Return the values of the fields."""
        ours = None if self.read is None else self.read(value)
        return (
            {}
            if ours is None
            else dict(zip(self.field.split(","), ours if isinstance(ours, tuple) else (ours,), strict=True))
        )


_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd"}
_ZERO = ("reduce_bucket_size", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients")

SETTINGS: Mapping[str, Decided] = {
    "train_batch_size": Decided("global_batch_size", _whole),
    "train_micro_batch_size_per_gpu": Decided("micro_batch_size", _whole),
    "gradient_accumulation_steps": Decided("gradient_accumulation_steps", _whole, "--global-batch-size"),
    "sequence_parallel_size": Decided("ds_sequence_parallel_size", _whole),
    "gradient_clipping": Decided("clip_grad", _number),
    "zero_optimization.stage": Decided("zero_stage", _of_type(int, lambda stage: 1 if stage in (2, 3) else stage)),
    **{f"zero_optimization.{name}": Decided(f"zero_{name}") for name in _ZERO},
    "bf16.enabled": Decided("bf16", _switch),
    "fp16.enabled": Decided("fp16", _switch),
    # In DeepSpeed 0 stands for a scale that adapts.
    "fp16.loss_scale": Decided("loss_scale", _of_type(float, lambda scale: scale or None)),
    "fp16.initial_scale_power": Decided("initial_loss_scale", _of_type(int, _power)),
    "fp16.loss_scale_window": Decided("loss_scale_window", _whole),
    "fp16.hysteresis": Decided("hysteresis", _whole),
    "fp16.min_loss_scale": Decided("min_loss_scale", _number),
    "data_types.grad_accum_dtype": Decided(
        "accumulate_allreduce_grads_in_fp32", _of_type(str, lambda dtype: True if dtype == "fp32" else None)
    ),
    "pipeline.token_slices": Decided("token_slices"),
    "pipeline.schedule": Decided("pipeline_schedule"),
    "optimizer.type": Decided("optimizer", _of_type(str, lambda name: _OPTIMIZERS.get(name.lower()))),
    "optimizer.params.lr": Decided("lr", _number),
    "optimizer.params.betas": Decided("adam_beta1,adam_beta2", _of_type(list, _two_numbers)),
    "optimizer.params.eps": Decided("adam_eps", _number),
    "optimizer.params.weight_decay": Decided("weight_decay", _number),
    "optimizer.params.momentum": Decided("sgd_momentum", _number),
}
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
class DeepSpeedFile:
    """Fields of ours that a DeepSpeed file sets; settings that contradict flags are refused before the run."""

    path: str | None = None
    """The file; None if there is none."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Value of each field that it sets."""

    set_by: Mapping[str, str] = field(default_factory=dict)
    """Name of the setting, by field."""

    without_effect: tuple[str, ...] = ()
    """Settings that are switched on and have no effect here, each with the reason."""

    @classmethod
    def read(cls, path: str | None) -> "DeepSpeedFile":
        """Read a file, if there is one."""
        if path is None:
            return cls()
        settings = read_deepspeed_settings(path)
        values: dict[str, Any] = {}
        set_by: dict[str, str] = {}
        for name, setting in SETTINGS.items():
            value = setting_of(settings, name)
            if value is None:
                continue
            try:
                found = setting.values(value)
            except ValueError as error:
                wrong = f"{FLAG} {path} sets {name} to {json.dumps(value)}, not to {error}: fix it"
                raise ConfigError(wrong) from None
            values |= found
            set_by |= dict.fromkeys(found, name)
        idle = [f"{name} ({reason})" for name, reason in NO_EFFECT.items() if switched_on(setting_of(settings, name))]
        stage = setting_of(settings, "zero_optimization.stage")
        idle += [f"zero_optimization.stage {stage} ({RUN_UNDER_ZERO_1})"] if stage in (2, 3) else []
        return cls(path=path, values=values, set_by=set_by, without_effect=tuple(idle))
