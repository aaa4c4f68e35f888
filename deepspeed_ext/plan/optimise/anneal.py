"""Simulated annealing on finished orders: moves single ops that lie on the critical path.

The makespan is the length of a critical path: a chain of ops, each of which starts as the one before it ends, on the
same rank or over a transfer. Only a move that touches every such chain can shorten it, so moves start from an op of
one chain, taken anew after every change; from two causes of a start one is taken by lot. The op goes some places
earlier or later in the order of its rank, but never past an op of its own queue, nor past what it reads or what reads
it. A move that makes the step longer is taken with a probability that falls as the search cools (Kirkpatrick et al.,
Science 220, 1983; moves on critical paths: van Laarhoven et al., Operations Research 40, 1992, for job shops, which
pipelines without memory are). Moves over the memory limit, and those that deadlock, are undone.
"""

import numpy as np

from deepspeed_ext.plan.optimise.kernel import UNKNOWN, kernel
from deepspeed_ext.plan.optimise.problem import ROUNDING, DataFlow, Numbers, SchedulingProblem, Tables
from deepspeed_ext.plan.optimise.replay import NumberedOrders, peak_of_row, replay_rows

HOT, COLD = 1e-3, 1e-6
"""First and last temperature, in makespans."""
MEAN_DISTANCE = 3.0
"""Places that an op moves by, on average."""


def anneal(
    problem: SchedulingProblem, orders: NumberedOrders, num_moves: int, seed: int
) -> tuple[float, NumberedOrders]:
    """Better orders, or the same.

    Args:
        orders: that keep its memory limit and do not deadlock.
        num_moves: moves to try; each costs one replay.

    Returns:
        Makespan and orders.
    """
    best = orders.rows.copy()
    makespan = _anneal(
        problem.tables,
        problem.flow,
        problem.memory_limit + ROUNDING,
        orders.rows.copy(),
        orders.lengths,
        best,
        num_moves,
        seed,
    )
    return makespan, NumberedOrders(best, orders.lengths)


@kernel
def _critical_path(
    tables: Tables,
    flow: DataFlow,
    rows: Numbers,
    lengths: Numbers,
    starts: Numbers,
    ends: Numbers,
    ready: Numbers,
    places: Numbers,
    path: Numbers,
) -> int:
    """Fill `path` with (rank, position) from the last op back; return its length.

    `places` is [4, N, units]: the position of each op in the order of its rank.
    """
    num_stages, num_token_slices = tables.times.shape[1:]
    num_units = tables.num_micro_batches * num_token_slices
    reads, gives = flow.reads, flow.gives
    rank = 0
    for each in range(1, len(rows)):
        if ends[each, lengths[each] - 1] > ends[rank, lengths[rank] - 1]:
            rank = each
    position = lengths[rank] - 1
    count = 0
    while True:
        path[count, 0], path[count, 1] = rank, position
        count += 1
        start = starts[rank, position]
        if start <= 0.0 or count == len(path):
            return count
        op = rows[rank, position]
        unit, stage, kind = op % num_units, op // num_units % num_stages, op // num_units // num_stages
        follows = position > 0 and ends[rank, position - 1] >= start
        awaited = _awaited(reads, op // num_units, unit % num_token_slices, unit, start, ready)
        if awaited >= 0 and not (follows and np.random.random() < 0.5):
            row, unit = awaited // num_units, awaited % num_units
            result, stage = row // num_stages % 2, flow.makers[row]
            # A gradient came from a BI or from a whole backward.
            for kind in range(len(gives)):
                if gives[kind] == result and places[kind, stage, unit] >= 0:
                    position = places[kind, stage, unit]
            rank = tables.rank_of[stage]
        elif follows:
            position -= 1
        else:
            return count


@kernel
def _awaited(reads: Numbers, place: int, token_slice: int, unit: int, start: float, ready: Numbers) -> int:
    """Where in `ready` a result stands that came from another stage as the op started; -1 if there is none."""
    # Results of the own stage are first, then as many of other stages, then the row that stands for nothing.
    half = len(ready) // (len(reads) + 1) * (len(reads) // 2)
    for number in range(reads.shape[2]):
        index = reads[place, token_slice, number] + unit
        if half <= index < 2 * half and ready[index] >= start:
            return int(index)
    return -1


@kernel
def _farthest(tables: Tables, parts: Numbers, row: Numbers, position: int, wanted: int) -> int:
    """How far towards `wanted` the op at a position may move: not past its queue, nor past ops of its own unit."""
    num_stages, num_token_slices = tables.times.shape[1:]
    num_units = tables.num_micro_batches * num_token_slices
    op = row[position]
    stage, kind = op // num_units % num_stages, op // num_units // num_stages
    step = 1 if wanted > position else -1
    while position != wanted:
        other = row[position + step]
        if other // num_units % num_stages == stage:
            other_kind = other // num_units // num_stages
            # A whole backward stands in the queue of input gradients, and in that of weight gradients.
            same_queue = parts[other_kind] & parts[kind] > 0
            if same_queue or other % num_units == op % num_units:
                break
        position += step
    return position


@kernel
def _move(row: Numbers, position: int, target: int) -> None:
    op = row[position]
    step = 1 if target > position else -1
    while position != target:
        row[position] = row[position + step]
        position += step
    row[target] = op


@kernel
def _anneal(
    tables: Tables,
    flow: DataFlow,
    limit: float,
    rows: Numbers,
    lengths: Numbers,
    best: Numbers,
    num_moves: int,
    seed: int,
) -> float:
    np.random.seed(seed)
    num_stages, num_token_slices = tables.times.shape[1:]
    num_units = tables.num_micro_batches * num_token_slices
    starts, ends = np.zeros(rows.shape), np.zeros(rows.shape)
    ready = np.zeros((4 * num_stages + 1) * num_units)
    places = np.full((4, num_stages, num_units), -1, np.int64)
    for rank in range(len(rows)):
        for position in range(lengths[rank]):
            op = rows[rank, position]
            places[op // num_units // num_stages, op // num_units % num_stages, op % num_units] = position
    shortest = makespan = replay_rows(tables, flow, rows, lengths, starts, ends, ready)
    best[:] = rows
    path = np.zeros((rows.size, 2), np.int64)
    length = _critical_path(tables, flow, rows, lengths, starts, ends, ready, places, path)
    for number in range(num_moves):
        temperature = makespan * HOT * (COLD / HOT) ** (number / num_moves)
        drawn = np.random.randint(length)
        rank, position = path[drawn]
        distance = 1 + int(-MEAN_DISTANCE * np.log(1 - np.random.random()))
        if np.random.random() < 0.5:
            distance = -distance
        wanted = min(max(position + distance, 0), lengths[rank] - 1)
        target = _farthest(tables, flow.parts, rows[rank], position, wanted)
        if target == position:
            continue
        _move(rows[rank], position, target)
        changed = UNKNOWN
        if peak_of_row(tables, flow.live_change, rows[rank], lengths[rank]) <= limit:
            changed = replay_rows(tables, flow, rows, lengths, starts, ends, ready)
        if changed > makespan - temperature * np.log(1 - np.random.random()):
            _move(rows[rank], target, position)
            continue
        makespan = changed
        for place in range(min(position, target), max(position, target) + 1):
            op = rows[rank, place]
            places[op // num_units // num_stages, op // num_units % num_stages, op % num_units] = place
        length = _critical_path(tables, flow, rows, lengths, starts, ends, ready, places, path)
        if makespan < shortest:
            shortest = makespan
            best[:] = rows
    return shortest
