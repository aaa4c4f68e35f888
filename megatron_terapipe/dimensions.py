"""Declarations of the fields of a strategy, from which flags, tables, reports and checks follow."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any, get_type_hints

from megatron_terapipe.config import Config
from megatron_terapipe.config.options import option_of
from megatron_terapipe.errors import ConfigError


class Tried(Enum):
    """Values that the search tries where they follow from the model, the cluster or the batch."""

    REST_OF_DEVICES = auto()
    """The one size with which all devices are used."""

    DIVISORS_OF_DEVICES = auto()
    DIVISORS_OF_BATCH = auto()
    COUNTS_OF_TOKEN_SLICES = auto()
    SHARES_OF_HEADS = auto()
    """Divisors of the devices that divide the attention heads, where sequences are long; else 1."""


@dataclass(frozen=True)
class Kind:
    """Type of a dimension."""

    check: Callable[[str, object], None]
    """Called with the name of the dimension and a value of a strategy; raises a `ConfigError` if the value is not of
    this type."""
    parse: Callable[[str, str, Sequence[Any]], tuple[Any, ...]]
    """Called with the text of a flag, the flag, and the values that may be asked for (empty = all); returns the values
    that the text lists, each once, or raises a `ConfigError`."""
    schema: Callable[[int], dict[str, Any]]
    """Returns the JSON Schema of what `check` takes, as JSON has it; called with the largest number."""
    is_text: bool = True
    """Whether columns of it are aligned to the left."""
    metavar: str = "LIST"
    """Name of the value of its flag in the help text."""


def whole(least: int = 1, *, optional: bool = False) -> Kind:
    """Return the type of whole numbers.

    Args:
        optional: whether None is a value, too.
    """

    def check(name: str, value: object) -> None:
        if not (optional and value is None):
            _check_whole(name, value, least)

    def parse(text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        values, most = _numbers(text), max(allowed, default=None)
        if values and min(values) >= least and (most is None or max(values) <= most):
            return tuple(dict.fromkeys(values))
        if len(allowed) == 1:
            raise ConfigError(f"{flag} {text} is not {most}, the only value that can be priced: write {most}")
        upto = f"from {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(
            f"{flag} {text} is not whole numbers {upto} with commas between them: write {least},{least + 1}"
        )

    def schema(most: int) -> dict[str, Any]:
        found = _whole_schema(least, most)
        return {"anyOf": [found, {"type": "null"}]} if optional else found

    return Kind(check, parse, schema, is_text=False)


def switch() -> Kind:
    """Return the type of what is on or off."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise ConfigError(f"strategy: {name} {json.dumps(value)} is not true or false: write one")

    def parse(text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(value == "on" for value in _words(text, flag, ("off", "on")))

    return Kind(check, parse, lambda most: {"type": "boolean"}, is_text=False)


def word() -> Kind:
    """Return the type of names."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, str):
            raise ConfigError(f"strategy: {name} {json.dumps(value)} is not a name: write one")

    return Kind(check, _words, lambda most: {"type": "string"})


def whole_list(least: int) -> Kind:
    """Return the type of lists of whole numbers from `least`, or None; a flag gives one list."""

    def check(name: str, value: object) -> None:
        if value is not None:
            _check_list(name, value, least)

    def parse(text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        values = _numbers(text)
        if not values or min(values) < least:
            raise ConfigError(f"{flag} {text} is not lengths with commas between them: write 704,688,656")
        return values

    def schema(most: int) -> dict[str, Any]:
        return {"anyOf": [_list_schema(least, most), {"type": "null"}]}

    return Kind(check, parse, schema, metavar="LENGTHS")


def word_or_bounds() -> Kind:
    """Return the type of rules for stages: their names, or the bounds of stages; a flag gives names or one list."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, str):
            _check_list(name, value, 0)

    def parse(text: str, flag: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
        return (whole(0).parse(text, flag, ()),) if text[:1].isdigit() else _words(text, flag, allowed)

    def schema(most: int) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, _list_schema(0, most)]}

    return Kind(check, parse, schema)


