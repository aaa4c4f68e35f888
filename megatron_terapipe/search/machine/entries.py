"""Objects of input files as pydantic models; an error in a file becomes one line for the user."""

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
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from megatron_terapipe.config.parsing import short
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.documents import suggestion

MOST = 10**15
"""Whole numbers are at most this: more is a typing error, and floats are exact up to it."""

MOST_QUANTITY = 1e24
"""Quantities are at most this, in bytes, seconds and FLOPs, and at least its inverse."""

_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]+)\s*")


def _with_prefixes(prefixes: Mapping[str, float], **units: float) -> dict[str, float]:
    return {f"{prefix}{unit}": factor * scale for unit, scale in units.items() for prefix, factor in prefixes.items()}


@dataclass(frozen=True, eq=False)
class Quantity:
    """Annotation of a field that holds a number with its unit, as text."""

    kind: str
    example: str
    units: Mapping[str, float]
    """Size of each in bytes per second, bytes, FLOP/s or seconds."""
    endings: tuple[str, ...]
    """Units that may end the name of a field which holds a plain number, as `bandwidth_GBps` for `bandwidth`."""

    def __str__(self) -> str:
        return f"a {self.kind}, such as {self.example}"

    def number(self, value: object) -> float:
        """Return the number in bytes, FLOPs and seconds."""
        match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] not in self.units:
            read_as = ", but a number" if isinstance(value, int | float) else ""
            raise ValueError(f"is not a {self.kind} with its unit{read_as}: write it as {self.example}")
        number = float(match[1]) * self.units[match[2]]
        if number <= 0:
            raise ValueError("is not above zero: give more")
        if not 1 / MOST_QUANTITY <= number <= MOST_QUANTITY:
            raise ValueError(f"is not a {self.kind} of any machine: give one, such as {self.example}")
        return number

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.number, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe the text in a file, and not the number in memory."""
        return {"type": "string", "description": f"{self}".capitalize()}


_BANDWIDTHS = _with_prefixes(_PREFIXES, **{"B/s": 1.0, "bit/s": 1 / 8, "b/s": 1 / 8, "Bps": 1.0, "bps": 1 / 8})
_BANDWIDTHS |= _with_prefixes(_BINARY, **{"B/s": 1.0})
_SPEEDS = _with_prefixes(_PREFIXES, **{"FLOP/s": 1.0, "FLOPS": 1.0, "FLOPs": 1.0})
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

Bandwidth = Annotated[float, Quantity("bandwidth", "100 Gbit/s or 25 GB/s", _BANDWIDTHS, ("GBps", "Gbps"))]
Memory = Annotated[
    float, Quantity("memory", "80 GiB or 16 GB", _with_prefixes(_PREFIXES | _BINARY, B=1.0), ("GB", "GiB"))
]
FlopsRate = Annotated[float, Quantity("speed", "312 TFLOP/s", _SPEEDS, ("TFLOPs",))]
Time = Annotated[float, Quantity("time", "5 us", _TIMES, ("us",))]


@dataclass(frozen=True)
class OrText:
    """Annotation of an object that a file may give as the text, or the number, of one of its fields."""

    field: str
    meaning: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._object, handler(source))

    def _object(self, value: object) -> object:
        return {self.field: value} if isinstance(value, str | int | float) else value

    def __get_pydantic_json_schema__(self, read: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string", "description": self.meaning}, handler(read)]}


class ClosedModel(BaseModel):
    """An object of a file: no other fields, no values beside finite numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())


class Entry(ClosedModel):
    """An object of a file that users write. Unknown fields are refused; null is equivalent to an omitted field."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, read: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the fields with a unit in their names to JSON Schemas."""
        found = handler(read)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for name in list(properties):
            for unit in _endings_of(cls, name):
                properties[f"{name}_{unit}"] = {
                    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}],
                    "description": f"{name} in {unit}",
                }
        return found

    @model_validator(mode="before")
    @classmethod
    def _as_declared(cls, given: Any) -> Any:
        """Omit nulls, and rename fields with a unit in their names to the declared names."""
        if not isinstance(given, Mapping):
            return given
        read: dict[Any, Any] = {}
        for name, value in given.items():
            base, _, unit = str(name).rpartition("_")
            if name in cls.model_fields or unit not in _endings_of(cls, base):
                if value is not None or name not in cls.model_fields:
                    read[name] = value
            elif value is not None:
                problem = None
                if not is_number(value) or value <= 0:
                    problem = "is not a number above 0: give one"
                elif given.get(base) is not None or base in read:
                    problem = f"is a second value of {base}: keep one of them"
                if problem is not None:
                    context = {"name": name, "value": value, "problem": problem}
                    raise PydanticCustomError("of_field", "{problem}", context)
                read[base] = f"{value!r} {unit}"
        return read


