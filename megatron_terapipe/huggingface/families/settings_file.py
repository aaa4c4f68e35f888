"""A `config.json`, whose values are checked as they are read."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from megatron_terapipe.config.fields.json_files import read_json
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that a setting may have."""

    wanted: str
    """What they are, in words."""
    fits: Callable[[Any], bool]
    """Whether a value is one of them."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
NATURAL = Kind("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
NUMBER = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
WORD = Kind("a word", lambda value: isinstance(value, str))
WORDS = Kind("a list of words", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value))
BITS = Kind("a list of 0 and 1", lambda value: isinstance(value, list) and all(each in (0, 1) for each in value))
NUMBERS = Kind(
    "a list of numbers above 0", lambda value: isinstance(value, list) and value and all(map(NUMBER.fits, value))
)
SECTION = Kind("a JSON object", lambda value: isinstance(value, Mapping))

_REQUIRED = object()


def refuse_experts(contents: Mapping[Any, Any], where: str) -> None:
    """Raise if settings describe a mixture of experts, whatever else they say.

    Raises:
        ConfigError: naming the first setting of experts that does not say that there are none.
    """
    for name, value in contents.items():
        if "expert" in str(name) and value not in (None, 0, 1):
            raise ConfigError(
                f"{where} sets {name} to {_shown(value)}, and mixtures of experts are not in this trainer: "
                f"{MODEL_CANNOT_BE_TRAINED}"
            )


class SettingsFile:
    """The settings of a `config.json`, or of a section of it."""

    def __init__(self, contents: Mapping[str, Any], where: str) -> None:
        self._contents, self.where = contents, where

    @classmethod
    def read(cls, path: str | Path, flag: str) -> "SettingsFile":
        """Read it.

        Raises:
            UserError: if it cannot be read, or is no JSON object.
        """
        file = Path(path) / CONFIG_FILE if Path(path).is_dir() else Path(path)
        contents = read_json(str(file), flag)
        if not isinstance(contents, Mapping):
            raise ConfigError(f"{flag} {file} is not a JSON object: give the {CONFIG_FILE} of a model")
        return cls(contents, str(file))

    def has(self, name: str) -> bool:
        """Whether a setting is there, and not null."""
        return self._contents.get(name) is not None

    def value(self, name: str, kind: Kind, default: Any = _REQUIRED, *, nullable: bool = False) -> Any:
        """Return the value of a setting.

        Args:
            default: its value where it is left out; if there is none, it must be there.
            nullable: whether it may be null, which then is the answer.

        Raises:
            ConfigError: if it is of another kind.
        """
        if name not in self._contents and default is not _REQUIRED:
            return default
        value = self._contents.get(name)
        if (value is None and nullable) or (value is not None and kind.fits(value)):
            return value
        if name not in self._contents:
            raise ConfigError(f"{self.where} leaves out {name}, which must be {kind.wanted}: get the file again")
        raise ConfigError(
            f"{self.where} sets {name} to {_shown(value)}, and it must be {kind.wanted}: correct the file"
        )

    def expect(self, name: str, accepted: Iterable[Any], default: Any = None) -> Any:
        """Return the value of a setting of which our models have one or a few values.

        Args:
            default: its value where it is left out.

        Raises:
            ConfigError: if it is something else.
        """
        value, accepted = self._contents.get(name, default), tuple(accepted)
        # In JSON, `true` is not 1.
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted):
            choices = " or ".join(_shown(each) for each in accepted)
            raise ConfigError(
                f"{self.where} sets {name} to {_shown(value)}, and our models have {choices}: this model cannot be "
                "trained here"
            )
        return value

    def section(self, name: str) -> "SettingsFile":
        """Return a section of the file; an empty one if there is none.

        Raises:
            ConfigError: if it is no JSON object.
        """
        contents = self.value(name, SECTION, None, nullable=True)
        return SettingsFile(contents or {}, f"{self.where} {name}")

    def with_value(self, name: str, value: Any) -> "SettingsFile":
        """Return the file with another value for a setting."""
        return SettingsFile({**self._contents, name: value}, self.where)

    def refuse_experts(self) -> None:
        """Raise if the settings describe a mixture of experts."""
        refuse_experts(self._contents, self.where)

    def __bool__(self) -> bool:
        """Whether anything is set."""
        return bool(self._contents)


def _shown(value: object) -> str:
    """Return a value as the file writes it, cut to a length that fits into a line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
