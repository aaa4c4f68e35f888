"""The list scheduler: makes op orders from priorities, and cannot make one that deadlocks.

Each rank has three queues per stage: forwards, input gradients and weight gradients, each in its own fixed order
(micro-batches first to last; token slices first to last forward, last to first backward). All there is to decide is
from which queue to take next. Whenever a rank is free, it takes, of the heads of its queues that can start now or
within its patience, the one of the smallest priority.

Memory. A forward takes room, its weight gradient gives it back. With the limit L, a rank that let later micro-batches
in too far would have no room to finish the oldest, and all ranks would wait for ever. So room is reserved: let k be
the first micro-batch that has not gone forward on all stages of the rank; what is held of micro-batches after k must
leave one whole micro-batch free, held <= L - 1. Then k can go forward on every rank, as all before it can turn back
and be given up, and after it k + 1: some op can always run (the banker's algorithm, Dijkstra, EWD 623).
"""

import numpy as np

from deepspeed_ext.plan.optimise.kernel import UNKNOWN, available_at, hand_over, kernel
from deepspeed_ext.plan.optimise.problem import ROUNDING, DataFlow, Numbers, SchedulingProblem, Tables


def list_schedule(problem: SchedulingProblem, priorities: Numbers, patience: float) -> tuple[float, Numbers]:
    """Make orders.

    Args:
        priorities: [3, N, units] of each op; the smallest goes first.
        patience: for how long a rank may stay idle to wait for an op of smaller priority.

    Returns:
        Makespan, and [P, 3 V units] the ops of each rank as numbers.
    """
    num_ops = problem.num_ops
    orders = np.zeros((problem.shape.num_ranks, num_ops // problem.shape.num_ranks), np.int64)
    makespan = _fill(problem.tables, problem.flow, problem.memory_limit + ROUNDING, priorities, patience, orders)
    assert makespan < UNKNOWN, "room is reserved for the oldest micro-batch, so some op can always run"
    return makespan, orders


@kernel
def _place(is_reversed: bool, position: int, num_token_slices: int) -> tuple[int, int]:
    """Return the token slice and the unit at a position of a queue."""
    token_slice = position % num_token_slices
    if not is_reversed:
        return token_slice, position
    first = position - token_slice
    token_slice = num_token_slices - 1 - token_slice
    return token_slice, first + token_slice


@kernel
def _next_op(
    reads: Numbers,
    is_reversed: Numbers,
    live_change: Numbers,
    activation: Numbers,
    stages: Numbers,
    limit: float,
    later_limit: float,
    priorities: Numbers,
    patience: float,
    rank: int,
    clock: float,
    held: float,
    reserved: float,
    oldest: int,
    done: Numbers,
    ready: Numbers,
    starts: Numbers,
) -> tuple[float, int, int]:
    """When a rank can go on, and with the queue of which kind and model chunk; UNKNOWN if nothing is there yet."""
    num_stages, num_units = priorities.shape[1:]
    num_token_slices = len(activation)
    soonest = UNKNOWN
    for model_chunk in range(stages.shape[1]):
        stage = stages[rank, model_chunk]
        for kind in range(3):
            start = UNKNOWN
            position = done[kind, stage]
            if position < num_units:
                token_slice, unit = _place(is_reversed[kind], position, num_token_slices)
                fits = True
                if live_change[kind] > 0:
                    room = activation[token_slice]
                    fits = held + room <= limit
                    if unit >= (oldest + 1) * num_token_slices:
                        fits = fits and reserved + room <= later_limit
                if fits:
                    start = max(clock, available_at(reads, kind * num_stages + stage, token_slice, unit, ready))
            starts[kind, model_chunk] = start
            soonest = min(soonest, start)
    best_kind, best_model_chunk = -1, -1
    if soonest >= UNKNOWN:
        return UNKNOWN, best_kind, best_model_chunk
    smallest = np.inf
    for model_chunk in range(stages.shape[1]):
        stage = stages[rank, model_chunk]
        for kind in range(3):
            if starts[kind, model_chunk] <= soonest + patience:
                unit = _place(is_reversed[kind], done[kind, stage], num_token_slices)[1]
                priority = priorities[kind, stage, unit]
                if best_kind < 0 or priority < smallest:
                    smallest, best_kind, best_model_chunk = priority, kind, model_chunk
    return starts[best_kind, best_model_chunk], best_kind, best_model_chunk


@kernel
def _held_after(tables: Tables, rank: int, oldest: int, forwards: Numbers) -> float:
    """Activations that a rank holds of the micro-batches after the oldest; none of these has turned back yet."""
    num_token_slices = tables.times.shape[2]
    held = 0.0
    for model_chunk in range(tables.stages.shape[1]):
        ahead = forwards[tables.stages[rank, model_chunk]] - (oldest + 1) * num_token_slices
        if ahead > 0:
            held += (ahead // num_token_slices) * tables.activation.sum()
            held += tables.activation[: ahead % num_token_slices].sum()
    return held


@kernel
def _fill(tables: Tables, flow: DataFlow, limit: float, priorities: Numbers, patience: float, orders: Numbers) -> float:
    num_ranks, num_model_chunks = tables.stages.shape
    num_stages, num_token_slices = tables.times.shape[1:]
    num_units = tables.num_micro_batches * num_token_slices
    whole = tables.activation.sum() * num_model_chunks
    is_reversed, live_change = flow.is_reversed, flow.live_change
    done = np.zeros((3, num_stages), np.int64)
    ready = np.zeros((4 * num_stages + 1) * num_units)
    ready[:-num_units] = UNKNOWN
    tables.free[:] = 0.0
    starts = np.empty((3, num_model_chunks))
    clock, held, reserved = np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks)
    oldest, count = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    # The next op of each rank, looked up again only when something that it depends on has changed.
    stale = np.ones(num_ranks, np.bool_)
    next_start = np.zeros(num_ranks)
    next_kind, next_model_chunk = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for _ in range(orders.size):
        # Of all ranks the one that goes on first, so that no later decision changes what it could choose from.
        rank = -1
        for each in range(num_ranks):
            if stale[each]:
                stale[each] = False
                next_start[each], next_kind[each], next_model_chunk[each] = _next_op(
                    flow.reads,
                    is_reversed,
                    live_change,
                    tables.activation,
                    tables.stages,
                    limit,
                    limit - whole,
                    priorities,
                    patience,
                    each,
                    clock[each],
                    held[each],
                    reserved[each],
                    oldest[each],
                    done,
                    ready,
                    starts,
                )
            if next_start[each] < UNKNOWN and (rank < 0 or next_start[each] < next_start[rank]):
                rank = each
        if rank < 0:
            return UNKNOWN
        kind, stage = next_kind[rank], tables.stages[rank, next_model_chunk[rank]]
        token_slice, unit = _place(is_reversed[kind], done[kind, stage], num_token_slices)
        clock[rank] = next_start[rank] + tables.times[kind, stage, token_slice]
        done[kind, stage] += 1
        orders[rank, count[rank]] = (kind * num_stages + stage) * num_units + unit
        count[rank] += 1
        stale[rank] = True
        held[rank] += live_change[kind] * tables.activation[token_slice]
        if live_change[kind] > 0:
            behind = num_units
            for model_chunk in range(num_model_chunks):
                behind = min(behind, done[kind, tables.stages[rank, model_chunk]])
            oldest[rank] = behind // num_token_slices
            reserved[rank] = _held_after(tables, rank, oldest[rank], done[kind])
        result = flow.gives[kind]
        if result >= 0:
            reader = hand_over(tables, result, stage, token_slice, unit, clock[rank], ready)
            if reader >= 0:
                stale[reader] = True
    return float(clock.max())
