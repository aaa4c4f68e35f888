"""Compiled code: how the optimiser's inner loops become fast, and what they share.

numba is imported with this file, and this file by the optimiser alone.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
from numba import njit

from deepspeed_ext.plan.optimise.problem import Numbers, Tables

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

UNKNOWN = 1e300
"""Time of what has not been scheduled yet."""


def kernel(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a function when it is first called, and keep the machine code on disk where there is a folder for it.

    numba compiles anew when the file of a function has changed. Of functions in other files that it calls it does not
    know: whoever edits one that another file calls should remove `__pycache__` of this package.
    """
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # neither beside the file nor in the user's cache
        return njit(cache=False)(function)


def _inlined(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a function into its callers: a call would count references to all arrays of its `Tables`."""
    return njit(inline="always")(function)


@kernel
def available_at(reads: Numbers, place: int, token_slice: int, unit: int, ready: Numbers) -> float:
    """Return when all that an op reads is there; at least UNKNOWN if some of it has not been made.

    Args:
        reads: [4 N, S, K] as in `DataFlow`.
        place: kind and stage of the op, as one number.
        ready: [(4 N + 1) x units] when each result is there.
    """
    time = 0.0
    # Unsigned numbers: others might count from the end, and each would be looked at for that.
    row, column = np.uintp(place), np.uintp(token_slice)
    for number in range(reads.shape[2]):
        time = max(time, ready[np.uintp(reads[row, column, np.uintp(number)] + unit)])
    return time


@_inlined
def hand_over(tables: Tables, result: int, stage: int, token_slice: int, unit: int, end: float, ready: Numbers) -> int:
    """Bring a result to the stage that reads it, as `simulate.simulate` does; return that stage's rank, or -1.

    Args:
        tables: of the problem; `free` is brought up to date.
        result: 0 an activation, 1 the gradient of one.
        ready: [(4 N + 1) x units] when each result is there, as in `DataFlow`; written.
    """
    num_stages = len(tables.rank_of)
    num_units = tables.num_micro_batches * tables.times.shape[2]
    ready[(result * num_stages + stage) * num_units + unit] = end
    reader = tables.reader[result, stage]
    if reader < 0:
        return -1
    channel = tables.channel[result, stage]
    if channel >= 0:
        sent = max(end, tables.free[channel]) + tables.sending[result, stage, token_slice]
        tables.free[channel] = sent
        end = sent + tables.latency[result, stage]
    ready[((2 + result) * num_stages + reader) * num_units + unit] = end
    return int(tables.rank_of[reader])
