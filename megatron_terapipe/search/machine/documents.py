"""Input files of the search, read as plain objects; errors name file, field, value and remedy."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.parsing import parse_json, parse_yaml
from megatron_terapipe.errors import ConfigError

YAML_ENDINGS = (".yaml", ".yml")


def read_document(path: str) -> object:
    """Read a JSON or YAML file."""
    return parse_text(read_text(path), path)


def parse_text(text: str, path: str) -> object:
    """Parse the text of a JSON or YAML file, by the ending of its name."""
    if path.lower().endswith(YAML_ENDINGS):
        return parse_yaml(text, path)
    try:
        return parse_json(text, path)
    except ConfigError as error:
        if text.lstrip()[:1] in ("{", "["):
            raise
        raise ConfigError(f"{error}, or give YAML the ending .yaml") from None


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
"""Size of each unit in bytes per second, bytes, FLOP/s and seconds."""

EXAMPLES: Mapping[str, str] = MappingProxyType(
    {"bandwidth": "100 Gbit/s or 25 GB/s", "memory": "80 GiB or 16 GB", "speed": "312 TFLOP/s", "time": "5 us"}
)
"""How a quantity of each kind is written, for errors."""

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]+)\s*")


def parse_quantity(text: str, kind: str) -> float | None:
    """Return a number with a unit in bytes, FLOPs and seconds."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in UNITS[kind]:
        return None
    number = float(match[1]) * UNITS[kind][match[2]]
    return number if math.isfinite(number) else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Remedy for a name that is not known: the name that it resembles, or all known names."""
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
