"""Objects of input files as pydantic models; what is wrong with one becomes one line for the user."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.documents import EXAMPLES, parse_quantity, short, suggestion

MOST = 10**15
"""Whole numbers are at most this; more is a slip of the hand, and no floating-point number counts so far."""

MOST_QUANTITY = 1e24
"""Quantities are at most this, in bytes, seconds and FLOPs, and at least its inverse."""

UNITS_IN_NAMES = {
    "bandwidth": {"GBps": 1e9, "Gbps": 1e9 / 8},
    "memory": {"GB": 1e9, "GiB": 2.0**30},
    "speed": {"TFLOPs": 1e12},
    "time": {"us": 1e-6},
}
"""Endings of fields that hold bare numbers, as `bandwidth_GBps` for `bandwidth`, and what one of that unit is."""


@dataclass(frozen=True)
class Quantity:
    """Marks a field that holds a number with a unit, as text."""

    kind: str

    def __str__(self) -> str:
        return f"a {self.kind}, such as {EXAMPLES[self.kind]}"

    def __get_pydantic_json_schema__(self, read: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Say in JSON Schemas what a file holds: text, whereas the number that it is read to has no unit."""
        return {"type": "string", "description": f"{self}".capitalize()}


@dataclass(frozen=True)
class OrText:
    """Marks an object that text may stand for."""

    meaning: str

    def __get_pydantic_json_schema__(self, read: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "description": self.meaning}, handler(read)]}


class _BareNumber(float):
    """A number that had its unit in the name of its field."""


class Entry(BaseModel):
    """An object of an input file. Fields that it does not declare are refused; null is as if a field were not there."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, read: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Name in JSON Schemas also the fields with a unit in their names."""
        found = handler(read)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for name in list(properties):
            for unit in _units_of(cls, name):
                properties[f"{name}_{unit}"] = {
                    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}],
                    "description": f"{name} in {unit}",
                }
        return found

    @model_validator(mode="before")
    @classmethod
    def _as_declared(cls, given: Any) -> Any:
        """Leave out nulls, and give fields with a unit in their names the names that are declared."""
        if not isinstance(given, Mapping):
            return given
        read: dict[Any, Any] = {}
        for name, value in given.items():
            base, _, unit = str(name).rpartition("_")
            scale = _units_of(cls, base).get(unit)
            if scale is None or name in cls.model_fields:
                if value is not None or name not in cls.model_fields:
                    read[name] = value
            elif value is not None:
                says = None
                if not is_number(value) or value <= 0:
                    says = "is not a number above 0: give one"
                elif given.get(base) is not None or base in read:
                    says = f"says again what {base} says: keep one of them"
                if says is not None:
                    raise PydanticCustomError("of_field", "{says}", {"name": name, "value": value, "says": says})
                read[base] = _BareNumber(value * scale)
        return read


def _quantity_of(kind: type[Entry], name: str) -> Quantity | None:
    field = kind.model_fields.get(name)
    if field is None:
        return None
    parts = (*field.metadata, *(part for each in get_args(field.annotation) for part in get_args(each)))
    return next((part for part in parts if isinstance(part, Quantity)), None)


def _units_of(kind: type[Entry], name: str) -> Mapping[str, float]:
    quantity = _quantity_of(kind, name)
    return {} if quantity is None else UNITS_IN_NAMES[quantity.kind]


AnyEntry = TypeVar("AnyEntry", bound=Entry)

Text = Annotated[str, Field(pattern=r"\S")]
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[float, Field(gt=0, le=MOST_QUANTITY)]
NotNegative = Annotated[float, Field(ge=0, le=MOST_QUANTITY)]


def quantity(kind: str) -> BeforeValidator:
    """Return what reads a number with a unit from text; `kind` is one of `UNITS`."""

    def read(value: object) -> float:
        number = parse_quantity(value, kind) if isinstance(value, str) else None
        if isinstance(value, _BareNumber):
            number = float(value)
        if number is None:
            raise ValueError(f"is not a {kind} with its unit: write it as {EXAMPLES[kind]}")
        if number <= 0:
            raise ValueError("is not above zero: give more")
        if not 1 / MOST_QUANTITY <= number <= MOST_QUANTITY:
            raise ValueError(f"is no {kind} of any machine: give one, such as {EXAMPLES[kind]}")
        return number

    return BeforeValidator(read)


def fixed(wanted: object, remedy: str) -> BeforeValidator:
    """Return what refuses any value but one."""

    def read(value: object) -> object:
        if value != wanted:
            raise ValueError(f"is not {wanted}: {remedy}")
        return value

    return BeforeValidator(read)


