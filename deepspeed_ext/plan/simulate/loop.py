"""The loop of the fast simulator, over `arrays`. numba is imported with this file."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
from numba import njit

from deepspeed_ext.plan.simulate.arrays import DataFlow, Numbers, Tables, compiled
from deepspeed_ext.plan.simulate.host_copies import DROPPED, CopyEvents

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

UNKNOWN = 1e300
"""Time of results that have not been scheduled yet."""


def inlined(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a function into its callers: a call would count references to all arrays of its `Tables`."""
    return njit(inline="always")(function)


@compiled
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


@inlined
def hand_over(tables: Tables, result: int, stage: int, token_slice: int, unit: int, end: float, ready: Numbers) -> int:
    """Bring a result to the stage that reads it, as `simulate.simulate` does; return that stage's rank, or -1.

    Args:
        tables: of the problem; `free` is brought up to date.
        result: 0 an activation, 1 the gradient of one.
        ready: [(4 N + 1) x units] when each result is there, as in `DataFlow`; written.
    """
    num_stages = len(tables.ways.rank_of)
    num_units = tables.num_micro_batches * tables.times.shape[2]
    ready[(result * num_stages + stage) * num_units + unit] = end
    reader = tables.ways.reader[result, stage]
    if reader < 0:
        return -1
    channel = tables.ways.channel[result, stage]
    if channel >= 0:
        sent = max(end, tables.free[channel]) + tables.sending[result, stage, token_slice]
        tables.free[channel] = sent
        end = sent + tables.latency[result, stage]
    ready[((2 + result) * num_stages + reader) * num_units + unit] = end
    return int(tables.ways.rank_of[reader])


@inlined
def _post(copies: CopyEvents, op: int, lane: int, time: float, free: Numbers, copied: Numbers) -> float:
    """Post the host copies with a place after an op, and return when its rank continues: a drop waits for its copy."""
    num_copies = len(copies.copying) // 2
    for place in range(copies.posts[op], copies.posts[op + 1]):
        copy, event = copies.posted[place] // 3, copies.posted[place] % 3
        if event == DROPPED:
            time = max(time, copied[copy] + copies.copying[copy])
            copied[2 * num_copies + copy] = time
        else:
            begins = max(time, free[lane + event])
            copied[event * num_copies + copy] = begins
            free[lane + event] = begins + copies.copying[event * num_copies + copy]
    return time


@compiled
def replay(
    tables: Tables,
    flow: DataFlow,
    rows: Numbers,
    lengths: Numbers,
    starts: Numbers,
    ends: Numbers,
    ready: Numbers,
    copies: CopyEvents,
    copied: Numbers,
) -> float:
    """Simulate orders; a rank that must wait is listed again by the result that it waits for.

    Args:
        rows: [P, longest] ops of each rank.
        lengths: [P] how many.
        starts: [P, longest] becomes the start of each op.
        ends: [P, longest] becomes its end.
        ready: [(4 N + 1) x units] becomes the time at which each result is there, as in `DataFlow`.
        copied: [3 * C] becomes the start of each copy to the host, then of those from it, then when each was dropped.

    Returns:
        Makespan; UNKNOWN if ranks wait for each other.
    """
    num_ranks = len(rows)
    num_stages, num_token_slices = tables.times.shape[1:]
    num_units = tables.num_micro_batches * num_token_slices
    reads, gives = flow.reads, flow.gives
    ready[:-num_units] = UNKNOWN
    ready[-num_units:] = 0.0
    tables.free[:] = 0.0
    clock = np.zeros(num_ranks)
    positions = np.zeros(num_ranks, np.int64)
    num_copies = len(copies.copying) // 2
    lanes = np.zeros(2 * num_ranks if num_copies else 0)
    # Ranks that may be able to continue.
    runnable = np.arange(num_ranks)[::-1].copy()
    is_listed = np.ones(num_ranks, np.bool_)
    num_runnable = num_ranks
    num_played = 0
    while num_runnable > 0:
        num_runnable -= 1
        rank = runnable[num_runnable]
        is_listed[rank] = False
        while positions[rank] < lengths[rank]:
            op = rows[rank, positions[rank]]
            place = op // num_units
            unit = op - place * num_units
            kind = place // num_stages
            stage = place - kind * num_stages
            token_slice = unit % num_token_slices
            start = max(clock[rank], available_at(reads, place, token_slice, unit, ready))
            if start >= UNKNOWN:
                break
            if num_copies:
                copy = copies.back[rank * rows.shape[1] + positions[rank]]
                if copy >= 0:
                    start = max(start, copied[num_copies + copy] + copies.copying[num_copies + copy])
            if kind == 3:
                end = start + (tables.times[2, stage, token_slice] + tables.times[1, stage, token_slice])
            else:
                end = start + tables.times[kind, stage, token_slice]
            starts[rank, positions[rank]] = start
            ends[rank, positions[rank]] = end
            clock[rank] = end
            if num_copies:
                clock[rank] = _post(copies, rank * rows.shape[1] + positions[rank], 2 * rank, end, lanes, copied)
            positions[rank] += 1
            num_played += 1
            result = gives[kind]
            if result >= 0:
                reader = hand_over(tables, result, stage, token_slice, unit, end, ready)
                if reader >= 0 and not is_listed[reader]:
                    is_listed[reader] = True
                    runnable[num_runnable] = reader
                    num_runnable += 1
    return clock.max() if num_played == lengths.sum() else UNKNOWN