class WrittenEntry(Entry, strict=False):
    """An object of a file that a program writes: lists are read as tuples, and objects as dataclasses."""


def _quantity_of(kind: type[Entry], name: str) -> Quantity | None:
    field = kind.model_fields.get(name)
    if field is None:
        return None
    parts = (*field.metadata, *(part for each in get_args(field.annotation) for part in get_args(each)))
    return next((part for part in parts if isinstance(part, Quantity)), None)


def _endings_of(kind: type[Entry], name: str) -> tuple[str, ...]:
    quantity = _quantity_of(kind, name)
    return () if quantity is None else quantity.endings


AnyEntry = TypeVar("AnyEntry", bound=Entry)

Text = Annotated[str, Field(pattern=r"\S")]
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[float, Field(gt=0, le=MOST_QUANTITY)]
NotNegative = Annotated[float, Field(ge=0, le=MOST_QUANTITY)]


def fixed(expected: object, remedy: str) -> BeforeValidator:
    """Return a validator that refuses all values but one."""

    def read(value: object) -> object:
        if value != expected:
            raise ValueError(f"is not {expected}: {remedy}")
        return value

    return BeforeValidator(read)


def read_entry(kind: type[AnyEntry], document: object, file: str, path: str = "") -> AnyEntry:
    """Read an object of a file; `path`: way to it inside the file, such as `nodes[2].network`."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # A file of another kind has many wrong fields; the one that names its kind is the most helpful. A misspelt name
        # is an unknown field and a missing one: the unknown one is more helpful.
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
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), ("is not a whole number", "give one")),
    **dict.fromkeys(("float_type", "float_parsing"), ("is not a number", "give one")),
    "finite_number": ("is not a finite number", "give one"),
    **dict.fromkeys(("bool_type", "bool_parsing"), ("is not true or false", "give one of them")),
    "string_type": ("is not a text", "give one"),
    "string_pattern_mismatch": ("is not a text", "give one"),
    "list_type": ("is not a list", "write one in [ ]"),
    "tuple_type": ("is not a list", "write one in [ ]"),
    "dataclass_type": ("is not an object of fields and values", "write one"),
    "unexpected_keyword_argument": ("is not a known field", "leave it out"),
    "too_short": ("is an empty list", "write one entry or more in [ ]"),
    "model_type": ("is not an object of fields and values", "write one"),
    "dict_type": ("is not an object of fields and values", "write one"),
}
"""Kinds of errors of pydantic, as the rule and the remedy."""


def _in_words(kind: type[Entry], error: Any, document: object, file: str, path: str) -> str:
    way, value = error["loc"], error["input"]
    within, name = kind, str(way[-1]) if way else ""
    for step in way[:-1]:
        if step in within.model_fields:
            within = _entry_in(within.model_fields[str(step)].annotation) or within
    where, limits = place(file, path, *way), error.get("ctx", {})
    match error["type"]:
        case "missing" if name in within.model_fields:
            return f"{where} is missing: give {expected(within, name)}"
        case "missing":
            return str(fault(place(file, path, *way[:-1]), value, f"has no number {name}", "add it"))
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
            return f"{place(file, path, *way, limits['name'])} {short(limits['value'])} {limits['problem']}"
        case "value_error":
            return f"{where} {short(value)} {limits['error']}"
        case "model_type" if not way and not path:
            return f"{file} holds {short(document)}, which is not an object of fields and values: write one"
    problem, remedy = _RULES.get(error["type"], (f"is wrong ({error['msg']})", "correct it"))
    return str(fault(where, value, problem, remedy))


def _entry_in(annotation: Any) -> type[Entry] | None:
    if isinstance(annotation, type) and issubclass(annotation, Entry):
        return annotation
    return next((found for each in get_args(annotation) if (found := _entry_in(each))), None)


def expected(kind: type[Entry], name: str) -> str:
    """Return the description of the values of a field."""
    annotation = kind.model_fields[name].annotation
    kinds = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "list": "a list"}
    words = kinds.get(getattr(get_origin(annotation) or annotation, "__name__", ""), "an object")
    return str(_quantity_of(kind, name) or words)


def is_number(value: object) -> bool:
    """Whether a value of a file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
