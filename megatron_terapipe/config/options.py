"""Facts that a field of a section gives to its flag, and the checks that sections share.

A section is a frozen dataclass. The name of a field is its flag, its type is the type of the flag, and the docstring
under it is the help text. `option` adds the little that these cannot say.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """Facts about a flag that the name, type, default and docstring of its field do not say."""

    derived: str = ""
    """How the default follows from other fields; empty if it does not."""

    choices: tuple[str, ...] = ()
    """Values accepted, where the type cannot list them."""

    metavar: str = ""
    """Name of the value in the help text; empty = by type."""

    aliases: tuple[str, ...] = ()
    """Other spellings of the flag."""

    shorthands: Mapping[str, str] = field(default_factory=dict)
    """Flags without a value, and the value of this field that each stands for."""

    fallbacks: Mapping[str, str] = field(default_factory=dict)
    """Flags without a value, and the value that each stands for where nothing else says otherwise."""

    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of its values."""

    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Values that other trainers have and this one does not, and how the line about each ends: choosing another value
    would make another model."""

    translations: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """Flags of other projects with words of their own, and what each word means here."""

    conversions: Mapping[str, Callable[[str], object]] = field(default_factory=dict)
    """Flags of other projects with values of another form, and the function that reads them."""


def option(default: Any = MISSING, **settings: Any) -> Any:
    """Declare a field whose flag needs more than name, type and default.

    A field with `derived` may be left out; its section then computes it, so readers never meet None. It returns
    `Any`, as `dataclasses.field` does, so that the field keeps the type it is annotated with.

    Args:
        default: default of the field; left out, the flag is required, unless it is derived.
        settings: fields of `Option`.
    """
    details = Option(**settings)
    if details.derived and default is MISSING:
        default = None
    return field(default=default, metadata={"option": details})


def option_of(declared: Field[Any]) -> Option:
    """Return what `option` said of a field."""
    details = declared.metadata.get("option", Option())
    assert isinstance(details, Option)
    return details


def choices_of(section: type[Any], declared: Field[Any]) -> tuple[str | int, ...]:
    """Return the values that a field accepts; empty if it accepts any value of its type.

    Args:
        section: class of the section.
        declared: the field.
    """
    return _choices(get_type_hints(section)[declared.name], declared)


def _choices(hint: Any, declared: Field[Any]) -> tuple[str | int, ...]:
    """Return the values that a field accepts. Its type is given, because resolving the types of a section is slow."""
    literals = [hint, *get_args(hint)] if get_origin(hint) is not Literal else [hint]
    listed = [value for part in literals if get_origin(part) is Literal for value in get_args(part)]
    return option_of(declared).choices or tuple(listed)


def field_help(section: type[Any]) -> dict[str, str]:
    """Return the docstring under each field of a section, as one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        statement.target.id: " ".join(following.value.value.split())
        for statement, following in pairwise(definition.body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
    }


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def resolve(section: Any, name: str, value: object) -> None:
    """Give a derived field its value, unless it has one; only for `__post_init__` of a frozen section.

    Args:
        section: the section.
        name: name of the field.
        value: value of the field where none is set.
    """
    if getattr(section, name) is None:
        object.__setattr__(section, name, value)


def check_choices(section: Any) -> None:
    """Check each field of a section against the values that it accepts.

    Raises:
        ConfigError: if a value is not among them.
    """
    hints = get_type_hints(type(section))
    for declared in fields(section):
        choices = _choices(hints[declared.name], declared)
        value = getattr(section, declared.name)
        if choices and value is not None and value not in choices:
            ending = option_of(declared).elsewhere.get(value)
            if ending is not None:
                raise ConfigError(f"{flag(declared.name)} {value} is not in this trainer: {ending}")
            raise ConfigError(f"{flag(declared.name)} {value} is not known: choose {one_of(choices)}")


def check_positive(section: Any, *names: str) -> None:
    """Check that fields, where set, are above zero and finite.

    Args:
        section: the section.
        *names: names of the fields.

    Raises:
        ConfigError: if one is not.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and not 0 < value < float("inf"):
            least = "1 or more" if isinstance(value, int) else "a number above 0"
            raise ConfigError(f"{flag(name)} {value} is not positive: give {least}")


def check_not_negative(section: Any, *names: str) -> None:
    """Check that fields, where set, are zero or above and finite.

    Args:
        section: the section.
        *names: names of the fields.

    Raises:
        ConfigError: if one is not.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{flag(name)} {value} is out of range: give 0 or more")


def one_of(values: Sequence[object]) -> str:
    """Return values as words: `gpipe or 1f1b`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
