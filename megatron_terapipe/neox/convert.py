"""Convert NeoX's settings to a command."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_terapipe.arguments.megatron_flags.unsupported_flags import MODEL, TRAINING
from megatron_terapipe.config.fields.options import option_of
from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.batch import convert_batch, convert_parallel
from megatron_terapipe.neox.conversion import Conversion
from megatron_terapipe.neox.defaults import SINCE_2023_12, Defaults
from megatron_terapipe.neox.initial_weights import convert_initial_weights
from megatron_terapipe.neox.keys import MODELS, OPERATION, SWITCHES, TRAININGS, VALUES
from megatron_terapipe.neox.learning_rate import convert_learning_rate
from megatron_terapipe.neox.model import convert_model
from megatron_terapipe.neox.surroundings import (
    convert_checkpoints,
    convert_data,
    convert_launch,
    convert_reports,
    convert_tokenizer,
)
from megatron_terapipe.neox.training import (
    convert_optimizer,
    convert_precision,
    convert_recomputation,
    convert_zero,
)


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
    for end, table in {MODEL: MODELS, TRAINING: TRAININGS}.items():
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
