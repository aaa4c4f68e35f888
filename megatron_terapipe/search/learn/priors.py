"""Constants that calibration may fit, and how far each may be from its default before any trial was seen."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Constants = TypeVar("Constants", bound=Any)
"""`HardwareEfficiency`, `MemoryOverheads` or `ProfileFactors`."""

# fmt: off
PRIOR_WIDTHS: Mapping[str, float] = MappingProxyType({
    # Of HardwareEfficiency
    "gemm_efficiency": 0.15, "gemm_area": 0.7, "attention_efficiency": 0.4, "fused_attention": 0.2,
    "misaligned_efficiency": 0.5, "memory_efficiency": 0.25, "launch_s": 0.7, "launch_jitter": 0.7,
    "launch_exposed": 1.0, "overlap_exposed": 1.0, "whole_loss_factor": 0.7, "inside_efficiency": 0.2,
    "network_efficiency": 0.7, "transfer_inside_efficiency": 0.5, "transfer_network_efficiency": 0.3,
    "collective_s": 0.7, "optimizer_passes": 0.3, "iteration_s": 1.0, "reductions": 0.25,
    # Of MemoryOverheads
    "framework_bytes": 0.7, "communicator_bytes": 0.7, "state_factor": 0.03, "activation_factor": 0.08,
    "working_factor": 0.5,
    # Of ProfileFactors: guesses. That of ops is wide enough for two ranks on the cores of one, that of messages for
    # collectives that wait for a busy processor.
    "ops": 0.4, "messages": 0.8, "gaps": 0.7, "step": 0.5,
})
# fmt: on
"""Standard deviation of the logarithm of each constant, or of each factor of a row. Others are never fitted."""


def most_of(name: str) -> float:
    """Return the greatest value that a fit may give to a constant: 1 for shares."""
    return 1.0 if name.endswith(("_efficiency", "_exposed")) else inf


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
            for name in _names(each.name, getattr(start, each.name)) if each.name in PRIOR_WIDTHS else ():
                names.append(name)
                widths.append(PRIOR_WIDTHS[each.name])
                most.append(np.log(most_of(name)) - np.log(_value(start, name)))
        return cls(start, tuple(names), np.array(widths), np.array(most))

    def at(self, logs: NDArray[np.float64]) -> Constants:
        """Return the constants for [p] logarithms of constant / start."""
        values = zip(self.names, logs, strict=True)
        return _with_values(self.start, {name: _value(self.start, name) * float(np.exp(log)) for name, log in values})


def moved(constants: Constants, names: Iterable[str], logarithm: float) -> Constants:
    """Return the constants with `logarithm` added to the logarithms of some."""
    return _with_values(constants, {name: _value(constants, name) * float(np.exp(logarithm)) for name in names})


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