Bandwidth = Annotated[float, quantity("bandwidth"), Quantity("bandwidth")]
Memory = Annotated[float, quantity("memory"), Quantity("memory")]
Speed = Annotated[float, quantity("speed"), Quantity("speed")]
Time = Annotated[float, quantity("time"), Quantity("time")]


def read_entry(kind: type[AnyEntry], document: object, file: str, path: str = "") -> AnyEntry:
    """Read an object of a file.

    Args:
        path: way to the object inside the file, such as `nodes[2].network`; empty for the whole file.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # A file of another kind has many wrong fields, and the one that names its kind says most. A name with a slip is
        # a field too many and one too few: the first says more.
        first = min(found, key=lambda each: (each["loc"] != ("format",), each["type"] != "extra_forbidden"))
        raise ConfigError(_in_words(kind, first, document, file, path)) from None


def place(file: str, *path: str | int) -> str:
    """Place of a field for errors: the file, and the names and numbers on the way to the field."""
    way = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path if step != "")
    return f"{file}: {way.lstrip('.')}".rstrip(": ")


def fault(where: str, value: object, problem: str, remedy: str) -> ConfigError:
    """Return the error of a field."""
    return ConfigError(f"{where} {short(value)} {problem}: {remedy}")


_RULES = {
    "int_type": ("is not a whole number", "give one"),
    "float_type": ("is not a number", "give one"),
    "finite_number": ("is not a finite number", "give one"),
    "bool_type": ("is not true or false", "give one of them"),
    "string_type": ("is not a text", "give one"),
    "string_pattern_mismatch": ("is not a text", "give one"),
    "list_type": ("is not a list", "write one in [ ]"),
    "tuple_type": ("is not a list", "write one in [ ]"),
    "too_short": ("is an empty list", "write one entry or more in [ ]"),
    "model_type": ("is not an object of fields and values", "write one"),
    "dict_type": ("is not an object of fields and values", "write one"),
}
"""Kinds of errors of pydantic, as the rule and the remedy."""


def _in_words(kind: type[Entry], error: Any, document: object, file: str, path: str) -> str:
    way, value = error["loc"], error["input"]
    within, name = _entry_at(kind, way[:-1]), str(way[-1]) if way else ""
    where, limits = place(file, path, *way), error.get("ctx", {})
    match error["type"]:
        case "missing":
            return f"{where} is missing: give {wanted(within, name)}"
        case "extra_forbidden":
            return str(fault(where, value, "is not a known field", suggestion(name, sorted(within.model_fields))))
        case "invalid_key":
            at = place(file, path, *way[:-1])
            return f"{at} has {short(way[-1])} for the name of a field: write a name, as text"
        case "literal_error":
            choices = re.findall(r"'([^']*)'", limits["expected"])
            return str(fault(where, value, "is not known", suggestion(str(value), choices)))
        case "greater_than":
            return str(fault(where, value, f"is not a number above {limits['gt']:g}", "give one"))
        case "greater_than_equal":
            number = "whole number" if isinstance(limits["ge"], int) else "number"
            return str(fault(where, value, f"is not a {number} from {limits['ge']:g}", "give one"))
        case "less_than_equal":
            return str(fault(where, value, f"is more than {limits['le']:,}", "give less"))
        case "of_field":
            return f"{place(file, path, *way, limits['name'])} {short(limits['value'])} {limits['says']}"
        case "value_error":
            return f"{where} {short(value)} {limits['error']}"
        case "model_type" if not way and not path:
            return f"{file} holds {short(document)}, which is not an object of fields and values: write one"
    problem, remedy = _RULES.get(error["type"], (f"is wrong ({error['msg']})", "correct it"))
    return str(fault(where, value, problem, remedy))


def _entry_at(kind: type[Entry], way: tuple[str | int, ...]) -> type[Entry]:
    """The entry that a way through fields, lists and objects leads to."""
    for step in way:
        if step in kind.model_fields:
            kind = _entry_in(kind.model_fields[str(step)].annotation) or kind
    return kind


def _entry_in(annotation: Any) -> type[Entry] | None:
    if isinstance(annotation, type) and issubclass(annotation, Entry):
        return annotation
    return next((found for each in get_args(annotation) if (found := _entry_in(each))), None)


def wanted(kind: type[Entry], name: str) -> str:
    """Return in words what a field holds."""
    annotation = kind.model_fields[name].annotation
    kinds = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "list": "a list"}
    words = kinds.get(getattr(get_origin(annotation) or annotation, "__name__", ""), "an object")
    return str(_quantity_of(kind, name) or words)


def is_number(value: object) -> bool:
    """Whether a value of a file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
