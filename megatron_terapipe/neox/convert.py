"""Convert NeoX's settings to a command."""

from collections.abc import Mapping
from typing import Any

from megatron_terapipe.neox.conversion import Conversion, Effect
from megatron_terapipe.neox.keys import FIXED, HARMLESS, SWITCHES, VALUES
from megatron_terapipe.neox.model import convert_model
from megatron_terapipe.neox.surroundings import (
    convert_checkpoints,
    convert_data,
    convert_extra,
    convert_launch,
    convert_reports,
    convert_tokenizer,
)
from megatron_terapipe.neox.training import (
    convert_batch,
    convert_optimizer,
    convert_parallel,
    convert_precision,
    convert_recomputation,
    convert_schedule,
    convert_zero,
)


def convert(settings: Mapping[str, Any], world_size: int | None = None) -> Conversion:
    """Convert settings.

    Args:
        settings: settings of NeoX, by key with underscores.
        world_size: processes of the run; None = not known.

    Raises:
        ConfigError: if a value is not what NeoX takes.
    """
    conversion = Conversion(settings=settings)
    for key, (flag, default) in VALUES.items():
        value = conversion.take(key, default)
        if value is not None:
            conversion.flag(flag, value)
    for key, flag in SWITCHES.items():
        if conversion.take(key, False):
            conversion.flag(flag)
    convert_model(conversion)
    convert_parallel(conversion)
    convert_batch(conversion, world_size)
    convert_optimizer(conversion)
    convert_schedule(conversion)
    convert_zero(conversion, convert_precision(conversion))
    convert_recomputation(conversion)
    convert_data(conversion)
    convert_tokenizer(conversion)
    convert_checkpoints(conversion)
    convert_reports(conversion)
    convert_launch(conversion)
    convert_extra(conversion)
    _fixed(conversion)
    _rest(conversion)
    return conversion


def _fixed(conversion: Conversion) -> None:
    for key, (agreeing, reason) in FIXED.items():
        value = conversion.take(key)
        off = isinstance(value, Mapping) and not value.get("enabled", bool(value))
        if value is not None and value not in agreeing and not off:
            conversion.note(key, Effect.CHANGES, reason)


def _rest(conversion: Conversion) -> None:
    for key in conversion.settings:
        value = conversion.settings[key]
        if key in conversion.taken or value is None:
            continue
        if key in HARMLESS:
            if value is False:  # What is off needs no counterpart.
                continue
            conversion.note(key, Effect.NONE, HARMLESS[key])
        else:
            conversion.note(
                key, Effect.CHANGES, "not known here: see docs/migrating.md, or leave it out if you know it"
            )
