"""Numbers with units, as files of the search may write them: `"25 Gbit/s"`, `"80 GiB"`, `"312 TFLOP/s"`, `"5 us"`."""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

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
