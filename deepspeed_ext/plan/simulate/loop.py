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

OFFLOADED, FETCHED, DROPPED = range(3)
"""What may happen to a host copy at a place, and the row of its times."""


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
    posts: Array,
    posted: Array,
    copying: Array,
    back: Array,
    ready: Array,
    free: Array,
    lanes: Array,
    copied: Array,
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
        posts: [N + 1] where those host copies begin in `posted` that have a place behind op n.
        posted: [events] number of a copy, times 3, plus what happens to it.
        copying: [2 * C] times of C copies to the host, then of those from it.
        back: [N] the copy that op n waits for; NOTHING if none.
        ready: [results] filled with -1; becomes the time at which each result is there.
        free: [channels] filled with 0; becomes the time at which each channel is free.
        lanes: [2 * R] filled with 0; becomes the time at which the lanes of each rank to its host and back are free.
        copied: [3 * C] becomes the start of each copy to the host, then of those from it, then when each was dropped.
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
    num_copies = len(copying) // 2
    while len(runnable) > 0:
        rank = runnable.pop()
        time = clock[rank]
        op = position[rank]
        while op < bounds[rank + 1]:
            start = time
            copy = back[op]
            if copy != NOTHING and copied[num_copies + copy] + copying[num_copies + copy] > start:
                start = copied[num_copies + copy] + copying[num_copies + copy]
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
            for place in range(posts[op], posts[op + 1]):
                copy = posted[place] // 3
                event = posted[place] % 3
                if event == DROPPED:
                    if copied[copy] + copying[copy] > time:
                        time = copied[copy] + copying[copy]
                    copied[2 * num_copies + copy] = time
                else:
                    begins = lanes[2 * rank + event] if lanes[2 * rank + event] > time else time
                    copied[event * num_copies + copy] = begins
                    lanes[2 * rank + event] = begins + copying[event * num_copies + copy]
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
