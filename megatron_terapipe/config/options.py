"""Facts that a field of a section gives to its flag, and the checks that sections share.

A section is a frozen dataclass. The name of a field is its flag, its type is the type of the flag, and the docstring
under it is the help text. `option` adds other facts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Otherwise:
    """Value of a flag without values that counts only where no other flag or file sets the field."""

    value: str


Also = str | int | Otherwise | Mapping[str, str | None] | Callable[[str], object]
"""Value of a flag without values; or its words, each with the value here; or a function that reads its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """Facts about a flag that do not follow from the name, type, default and docstring of its field."""

    derived: str = ""
    """How the default follows from other fields; empty if it does not."""

    choices: tuple[str, ...] = ()
    """Values accepted, where the type cannot list them."""

    metavar: str = ""
    """Name of the value in the help text; empty = by type."""

    aliases: tuple[str, ...] = ()
    """Other spellings of the flag."""

    also: Mapping[str, Also] = field(default_factory=dict)
    """Other flags that set the field."""

    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of its values."""

    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Values that other trainers have and this one does not, and how the line about each ends: another value would
    make another model."""

    least: float | None = None
    """Smallest value; of a flag that takes several, of each."""

    above: float | None = None

    most: float | None = None
    """Largest value, far beyond all models and machines: larger ones are typing errors, and would end in a lack of
    memory or in overflows."""

    below: float | None = None

    needs: tuple[str, ...] = ()
    """Fields of the section without which this one has no effect."""

    excludes: tuple[str, ...] = ()
    """Fields of the section, declared before, that set the same in another way."""

    @property
    def bounds(self) -> str:
        """The bounds in words, such as `1 to 10,000`; empty if there are none."""
        low = "" if self.least is None else _shown(self.least)
        low = low if self.above is None else f"above {_shown(self.above)}"
        if self.most is None:
            low = f"{low} or more" if low and self.above is None else low
            return low if self.below is None else f"{low}, below {_shown(self.below)}"
        if self.above is not None:
            return f"{low}, up to {_shown(self.most)}"
        return f"{low} to {_shown(self.most)}" if low else f"up to {_shown(self.most)}"


def option(default: Any = MISSING, **settings: Any) -> Any:
    """Declare a field whose flag needs more than name, type and default.

    A field with `derived` may be left out; its section then computes it, so readers never meet None. It returns
    `Any`, as `dataclasses.field` does, so that the field keeps the type it is annotated with.

    Args:
        default: default of the field; left out, the flag is required, unless it is derived.
    """
    details = Option(**settings)
    if details.derived and default is MISSING:
        default = None
    return field(default=default, metadata={"option": details})


def option_of(declared: Field[Any]) -> Option:
    """Return the facts that `option` gave to a field."""
    details = declared.metadata.get("option", Option())
    assert isinstance(details, Option)
    return details


@cache
def choices_of(section: Any) -> Mapping[str, tuple[str | int, ...]]:
    """Return the values that each field of a section, a class, accepts; empty if it accepts any of its type."""
    hints, found = get_type_hints(section), {}
    for declared in fields(section):
        hint = hints[declared.name]
        literals = [hint, *get_args(hint)] if get_origin(hint) is not Literal else [hint]
        listed = [value for part in literals if get_origin(part) is Literal for value in get_args(part)]
        found[declared.name] = option_of(declared).choices or tuple(listed)
    return found


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def resolve(section: Any, name: str, value: object) -> None:
    """Give a derived field its value, unless it has one; only for `__post_init__` of a frozen section."""
    if getattr(section, name) is None:
        object.__setattr__(section, name, value)


def check(section: Any) -> None:
    """Check the fields of a section against their declarations: choices, bounds, and the fields that go with each."""
    check_choices(section)
    check_bounds(section)
    given = {
        each.name: (value, option_of(each))
        for each in fields(section)
        if (value := getattr(section, each.name)) is not None and value is not False and value != each.default
    }
    for name, (value, facts) in given.items():
        missing = [flag(other) for other in facts.needs if other not in given]
        if missing:
            words = f"{with_value(name, value)} has no effect without {missing[0]}"
            raise ConfigError(f"{words}: add it, or drop {flag(name)}")
        for other in facts.excludes:
            if other in given:
                both = f"{with_value(other, given[other][0])} and {with_value(name, value)}"
                raise ConfigError(f"{both} exclude each other: drop one of them")


def with_value(name: str, value: object) -> str:
    """Return a flag with its value."""
    words = () if value is True else map(str, value) if isinstance(value, tuple) else (str(value),)
    return " ".join((flag(name), *words))


def check_choices(section: Any) -> None:
    """Check each field of a section against the values that it accepts."""
    by_field = choices_of(type(section))  # type: ignore[arg-type]  # a class is hashable
    for declared in fields(section):
        choices = by_field[declared.name]
        value = getattr(section, declared.name)
        if choices and value is not None and value not in choices:
            ending = option_of(declared).elsewhere.get(value)
            if ending is not None:
                raise ConfigError(f"{flag(declared.name)} {value} is not in this trainer: {ending}")
            raise ConfigError(f"{flag(declared.name)} {value} is not known: choose {one_of(choices)}")


def check_bounds(section: Any) -> None:
    """Check each number of a section, where it is set, against the bounds that its field declares."""
    for declared in fields(section):
        value = getattr(section, declared.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_number(flag(declared.name), number, option_of(declared))


def _check_number(name: str, number: float, bounds: Option) -> None:
    if number != number:
        raise ConfigError(f"{name} {number} is not a number: give one")
    if bounds.most is not None and number > bounds.most:
        raise ConfigError(f"{name} {number} is more than {_shown(bounds.most)}: give {_shown(bounds.most)} or less")
    below = "" if bounds.below is None else f", below {_shown(bounds.below)}"
    if (bounds.least is not None and number < bounds.least) or (bounds.below is not None and number >= bounds.below):
        problem = "is not positive" if bounds.least == 1 else "is out of range"
        raise ConfigError(f"{name} {number} {problem}: give {_shown(bounds.least or 0)} or more{below}")
    if bounds.above is not None and number <= bounds.above:
        raise ConfigError(f"{name} {number} is not positive: give a number above {_shown(bounds.above)}")


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def one_of(values: Sequence[object]) -> str:
    """Return values as words: `gpipe or 1f1b`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
