"""Values of the file that `--deepspeed-config` names, for fields that nothing else sets."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_terapipe.config.fields.options import flag
from megatron_terapipe.config.files.deepspeed_settings import FLAG, fields_of, read_deepspeed_settings, without_effect
from megatron_terapipe.errors import ConfigError


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
        """Read a file, if there is one. What contradicts the rest is found when the run is prepared.

        Args:
            given: values of fields that something else sets.

        Raises:
            ConfigError: if it cannot be read, or a value is of the wrong kind.
        """
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
