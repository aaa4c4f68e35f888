"""Compiled code: how the optimiser's inner loops become fast, and what they share.

numba is imported with this file, and this file by the optimiser alone.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba import njit

from deepspeed_ext.plan.optimise.problem import Numbers, Tables

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

UNKNOWN = 1e300
"""Time of what has not been scheduled yet."""


def kernel(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a function when it is first called, and keep the machine code on disk where there is a folder for it.

    numba compiles anew when the file of a function has changed. Of functions in other files that it calls it does not
    know: whoever edits `hand_over`, `play_rows` or `peak_of_row` should remove `__pycache__` of this package.
    """
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # neither beside the file nor in the user's cache
        return njit(cache=False)(function)


@kernel
def hand_over(tables: Tables, result: int, stage: int, unit: int, end: float, arrival: Numbers) -> int:
    """Bring a result to the stage that reads it, as `simulate.simulate` does; return that stage's rank, or -1.

    Args:
        tables: of the problem; `free` is brought up to date.
        result: 0 an activation, 1 the gradient of one.
        stage: that made it.
        unit: token slice of a micro-batch.
        end: of the op.
        arrival: [2, N, units] when each result is there, by the stage that reads it; written.
    """
    reader = stage + 1 if result == 0 else stage - 1
    if reader < 0 or reader >= len(tables.rank_of):
        return -1
    channel = tables.channel[result, stage]
    if channel >= 0:
        sent = max(end, tables.free[channel]) + tables.sending[result, stage, unit % tables.times.shape[2]]
        tables.free[channel] = sent
        end = sent + tables.latency[result, stage]
    arrival[result, reader, unit] = end
    return int(tables.rank_of[reader])
