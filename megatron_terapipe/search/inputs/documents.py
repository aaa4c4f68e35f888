"""Input files of the search, read as plain objects; errors name file, field, value and remedy."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.json_files import parse_json
from megatron_terapipe.errors import ConfigError

YAML_ENDINGS = (".yaml", ".yml")


def read_document(path: str) -> object:
    """Read a JSON or YAML file.

    Raises:
        UserError: if it cannot be read, or is not what its name says.
    """
    return parse_text(read_text(path), path)


def parse_text(text: str, path: str) -> object:
    """Parse the text of a JSON or YAML file, by the ending of its name."""
    return parse_yaml(text, path) if path.lower().endswith(YAML_ENDINGS) else parse_json(text, path)


def parse_yaml(text: str, path: str) -> object:
    """Parse YAML.

    Raises:
        ConfigError: if it is not YAML, or has a key twice.
    """
    import yaml

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML keeps the last of two equal keys and says nothing."""

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        pairs = [(loader.construct_object(key, deep=True), value) for key, value in node.value]
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=node.start_mark)
        return {key: loader.construct_object(value, deep=True) for key, value in pairs}

    UniqueKeys.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        return yaml.load(text, Loader=UniqueKeys)
    except (yaml.YAMLError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{path} is not YAML ({problem}{line}): mend it") from None


_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _with_prefixes(*units: tuple[str, float], prefixes: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{unit}": factor * scale for unit, scale in units for prefix, factor in prefixes.items()}


UNITS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "bandwidth": _with_prefixes(
            *(("B/s", 1.0), ("bit/s", 1 / 8), ("b/s", 1 / 8), ("Bps", 1.0), ("bps", 1 / 8)), prefixes=_PREFIXES
        )
        | _with_prefixes(("B/s", 1.0), prefixes=_BINARY),
        "memory": _with_prefixes(("B", 1.0), prefixes=_PREFIXES | _BINARY),
        "speed": _with_prefixes(("FLOP/s", 1.0), ("FLOPS", 1.0), ("FLOPs", 1.0), prefixes=_PREFIXES),
        "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    }
)
"""What one of each unit is in bytes per second, bytes, FLOP/s and seconds."""

EXAMPLES: Mapping[str, str] = MappingProxyType(
    {"bandwidth": "100 Gbit/s or 25 GB/s", "memory": "80 GiB or 16 GB", "speed": "312 TFLOP/s", "time": "5 us"}
)
"""How a quantity of each kind is written, for errors."""

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]+)\s*")


