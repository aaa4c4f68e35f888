"""Constants as calibration fits them: how far each may be from its default before any trial was seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Constants = TypeVar("Constants", bound=Any)
"""`HardwareEfficiency`, `MemoryOverheads` or `ProfileFactors`."""


def most_of(name: str) -> float:
    """Return the greatest value that a fit may give to a constant: 1 for shares."""
    return 1.0 if name.endswith(("_efficiency", "_exposed")) else inf


def _named(constants: Any, name: str) -> dict[str, float]:
    """Return the constant of a field by its name, or the numbers of a row as `name[index]`."""
    value = getattr(constants, name)
    return {f"{name}[{index}]": one for index, one in enumerate(value)} if isinstance(value, tuple) else {name: value}


@dataclass(frozen=True)
class Prior(Generic[Constants]):
    """Prior distribution of constants, before any trial. Make it with `of`."""

    start: Constants
    names: tuple[str, ...]
    widths: NDArray[np.float64]
    """[p] standard deviations of their logarithms."""
    most: NDArray[np.float64]
    """[p] greatest logarithms of constant / start."""

    @classmethod
    def of(cls, start: Constants) -> "Prior[Constants]":
        """Return the prior around constants."""
        names, widths, most = [], [], []
        for each in fields(start):
            for name, value in _named(start, each.name).items() if "width" in each.metadata else ():
                names.append(name)
                widths.append(each.metadata["width"])
                most.append(np.log(most_of(name)) - np.log(value))
        return cls(start, tuple(names), np.array(widths), np.array(most))

    def at(self, logs: NDArray[np.float64]) -> Constants:
        """Return the constants for [p] logarithms of constant / start."""
        return moved(self.start, dict(zip(self.names, logs.tolist(), strict=True)))


def moved(constants: Constants, logarithms: Mapping[str, float]) -> Constants:
    """Return the constants with a number added to the logarithms of some, by their names."""
    changes: dict[str, Any] = {}
    for each in fields(constants):
        named = _named(constants, each.name)
        values = [value * float(np.exp(logarithms.get(name, 0.0))) for name, value in named.items()]
        changes[each.name] = tuple(values) if isinstance(getattr(constants, each.name), tuple) else values[0]
    found: Constants = replace(constants, **changes)
    return found


def side_by_side(constants: Sequence[Constants]) -> Constants:
    """Return m sets of constants as one set of arrays [m]; those that are equal in all stay numbers."""
    first, found = constants[0], {}
    for each in fields(first):
        values = [getattr(one, each.name) for one in constants]
        if any(value != values[0] for value in values):
            columns = np.array(values).T
            found[each.name] = tuple(columns) if columns.ndim > 1 else columns
    joined: Constants = replace(first, **found)
    return joined
