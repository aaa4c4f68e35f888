"""Constants that calibration may move: declared with their default, and with how far from it they may be."""

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
        default: its value before any trial was seen.
        prior_width: standard deviation of its logarithm before any trial was seen; None = it is never fitted.
        most: greatest value that a fit may give it; 1 for shares.
    """
    return field(default=default, metadata={"prior_width": prior_width, "most": most})


@dataclass(frozen=True)
class Prior(Generic[Constants]):
    """Prior distribution of constants, before any trial. Make it with `of`.

    Attributes:
        start: the most probable constants.
        names: the p constants that are fitted.
        widths: [p] standard deviations of their logarithms.
        most: [p] greatest logarithms of constant / start.
    """

    start: Constants
    names: tuple[str, ...]
    widths: NDArray[np.float64]
    most: NDArray[np.float64]

    @classmethod
    def of(cls, start: Constants) -> "Prior[Constants]":
        """Return the prior around constants, as their fields declare it."""
        fitted = [each for each in fields(start) if each.metadata.get("prior_width") is not None]
        most = [np.log(each.metadata["most"]) - np.log(getattr(start, each.name)) for each in fitted]
        widths = np.array([each.metadata["prior_width"] for each in fitted])
        return cls(start, tuple(each.name for each in fitted), widths, np.array(most))

    def at(self, logs: NDArray[np.float64]) -> Constants:
        """Return the constants for [p] logarithms of constant / start."""
        values = zip(self.names, logs, strict=True)
        found: Constants = replace(
            self.start, **{name: getattr(self.start, name) * float(np.exp(log)) for name, log in values}
        )
        return found


def moved(constants: Constants, name: str, logarithm: float) -> Constants:
    """Return constants of which one has another logarithm.

    Args:
        constants: the others.
        name: of the one that moves.
        logarithm: by how much its logarithm grows.
    """
    changed: Constants = replace(constants, **{name: getattr(constants, name) * float(np.exp(logarithm))})
    return changed
