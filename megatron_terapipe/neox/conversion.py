"""The state and the result of a conversion: the command, what was left out of it, and what keeps it from being made."""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_terapipe.arguments.megatron_flags.unsupported_flags import MODEL
from megatron_terapipe.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Conversion:
    """A conversion under way: settings are taken from it; flags, remarks and refusals are put into it."""

    settings: Mapping[str, Any]
    """NeoX's settings by key; null stands for NeoX's default."""

    flags: list[tuple[str, ...]] = field(default_factory=list)
    """Flags of the trainer, each with its values."""

    launcher: list[tuple[str, ...]] = field(default_factory=list)
    """Flags of the launcher."""

    refusals: list[str] = field(default_factory=list)
    """Settings that decide what is trained and have no counterpart, each with its value and the reason."""

    remarks: list[tuple[str, str]] = field(default_factory=list)
    """Settings of operation that the command does without, or says in another way, each with the reason."""

    taken: set[str] = field(default_factory=set)
    """Keys that have been looked at."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return a setting, or its default in NeoX, and mark it as converted.

        Args:
            default: its default in NeoX.
        """
        self.taken.add(key)
        value = self.settings.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a setting that is a number. YAML reads 1e-4 as text, because it has no point.

        Args:
            default: its default in NeoX.

        Raises:
            ConfigError: if it is no number.
        """
        return as_number(key, self.take(key, default))

    def count(self, key: str, default: int | None = None) -> int | None:
        """Return a setting that is a whole number.

        Args:
            default: its default in NeoX.

        Raises:
            ConfigError: if it is no whole number.
        """
        value = self.number(key, default)
        if value is not None and value != int(value):
            raise ConfigError(f"{key} {value} is not a whole number: give one")
        return None if value is None else int(value)

    def several(self, key: str) -> list[Any]:
        """Return a setting that is a list; empty if it is not set.

        Raises:
            ConfigError: if it is no list.
        """
        value = self.take(key, [])
        if not isinstance(value, list):
            raise ConfigError(f"{key} {value!r} is not a list: write it as [...]")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """Return a setting that holds others.

        Raises:
            ConfigError: if it does not.
        """
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} {value!r} is not a mapping: write it as {{...}}")
        return {str(name): inner for name, inner in value.items() if inner is not None}

    def flag(self, name: str, *values: object) -> None:
        """Add a flag to the command.

        Args:
            *values: its values; none for a switch.
        """
        self.flags.append((name, *map(str, values)))

    def refuse(self, setting: str, reason: str, end: str = MODEL) -> None:
        """Record a setting without which another model would be trained, or in another way."""
        # A value of YAML may have several lines; an error has one.
        self.refusals.append(" ".join(f"{setting}: {reason}: {end}".split()))

    def remark(self, setting: str, reason: str) -> None:
        """Record a setting of operation that has no flag."""
        self.remarks.append((" ".join(setting.split()), reason))

    def check(self) -> None:
        """See that the command trains what the settings say.

        Raises:
            ConfigError: if it would not; one line names every setting that is in the way.
        """
        if self.refusals:
            raise ConfigError("; ".join(self.refusals))

    def words(self) -> list[str]:
        """Return the words after the name of the trainer."""
        return [word for flag in self.flags for word in flag]

    def command(self) -> str:
        """Return the command, a flag a line, as a shell reads it."""
        launch = " ".join(["deepspeed", *(_quoted(flag) for flag in self.launcher), "pretrain_gpt.py"])
        return " \\\n    ".join([launch, *(_quoted(flag) for flag in self.flags)]) + "\n"

    def comments(self) -> Iterator[str]:
        """Yield the remarks, those with one reason in one line."""
        settings_by_reason = defaultdict(list)
        for setting, reason in self.remarks:
            settings_by_reason[reason].append(setting)
        for reason, settings in settings_by_reason.items():
            yield f"{', '.join(settings)}: {reason}"


MOST_NUMBER = 1e36
"""Numbers are below this: loss scales come next to it."""


def as_number(key: str, value: Any) -> Any:
    """Return a value that must be a number or None.

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
    if value is not None and not abs(value) < MOST_NUMBER:
        raise ConfigError(f"{key} {value!r} is beyond {MOST_NUMBER:g}: give less")
    return value


def _quoted(flag: tuple[str, ...]) -> str:
    return " ".join(map(shlex.quote, flag))
