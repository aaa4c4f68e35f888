"""The flags of the trainer, as the fields of the sections of `Config` describe them."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from megatron_terapipe.config import Config
from megatron_terapipe.config.fields.options import Option, choices_of, field_help, option_of

METAVARS = {int: "N", float: "X", str: "NAME"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A flag, as its field describes it."""

    section: str
    """Field of `Config` that holds the section."""

    name: str
    """Field of the section."""

    kind: type[Any]
    """Type of one value: int, float, str or bool."""

    repeated: bool
    """Whether it takes several values."""

    default: object
    """Default of the field; MISSING if the flag is required."""

    choices: tuple[str | int, ...]
    """Values accepted; empty if any of the type."""

    help: str
    """Purpose of the flag."""

    option: Option
    """Other spellings, and what the field cannot say."""

    @property
    def metavar(self) -> str:
        """Name of the value in the help text."""
        if self.choices:
            return "{" + ",".join(map(str, self.choices)) + "}"
        return self.option.metavar or METAVARS.get(self.kind, "")

    @property
    def default_text(self) -> str:
        """Default in words; empty if it needs none."""
        if self.option.derived:
            return self.option.derived
        if self.default is MISSING:
            return "required"
        return "" if self.default is None or self.kind is bool else f"{self.default}"


@cache
def flags() -> tuple[Flag, ...]:
    """Yield all flags, section by section."""
    return tuple(_flags())


def _flags() -> Iterator[Flag]:
    for section, section_class in get_type_hints(Config).items():
        hints, texts = get_type_hints(section_class), field_help(section_class)
        for declared in fields(section_class):
            kind, repeated = _value_type(hints[declared.name])
            yield Flag(
                section=section,
                name=declared.name,
                kind=kind,
                repeated=repeated,
                default=declared.default,
                choices=choices_of(section_class, declared),
                help=texts[declared.name] + _range(option_of(declared)),
                option=option_of(declared),
            )


def _range(declared: Option) -> str:
    """Return the sentence that says which numbers a flag takes; empty if it takes all, or no numbers."""
    bounds = declared.bounds
    return f" {bounds[0].upper()}{bounds[1:]}." if bounds else ""


def title_of(section: str) -> str:
    """First line of the docstring of a section, without its full stop."""
    section_class = get_type_hints(Config)[section]
    return (section_class.__doc__ or "").strip().splitlines()[0].rstrip(".")


def _value_type(hint: Any) -> tuple[type[Any], bool]:
    """Return the type of one value of a field, and whether the field holds several."""
    if isinstance(hint, type):
        return hint, False
    first = get_args(hint)[0]
    if isinstance(first, type):
        return first, get_origin(hint) is tuple
    # A Literal, or the Literal of `Literal | None`.
    return (type(first), False) if not get_args(first) else _value_type(first)
