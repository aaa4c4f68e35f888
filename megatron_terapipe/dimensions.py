"""What a field of a strategy declares beside its type and default: flags, tables, reports and checks follow from it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any

from megatron_terapipe.errors import ConfigError


class Tried(Enum):
    """Values that the search tries where they follow from the model, the cluster or the batch."""

    REST_OF_DEVICES = auto()
    """The one size with which all devices are used."""

    DIVISORS_OF_DEVICES = auto()
    DIVISORS_OF_BATCH = auto()
    COUNTS_OF_TOKEN_SLICES = auto()


class Kind:
    """Type of a dimension: how its values are checked, read from a flag, and compared.

    Attributes:
        is_text: whether columns of it are aligned to the left.
    """

    is_text = True

    def check(self, name: str, value: object) -> None:
        """Check a value of a strategy.

        Args:
            name: name of the dimension.
            value: what a strategy has there.

        Raises:
            ConfigError: if it is not of this type.
        """

    def parse(self, text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values that a flag of the search lists, each once.

        Args:
            text: value of the flag, with commas between values.
            flag: the flag.
            allowed: values that may be asked for; empty = all of this type.

        Raises:
            ConfigError: if a value is not of this type or not allowed.
        """
        raise NotImplementedError

    def tie_key(self, value: Any) -> Any:
        """Return what orders values among strategies that cost the same, smallest first."""
        return value


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number.

    Attributes:
        least: smallest value.
        optional: whether it may be None.
    """

    least: int = 1
    optional: bool = False
    is_text = False

    def check(self, name: str, value: object) -> None:
        """See `Kind`."""
        if not (self.optional and value is None):
            _check_whole(name, value, self.least)

    def parse(self, text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        """See `Kind`."""
        values, most = _numbers(text), max(allowed, default=None)
        if not values or min(values) < self.least or (most is not None and max(values) > most):
            if len(allowed) == 1:
                raise ConfigError(f"{flag} {text} is not {most}, the only value that can be priced: write {most}")
            upto = f"from {self.least}" if most is None else f"from {self.least} to {most}"
            raise ConfigError(
                f"{flag} {text} is not whole numbers {upto} with commas between them: "
                f"write {self.least},{self.least + 1}"
            )
        return tuple(dict.fromkeys(values))

    def tie_key(self, value: Any) -> Any:
        """See `Kind`."""
        return value or 0


@dataclass(frozen=True)
class Switch(Kind):
    """On or off."""

    is_text = False

    def check(self, name: str, value: object) -> None:
        """See `Kind`."""
        if not isinstance(value, bool):
            raise ConfigError(f"strategy: {name} {json.dumps(value)} is not true or false: write one")

    def parse(self, text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        """See `Kind`."""
        return tuple(value == "on" for value in _words(text, flag, ("off", "on")))


@dataclass(frozen=True)
class Word(Kind):
    """A name."""

    def check(self, name: str, value: object) -> None:
        """See `Kind`."""
        if not isinstance(value, str):
            raise ConfigError(f"strategy: {name} {json.dumps(value)} is not a name: write one")

    def parse(self, text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        """See `Kind`."""
        return _words(text, flag, allowed)


@dataclass(frozen=True)
class WholeList(Kind):
    """A list of whole numbers, or None.

    Attributes:
        least: smallest number.
    """

    least: int

    def check(self, name: str, value: object) -> None:
        """See `Kind`."""
        if value is not None:
            _check_list(name, value, self.least)

    def parse(self, text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        """Return the numbers of the one list that a flag gives; see `Kind`."""
        values = _numbers(text)
        if not values or min(values) < self.least:
            raise ConfigError(f"{flag} {text} is not lengths with commas between them: write 704,688,656")
        return values

    def tie_key(self, value: Any) -> Any:
        """See `Kind`."""
        return value or ()


@dataclass(frozen=True)
class WordOrBounds(Kind):
    """A rule by its name, or the bounds of stages that it would give."""

    def check(self, name: str, value: object) -> None:
        """See `Kind`."""
        if not isinstance(value, str):
            _check_list(name, value, 0)

    def parse(self, text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        """See `Kind`."""
        if not text[:1].isdigit():
            return _words(text, flag, allowed)
        return (Whole(0).parse(text, flag, ()),)

    def tie_key(self, value: Any) -> Any:
        """See `Kind`."""
        return (() if isinstance(value, str) else value, str(value))


Placed = tuple[int, str]
"""A place among the dimensions in some view, lowest first, and the words there."""


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A field of a strategy, and all that is done with it in general.

    Attributes:
        name: name of the field.
        default: value where nothing is said.
        kind: type of its values.
        setting: field of the configuration that it sets; None = the one of its name, empty = none.
        trained: values that the trainer supports; empty = all.
        priced: values that the search can price, and flags may ask for; empty = all.
        tried: values that the search tries where no flag says otherwise; None = not searched.
        ranks: whether it multiplies the number of ranks.
        axis: axis of `StrategyGrid` that it is on; empty = all strategies of a grid have the same value.
        flag_help: place and help of the search's flag that constrains it; None = no flag.
        label: place and name in comparisons; None = not compared.
        none: the words for None in comparisons.
        column: place and name in tables; None = not shown.
        usual: text of the column that is not worth a column where every row has it; empty = none.
        dropped: place among the columns that a narrow terminal does without; None = always shown.
        phrase: place and template in a strategy written in one line; None = left out.
        always: whether the phrase also stands there for the default.
        tie: place in the order that decides between strategies of the same cost.
        tie_key: what orders its values there; None = that of the kind.
    """

    name: str = ""
    default: Any = None
    kind: Kind
    setting: str | None = None
    trained: tuple[Any, ...] = ()
    priced: tuple[Any, ...] = ()
    tried: tuple[Any, ...] | Tried | None = None
    ranks: bool = False
    axis: str = ""
    flag_help: Placed | None = None
    label: Placed | None = None
    none: str = "as it comes"
    column: Placed | None = None
    usual: str = ""
    dropped: int | None = None
    phrase: Placed | None = None
    always: bool = False
    tie: int
    tie_key: Callable[[Any], Any] | None = None

    @property
    def flag(self) -> str:
        """Flag of the search that constrains it."""
        return f"--{self.name.replace('_', '-')}"

    def parse(self, text: str) -> tuple[Any, ...]:
        """Return the values that its flag lists.

        Raises:
            ConfigError: if one is none of this dimension.
        """
        return self.kind.parse(text, self.flag, self.priced)

    def in_ties(self, value: Any) -> Any:
        """Return what orders its values among strategies that cost the same, smallest first."""
        return (self.tie_key or self.kind.tie_key)(value)

    def check_trained(self, value: object) -> None:
        """Check that the trainer supports a value.

        Raises:
            ConfigError: if it does not.
        """
        if self.trained and value not in self.trained:
            choices = " or ".join(json.dumps(choice) for choice in self.trained)
            raise ConfigError(f"strategy: {self.name} {json.dumps(value)} cannot be trained yet: use {choices}")