def parse_quantity(text: str, kind: str) -> float | None:
    """Return a number with a unit in bytes, FLOPs and seconds.

    Args:
        text: such as `25 Gbit/s`. A small b is a bit, a capital B a byte.
        kind: `bandwidth`, `memory`, `speed` or `time`.

    Returns:
        The number; None if the text is not such a quantity.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in UNITS[kind]:
        return None
    number = float(match[1]) * UNITS[kind][match[2]]
    return number if math.isfinite(number) else None


class Required:
    """Stands where a field has no default."""


REQUIRED = Required()

MOST = 10**15
"""Whole numbers are at most this; more is a slip of the hand, and no floating-point number counts so far."""


class Fields:
    """One JSON or YAML object and where it stands.

    Every field that is asked for is known; `finish` refuses the others.

    Args:
        document: what was read; must be an object.
        file: the file, or what else it came from.
        path: way to the object inside the file, such as `nodes[2].network`; empty for the whole file.

    Raises:
        ConfigError: if the document is not an object.
    """

    def __init__(self, document: object, file: str, path: str = "") -> None:
        self.file = file
        self.path = path
        if not isinstance(document, Mapping):
            what = f"{file}: {path} {short(document)}" if path else f"{file} holds {short(document)}, which"
            raise ConfigError(f"{what} is not an object of fields and values: write one")
        for name in document:
            if not isinstance(name, str):  # YAML reads `8: x` so
                where = f"{file}: {path}".rstrip(": ")
                raise ConfigError(f"{where} has {short(name)} for the name of a field: write a name, as text")
        self.values: Mapping[str, Any] = document
        self.asked: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether a field is there and is not null."""
        self.asked.add(name)
        return self.values.get(name) is not None

    def raw(self, name: str) -> Any:
        """A field as it was read; None where it is not."""
        self.asked.add(name)
        return self.values.get(name)

    def place(self, name: str) -> str:
        """Where a field stands, for errors."""
        return f"{self.file}: {self.path}{'.' if self.path else ''}{name}"

    def fault(self, name: str, problem: str, remedy: str) -> ConfigError:
        """The error of a field: what is wrong with its value, and what to do."""
        return ConfigError(f"{self.place(name)} {short(self.values.get(name))} {problem}: {remedy}")

    def number(
        self, name: str, default: float | Required = REQUIRED, *, least: float = 0.0, above: bool = True
    ) -> float:
        """A number that is more than `least`, or at least that where `above` is false."""
        if not self.has(name):
            return float(self._default(name, default, "a number"))
        value = self.values[name]
        fits = _is_number(value) and (value > least if above else value >= least)
        if not fits:
            rule = f"above {least:g}" if above else f"from {least:g}"
            raise self.fault(name, f"is not a number {rule}", "give one")
        return float(value)

    def whole(self, name: str, default: int | Required = REQUIRED, *, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`."""
        if not self.has(name):
            return int(self._default(name, default, "a whole number"))
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fault(name, f"is not a whole number from {least}", "give one")
        if value > most:
            raise self.fault(name, f"is more than {most:,}", "give less")
        return value

    def text(self, name: str, default: str | Required = REQUIRED) -> str:
        """A text that is not empty."""
        if not self.has(name):
            return str(self._default(name, default, "a text"))
        value = self.values[name]
        if not isinstance(value, str) or not value.strip():
            raise self.fault(name, "is not a text", "give one")
        return value

    def flag(self, name: str, default: bool | Required = REQUIRED) -> bool:
        """True or false."""
        if not self.has(name):
            return bool(self._default(name, default, "true or false"))
        value = self.values[name]
        if not isinstance(value, bool):
            raise self.fault(name, "is not true or false", "give one of them")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | Required = REQUIRED) -> str:
        """One of several words."""
        value = self.text(name, default)
        if value not in choices:
            raise self.fault(name, "is not known", suggestion(value, choices))
        return value

    def quantity(
        self,
        name: str,
        kind: str,
        default: float | Required = REQUIRED,
        *,
        units: Mapping[str, float] | None = None,
        least: float = 0.0,
    ) -> float:
        """A number with a unit, as text; or a bare number in a field whose name ends in the unit.

        Args:
            name: the field, such as `bandwidth`.
            kind: `bandwidth`, `memory`, `speed` or `time`.
            default: what it is where no field says.
            units: endings of fields and what one of that unit is, such as `{"GBps": 1e9}` for `bandwidth_GBps`.
            least: it must be more, or as much where this is not zero.
        """
        spellings = {name: None} | {f"{name}_{unit}": scale for unit, scale in (units or {}).items()}
        given = [spelling for spelling in spellings if self.has(spelling)]
        if len(given) > 1:
            raise self.fault(given[1], f"says again what {given[0]} says", "keep one of them")
        if not given:
            return float(self._default(name, default, f"a {kind}, such as {EXAMPLES[kind]}"))
        (spelling,) = given
        scale, value = spellings[spelling], self.values[spelling]
        if scale is not None:
            return self.number(spelling, least=least) * scale
        number = parse_quantity(value, kind) if isinstance(value, str) else None
        if number is None:
            bare = ", or a number as " + " or ".join(f"{name}_{unit}" for unit in units) if units else ""
            raise self.fault(name, f"is not a {kind} with its unit", f"write it as {EXAMPLES[kind]}{bare}")
        if number <= least:
            raise self.fault(name, "is not above zero", "give more")
        return number

    def section(self, name: str) -> "Fields":
        """An object within this one."""
        if not self.has(name):
            self._default(name, REQUIRED, "an object")
        return Fields(self.values[name], self.file, f"{self.path}{'.' if self.path else ''}{name}")

    def sections(self, name: str) -> "list[Fields]":
        """A list of objects, one at least."""
        if not self.has(name):
            self._default(name, REQUIRED, "a list")
        value = self.values[name]
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise self.fault(name, "is not a list of objects", "write one object or more in [ ]")
        at = f"{self.path}{'.' if self.path else ''}{name}"
        return [Fields(each, self.file, f"{at}[{index}]") for index, each in enumerate(value)]

    def finish(self) -> None:
        """Refuse the fields that nobody asked for.

        Raises:
            ConfigError: naming the first of them, and the field that it resembles.
        """
        for name in self.values:
            if name not in self.asked:
                raise self.fault(str(name), "is not a known field", suggestion(str(name), sorted(self.asked)))

    def _default(self, name: str, default: Any, wanted: str) -> Any:
        if not isinstance(default, Required):
            return default
        if self.values.get(name, 0) is None:
            raise self.fault(name, "stands for nothing", f"give {wanted}")
        raise ConfigError(f"{self.place(name)} is missing: give {wanted}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The remedy for a name that is not known: the one it resembles, or all of them."""
    names = list(known)
    lowered = {each.lower(): each for each in names}
    nearest = get_close_matches(name.lower(), lowered, n=1)
    return f"did you mean {lowered[nearest[0]]}?" if nearest else f"choose among {', '.join(names)}"


def short(value: object) -> str:
    """A value in an error: its JSON, cut where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
