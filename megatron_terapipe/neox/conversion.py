"""The result of a conversion: the command, and notes on settings without a counterpart."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_terapipe.errors import ConfigError


class Effect(Enum):
    """Effect on the training of a setting without an exact counterpart."""

    CHANGES = "changes what is trained"
    NEAR = "nearly the same"
    NONE = "the same training"


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A setting that has no exact counterpart."""

    key: str
    effect: Effect
    reason: str

    def __str__(self) -> str:
        # A value of YAML may have several lines; a note has one.
        return " ".join(f"{self.key}: {self.effect.value}: {self.reason}".split())


@dataclass(kw_only=True, slots=True)
class Conversion:
    """A conversion under way: settings are taken from it, flags and notes put into it."""

    settings: Mapping[str, Any]
    """NeoX's settings by key; null stands for NeoX's default."""

    flags: list[tuple[str, ...]] = field(default_factory=list)
    """Flags of the trainer, each with its values."""

    launcher: list[tuple[str, ...]] = field(default_factory=list)
    """Flags of the launcher."""

    notes: list[Note] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    """Keys that have been looked at."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return a setting, or its default in NeoX, and mark it as converted.

        Args:
            key: its name in NeoX.
            default: its default in NeoX.
        """
        self.taken.add(key)
        value = self.settings.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a setting that is a number. YAML reads 1e-4 as text, because it has no point.

        Args:
            key: its name in NeoX.
            default: its default in NeoX.

        Raises:
            ConfigError: if it is no number.
        """
        return as_number(key, self.take(key, default))

    def count(self, key: str, default: int | None = None) -> int | None:
        """Return a setting that is a whole number.

        Args:
            key: its name in NeoX.
            default: its default in NeoX.

        Raises:
            ConfigError: if it is no whole number.
        """
        value = self.number(key, default)
        if value is not None and value != int(value):
            raise ConfigError(f"{key} {value} is not a whole number: give one")
        return None if value is None else int(value)

    def section(self, key: str) -> dict[str, Any]:
        """Return a setting that holds others.

        Raises:
            ConfigError: if it does not.
        """
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} {value!r} is not a mapping: write it as {{...}}")
        return {name: inner for name, inner in value.items() if inner is not None}

    def flag(self, name: str, *values: object) -> None:
        """Add a flag to the command.

        Args:
            name: the flag.
            *values: its values; none for a switch.
        """
        self.flags.append((name, *map(str, values)))

    def note(self, key: str, effect: Effect, reason: str) -> None:
        """Record a setting that has no exact counterpart.

        Args:
            key: its name in NeoX.
            effect: its effect on the training.
            reason: why it has none, or how close the counterpart is.
        """
        self.notes.append(Note(key=key, effect=effect, reason=reason))

    def words(self) -> list[str]:
        """Return the words after the name of the trainer."""
        return [word for flag in self.flags for word in flag]

    def command(self) -> str:
        """Return the command, a flag a line, as a shell reads it."""
        launch = " ".join(["deepspeed", *(_quoted(flag) for flag in self.launcher), "pretrain_gpt.py"])
        return " \\\n    ".join([launch, *(_quoted(flag) for flag in self.flags)]) + "\n"

    def comments(self) -> Iterator[str]:
        """Yield the notes, the heaviest first."""
        for effect in Effect:
            yield from (str(note) for note in self.notes if note.effect is effect)


def as_number(key: str, value: Any) -> Any:
    """Return a value that must be a number or None.

    Args:
        key: name of the setting.
        value: its value.

    Raises:
        ConfigError: if it is neither.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"{key} {value} is not a number: give one") from None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{key} {value!r} is not a number: give one")
    return value


def _quoted(flag: tuple[str, ...]) -> str:
    return " ".join(map(shlex.quote, flag))