def dimension(default: Any, **facts: Any) -> Any:
    """Declare a field of a strategy.

    It returns `Any`, as `dataclasses.field` does, so that the field keeps the type it is annotated with.

    Args:
        default: default of the field.
        facts: fields of `Dimension`.
    """
    return field(default=default, metadata={"dimension": Dimension(default=default, **facts)})


def dimensions_of(strategy: type[Any]) -> tuple[Dimension, ...]:
    """Return the dimensions that the fields of a dataclass declare, in their order."""
    found = []
    for declared in fields(strategy):
        facts = declared.metadata["dimension"]
        setting = declared.name if facts.setting is None else facts.setting
        found.append(replace(facts, name=declared.name, setting=setting))
    return tuple(found)


def in_places(dimensions: Sequence[Dimension], view: str) -> list[tuple[Dimension, str]]:
    """Return the dimensions that a view shows, in its order, each with its words there.

    Args:
        dimensions: any.
        view: a field of `Dimension` that has a place and words, such as `column`.
    """
    shown = [(each, getattr(each, view)) for each in dimensions if getattr(each, view) is not None]
    return [(each, words) for each, (_, words) in sorted(shown, key=lambda pair: pair[1][0])]


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them; empty if they are something else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return ()


def _words(text: str, flag: str, choices: Sequence[str]) -> tuple[str, ...]:
    values = tuple(part.strip() for part in text.split(","))
    for value in values:
        if value not in choices:
            raise ConfigError(f"{flag} {value} is not known: choose among {', '.join(choices)}")
    return tuple(dict.fromkeys(values))


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"strategy: {name} {json.dumps(value)} is not a whole number from {least}: give one")


def _check_list(name: str, values: object, least: int) -> None:
    if not isinstance(values, tuple):
        raise ConfigError(f"strategy: {name} {json.dumps(values)} is not a list: write it as [1, 2]")
    for value in values:
        _check_whole(name, value, least)
