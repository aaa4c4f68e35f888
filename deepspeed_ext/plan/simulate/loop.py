"""The loop of the fast simulator, written so that numba can compile it; it runs without numba too.

It knows nothing of stages or micro-batches: ops are numbers in the order in which ranks run them, results are numbers,
and a result that travels is another number where it arrives. `compiled.py` makes these numbers.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

Array = Any
"""A numpy array, or a list where numba is missing. This file imports neither at its top, so that it loads at once."""

NOTHING = -1


def simulate_ops(
    bounds: Array,
    needs: Array,
    gives: Array,
    arrives: Array,
    targets: Array,
    channels: Array,
    durations: Array,
    sending: Array,
    latency: Array,
    ready: Array,
    free: Array,
    starts: Array,
    ends: Array,
) -> int:
    """Simulate all ops of all ranks; a rank that cannot go on is left until what it waits for is there.

    Args:
        bounds: [R + 1] where the ops of each rank begin, and at last where they end; of N ops in total.
        needs: [K * N] numbers of the results that op n waits for at K * n .. K * n + K; NOTHING fills up.
        gives: [N] number of the op's result on its own rank.
        arrives: [N] number of the result on the rank it is sent to; NOTHING if it stays.
        targets: [N] that rank.
        channels: [N] channel that it takes.
        durations: [N] time of the op.
        sending: [N] time for which its message keeps the channel busy.
        latency: [N] time from then until it is there.
        ready: [results] filled with -1; becomes the time at which each result is there.
        free: [channels] filled with 0; becomes the time at which each channel is free.
        starts: [N] becomes the start of each op.
        ends: [N] becomes the end of each op.

    Returns:
        Ops simulated: fewer than N if ranks wait for each other.
    """
    num_ranks = len(bounds) - 1
    width = len(needs) // max(len(gives), 1)
    position = [bounds[rank] for rank in range(num_ranks)]
    clock = [0.0 for _ in range(num_ranks)]
    awaited = [NOTHING for _ in range(num_ranks)]
    runnable = [num_ranks - 1 - rank for rank in range(num_ranks)]
    num_done = 0
    while len(runnable) > 0:
        rank = runnable.pop()
        time = clock[rank]
        op = position[rank]
        while op < bounds[rank + 1]:
            start = time
            missing = NOTHING
            for place in range(width * op, width * op + width):
                needed = needs[place]
                if needed == NOTHING:
                    continue
                there = ready[needed]
                if there < 0:
                    missing = needed
                    break
                if there > start:
                    start = there
            if missing != NOTHING:
                awaited[rank] = missing
                break
            time = start + durations[op]
            starts[op] = start
            ends[op] = time
            ready[gives[op]] = time
            arriving = arrives[op]
            if arriving != NOTHING:
                channel = channels[op]
                leaves = free[channel] if free[channel] > time else time
                sent = leaves + sending[op]
                free[channel] = sent
                ready[arriving] = sent + latency[op]
                if awaited[targets[op]] == arriving:
                    awaited[targets[op]] = NOTHING
                    runnable.append(targets[op])
            op += 1
        num_done += op - position[rank]
        position[rank] = op
        clock[rank] = time
    return num_done


@cache
def compiled_loop() -> Callable[..., int] | None:
    """Return `simulate_ops` as machine code; None where numba is not installed.

    The code is kept on disk beside this file, or in the user's cache where that folder cannot be written.
    """
    try:
        from numba import njit
    except ImportError:
        return None
    try:
        return cast("Callable[..., int]", njit(cache=True)(simulate_ops))
    except RuntimeError:  # there is no folder to keep it in
        return cast("Callable[..., int]", njit(simulate_ops))
