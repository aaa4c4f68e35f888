"""Constants that calibration may move: declared with their default, and with how far from it they may be."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Constants = TypeVar("Constants", bound=Any)
"""A dataclass whose fields are constants."""


def constant(default: float, prior_width: float | None = None, *, most: float = inf) -> Any:
    """Declare a constant as a field of a dataclass.

    Args:
        prior_width: standard deviation of its logarithm before any trial was seen; None = it is never fitted.
        most: greatest value that a fit may give it; 1 for shares.
    """
    return field(default=default, metadata={"prior_width": prior_width, "most": most})


def factors(number: int, prior_width: float) -> Any:
    """Declare a row of factors, each 1 by default, as one field: constants called `name[0]`, `name[1]`, ...

    Args:
        prior_width: standard deviation of the logarithm of each before any trial was seen.
    """
    return field(default=(1.0,) * number, metadata={"prior_width": prior_width, "most": inf})


def _names(name: str, value: float | tuple[float, ...]) -> Iterable[str]:
    return [f"{name}[{index}]" for index in range(len(value))] if isinstance(value, tuple) else [name]


def _value(constants: Any, name: str) -> float:
    field_name, bracket, index = name.partition("[")
    value = getattr(constants, field_name)
    return float(value[int(index[:-1])] if bracket else value)


def _with_values(constants: Constants, values: Mapping[str, float]) -> Constants:
    changes: dict[str, Any] = {}
    for name, value in values.items():
        field_name, bracket, index = name.partition("[")
        if not bracket:
            changes[field_name] = value
            continue
        row = changes.setdefault(field_name, list(getattr(constants, field_name)))
        row[int(index[:-1])] = value
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    found: Constants = replace(constants, **frozen)
    return found


@dataclass(frozen=True)
class Prior(Generic[Constants]):
    """Prior distribution of constants, before any trial. Make it with `of`."""

    start: Constants
    """The most probable constants."""
    names: tuple[str, ...]
    """The p constants that are fitted."""
    widths: NDArray[np.float64]
    """[p] standard deviations of their logarithms."""
    most: NDArray[np.float64]
    """[p] greatest logarithms of constant / start."""

    @classmethod
    def of(cls, start: Constants) -> "Prior[Constants]":
        """Return the prior around constants, as their fields declare it."""
        names, widths, most = [], [], []
        for each in fields(start):
            width = each.metadata.get("prior_width")
            if width is None:
                continue
            for name in _names(each.name, getattr(start, each.name)):
                names.append(name)
                widths.append(width)
                most.append(np.log(each.metadata["most"]) - np.log(_value(start, name)))
        return cls(start, tuple(names), np.array(widths), np.array(most))

    def at(self, logs: NDArray[np.float64]) -> Constants:
        """Return the constants for [p] logarithms of constant / start."""
        values = zip(self.names, logs, strict=True)
        return _with_values(self.start, {name: _value(self.start, name) * float(np.exp(log)) for name, log in values})

    def only(self, which: NDArray[np.bool_]) -> "Prior[Constants]":
        """Return the prior of some of the constants; the others stay as they are.

        Args:
            which: [p] whether a constant is fitted.
        """
        names = tuple(name for name, chosen in zip(self.names, which, strict=True) if chosen)
        return replace(self, names=names, widths=self.widths[which], most=self.most[which])


def is_factor(name: str) -> bool:
    """Whether a constant is one of a row of factors."""
    return name.endswith("]")


def moved(constants: Constants, names: Iterable[str], logarithm: float) -> Constants:
    """Return constants of which some have other logarithms.

    Args:
        logarithm: by how much the logarithm of each grows.
    """
    return _with_values(constants, {name: _value(constants, name) * float(np.exp(logarithm)) for name in names})