Placed = tuple[int, str]
"""A place among the dimensions in some view, lowest first, and the words there."""


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A field of a strategy, and all that is done with it in general."""

    name: str = ""
    default: Any = None
    """Value where nothing is said."""
    kind: Kind
    setting: str | None = None
    """Field of the configuration that it sets; None = the one of its name, empty = none."""
    trained: tuple[Any, ...] = ()
    """Values that the trainer supports; empty = all."""
    priced: tuple[Any, ...] = ()
    """Values that the search can price, and flags may ask for; empty = all."""
    found: tuple[str, ...] = ()
    """Words of its flag for values that need an order of ops to be found: priced one by one, and not ranked."""
    tried: tuple[Any, ...] | Tried | None = None
    """Values that the search tries where no flag says otherwise; None = not searched."""
    tried_if_long: tuple[Any, ...] = ()
    """Values that it tries beside those where sequences are long."""
    ranks: bool = False
    """Whether it multiplies the number of ranks."""
    axis: str = ""
    """Axis of `StrategyGrid` that it is on; empty = all strategies of a grid have the same value."""
    flag_help: Placed | None = None
    """Place and help of the search's flag that constrains it; None = no flag."""
    label: Placed | None = None
    """Place and name in comparisons; None = not compared."""
    none: str = "as it comes"
    """The words for None in comparisons."""
    column: Placed | None = None
    """Place and name in tables; None = not shown."""
    usual: str = ""
    """Text of the column that is not worth a column where every row has it; empty = none."""
    dropped: int | None = None
    """Place among the columns that a narrow terminal does without; None = always shown."""
    phrase: Placed | None = None
    """Place and template in a strategy written in one line; None = left out."""
    always: bool = False
    """Whether the phrase also stands there for the default."""
    tie: int
    """Place in the order that decides between strategies of the same cost."""
    tie_key: Callable[[Any], Any] | None = None
    """What orders its values there; None = the values themselves, None and names before lists."""
    most: float = 10**9
    """Largest number; that of the field of the configuration that it sets, where there is one."""

    @property
    def flag(self) -> str:
        """Flag of the search that constrains it."""
        return f"--{self.name.replace('_', '-')}"

    def parse(self, text: str) -> tuple[Any, ...]:
        """Return the values that its flag lists.

        Raises:
            ConfigError: if one is none of this dimension.
        """
        for word in self.found:
            if word in text.replace(" ", "").split(","):
                raise ConfigError(
                    f"{self.flag} {word} is not ranked, because an order of ops has to be found for each strategy: "
                    f"leave {word} out; rank says what it would save for the winner, and predict prices it"
                )
        values = self.kind.parse(text, self.flag, self.priced)
        self._check_most(values, self.flag)
        return values

    def check(self, value: object) -> None:
        """Check that a strategy may have a value.

        Raises:
            ConfigError: if it is not of this type, or too large.
        """
        self.kind.check(self.name, value)
        self._check_most(value, f"strategy: {self.name}")

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the values that `check` takes."""
        default = list(self.default) if isinstance(self.default, tuple) else self.default
        return {**self.kind.schema(int(self.most)), "default": default}

    def _check_most(self, value: object, said: str) -> None:
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and number > self.most:
                raise ConfigError(f"{said} {number} is more than {self.most:,}: give {self.most:,} or less")

    def in_ties(self, value: Any) -> Any:
        """Return what orders its values among strategies that cost the same, smallest first."""
        if self.tie_key is not None:
            return self.tie_key(value)
        return value is not None, isinstance(value, tuple), value

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
    """
    return field(default=default, metadata={"dimension": Dimension(default=default, **facts)})


def dimensions_of(strategy: type[Any]) -> tuple[Dimension, ...]:
    """Return the dimensions that the fields of a dataclass declare, in their order."""
    sections = get_type_hints(Config).values()
    most = {each.name: option_of(each).most for section in sections for each in fields(section)}
    found = []
    for declared in fields(strategy):
        facts = declared.metadata["dimension"]
        setting = declared.name if facts.setting is None else facts.setting
        found.append(replace(facts, name=declared.name, setting=setting, most=most.get(setting) or facts.most))
    return tuple(found)


def in_places(dimensions: Sequence[Dimension], view: str) -> list[tuple[Dimension, str]]:
    """Return the dimensions that a view shows, in its order, each with its words there.

    Args:
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


def _whole_schema(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list_schema(least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": _whole_schema(least, most)}
