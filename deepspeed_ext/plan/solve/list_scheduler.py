"""Orders from priorities, and finished orders annealed.

Rules: seven numbers that give every op a priority. A rule pictures a steady state. A period T is the time that the
busiest rank needs for one micro-batch. Every op has a wished time, which is its priority:

    F  of token slice j of micro-batch k on stage i    T (k + forward_spread j / S + forward_depth d(i))
    BI of the same                                     T (turn + k + backward_spread (S - 1 - j) / S
                                                              + backward_depth (1 - d(i)))
    BW                                                 time of its BI + T * weight_delay

with d(i) from 0 at the first stage to 1 after the last, in proportion to the forwards. With `forward_spread` near 1 the
token slices of a micro-batch enter one by one between backwards, near 0 together; `turn` is the number of micro-batches
that are let in before the first backward is urgent; the depths order model chunks; `weight_delay` keeps weight
gradients back to fill gaps. `patience` is for how long a rank may wait for a more urgent op, in periods. 1f1b and
zero-bubble orders, V-shaped ones and all between are rules, or close to one.

The list scheduler. Each rank has three queues per stage: forwards, input gradients and weight gradients, each in its
own fixed order. Whenever a rank is free, it takes, of the heads of its queues that can start now or within its
patience, the one of the smallest priority.

Memory. A forward takes room, its weight gradient gives it back. With the limit L, a rank that let later micro-batches
in too far would have no room to finish the oldest, and all ranks would wait for ever. So room is reserved: let k be the
first micro-batch that has not gone forward on all stages of the rank; the memory held of micro-batches after k must
leave one whole micro-batch free, held <= L - 1. Then k can go forward on every rank, as all before it can turn back and
be given up, and after it k + 1: some op can always run (the banker's algorithm, Dijkstra, EWD 623).

Simulated annealing on finished orders. The makespan is the length of a critical path. Only a move that touches every
such path can shorten it, so moves start from an op of one, which is found again after every change; of two causes of a
start one is drawn. The op goes some places earlier or later in the order of its rank, but never past an op of its own
queue, nor past an op that it reads or that reads it. A move that makes the step longer is taken with a probability that
falls as the search cools (Kirkpatrick et al., Science 220, 1983; moves on critical paths: van Laarhoven et al.,
Operations Research 40, 1992, for job shops, which pipelines without memory are). Moves over the memory limit, and those
that deadlock, are undone.
"""

from typing import NamedTuple

import numpy as np

from deepspeed_ext.plan.simulate.arrays import DataFlow, Numbers, Tables, compiled
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.simulate.host_copies import NO_COPIES, CopyEvents
from deepspeed_ext.plan.simulate.loop import UNKNOWN, available_at, hand_over, inlined, replay
from deepspeed_ext.plan.solve.problem import ROUNDING, SchedulingProblem, peak_of_row

AT_ONCE = -1e300
"""Priority of a weight gradient that must stay with its input gradient."""


class PriorityRule(NamedTuple):
    """Seven numbers that order all ops; see the formulas above."""

    forward_spread: float
    forward_depth: float
    turn: float
    backward_spread: float
    backward_depth: float
    weight_delay: float
    patience: float

    @classmethod
    def drawn(cls, random: np.random.Generator) -> "PriorityRule":
        """Any rule that may be good."""
        return cls(
            forward_spread=random.uniform(0, 1.2),
            forward_depth=random.uniform(0, 1.5),
            turn=random.uniform(0, 2),
            backward_spread=random.uniform(0, 1.2),
            backward_depth=random.uniform(0, 1.5),
            weight_delay=float(random.choice([0, 0.1, 0.3, 1])),
            patience=float(random.choice([0, 0.01, 0.02])),
        )

    def varied(self, random: np.random.Generator) -> "PriorityRule":
        """A rule nearby: some of the numbers changed, by a little or by more."""
        step = 10 ** random.uniform(-3, -0.5)
        changes = random.normal(size=6) * step * (random.random(6) < 0.5)
        patience = self.patience + (random.random() < 0.3) * random.normal() * 0.01
        others = [value + change for value, change in zip(self[:6], changes, strict=True)]
        return PriorityRule._make((*others, abs(patience)))


class Priorities:
    """Turns rules into priorities for one problem."""

    def __init__(self, problem: SchedulingProblem) -> None:
        shape = problem.shape
        self.period = float(problem.work.max()) / shape.num_micro_batches
        unit = np.arange(problem.num_units)
        self._micro_batch = unit // shape.num_token_slices
        self._token_slice = unit % shape.num_token_slices / shape.num_token_slices
        self._turned_back = 1 - 1 / shape.num_token_slices - self._token_slice
        forward = problem.tables.times[0].sum(axis=1)
        before = np.cumsum(forward) - forward
        self._depth = (before / max(forward.sum(), 1e-300))[:, None]
        self._is_split = problem.is_split

    def of(self, rule: PriorityRule) -> Numbers:
        """[3, N, units] priorities."""
        forward = self._micro_batch + rule.forward_spread * self._token_slice + rule.forward_depth * self._depth
        backward = self._micro_batch + rule.backward_spread * self._turned_back
        backward = backward + rule.turn + rule.backward_depth * (1 - self._depth)
        weight = backward + rule.weight_delay if self._is_split else np.full_like(backward, AT_ONCE)
        return np.stack([forward, backward, weight]) * self.period

    def patience(self, rule: PriorityRule) -> float:
        """How long a rank waits, as a time."""
        return rule.patience * self.period


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


@compiled
def _place(is_reversed: bool, position: int, num_token_slices: int) -> tuple[int, int]:
    """Return the token slice and the unit at a position of a queue."""
    token_slice = position % num_token_slices
    if not is_reversed:
        return token_slice, position
    first = position - token_slice
    token_slice = num_token_slices - 1 - token_slice
    return token_slice, first + token_slice


@inlined
def _next_op(
    tables: Tables,
    flow: DataFlow,
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
    """Return the next start on a rank, and the kind and model chunk of its queue; UNKNOWN if no op is ready."""
    activation, stages = tables.activation, tables.ways.stages
    num_stages, num_units = priorities.shape[1:]
    num_token_slices = len(activation)
    soonest = UNKNOWN
    for model_chunk in range(stages.shape[1]):
        stage = stages[rank, model_chunk]
        for kind in range(3):
            start = UNKNOWN
            position = done[kind, stage]
            if position < num_units:
                token_slice, unit = _place(flow.is_reversed[kind], position, num_token_slices)
                fits = True
                if flow.live_change[kind] > 0:
                    room = activation[token_slice]
                    fits = held + room <= limit
                    if unit >= (oldest + 1) * num_token_slices:
                        fits = fits and reserved + room <= later_limit
                if fits:
                    start = max(clock, available_at(flow.reads, kind * num_stages + stage, token_slice, unit, ready))
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
                unit = _place(flow.is_reversed[kind], done[kind, stage], num_token_slices)[1]
                priority = priorities[kind, stage, unit]
                if best_kind < 0 or priority < smallest:
                    smallest, best_kind, best_model_chunk = priority, kind, model_chunk
    return starts[best_kind, best_model_chunk], best_kind, best_model_chunk


@compiled
def _held_after(tables: Tables, rank: int, oldest: int, forwards: Numbers) -> float:
    """Activations that a rank holds of the micro-batches after the oldest; none of these has turned back yet."""
    num_token_slices = tables.times.shape[2]
    held = 0.0
    for model_chunk in range(tables.ways.stages.shape[1]):
        ahead = forwards[tables.ways.stages[rank, model_chunk]] - (oldest + 1) * num_token_slices
        if ahead > 0:
            held += (ahead // num_token_slices) * tables.activation.sum()
            held += tables.activation[: ahead % num_token_slices].sum()
    return held


@compiled
def _fill(tables: Tables, flow: DataFlow, limit: float, priorities: Numbers, patience: float, orders: Numbers) -> float:
    num_ranks, num_model_chunks = tables.ways.stages.shape
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
        # The rank with the earliest start, so that no later decision changes its choice.
        rank = -1
        for each in range(num_ranks):
            if stale[each]:
                stale[each] = False
                next_start[each], next_kind[each], next_model_chunk[each] = _next_op(
                    tables,
                    flow,
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
        kind, stage = next_kind[rank], tables.ways.stages[rank, next_model_chunk[rank]]
        token_slice, unit = _place(is_reversed[kind], done[kind, stage], num_token_slices)
        clock[rank] = next_start[rank] + tables.times[kind, stage, token_slice]
        done[kind, stage] += 1
        orders[rank, count[rank]] = (kind * num_stages + stage) * num_units + unit
        count[rank] += 1
        stale[rank] = True
        held[rank] += live_change[kind] * tables.activation[token_slice]
        if live_change[kind] > 0:
            fewest = num_units
            for model_chunk in range(num_model_chunks):
                fewest = min(fewest, done[kind, tables.ways.stages[rank, model_chunk]])
            oldest[rank] = fewest // num_token_slices
            reserved[rank] = _held_after(tables, rank, oldest[rank], done[kind])
        result = flow.gives[kind]
        if result >= 0:
            reader = hand_over(tables, result, stage, token_slice, unit, clock[rank], ready)
            if reader >= 0:
                stale[reader] = True
    return float(clock.max())


HOT, COLD = 1e-3, 1e-6
"""First and last temperature, in makespans."""
MEAN_DISTANCE = 3.0
"""Places that an op moves by, on average."""


def anneal(
    problem: SchedulingProblem, orders: CompiledOrders, num_moves: int, seed: int
) -> tuple[float, CompiledOrders]:
    """Better orders, or the same.

    Args:
        orders: that keep its memory limit and do not deadlock.
        num_moves: moves to try; each costs one replay.
    """
    best = orders.rows.copy()
    makespan = _anneal(
        problem.tables,
        problem.flow,
        NO_COPIES,
        problem.memory_limit + ROUNDING,
        orders.rows.copy(),
        orders.lengths,
        best,
        num_moves,
        seed,
    )
    return makespan, CompiledOrders(problem.shape, best, orders.lengths)


@compiled
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
            rank = tables.ways.rank_of[stage]
        elif follows:
            position -= 1
        else:
            return count


@compiled
def _awaited(reads: Numbers, place: int, token_slice: int, unit: int, start: float, ready: Numbers) -> int:
    """Index in `ready` of a result that came from another stage as the op started; -1 if there is none."""
    # Results of the own stage are first, then as many of other stages, then the row without results.
    half = len(ready) // (len(reads) + 1) * (len(reads) // 2)
    for number in range(reads.shape[2]):
        index = reads[place, token_slice, number] + unit
        if half <= index < 2 * half and ready[index] >= start:
            return int(index)
    return -1


@compiled
def _farthest(tables: Tables, parts: Numbers, row: Numbers, position: int, target: int) -> int:
    """Last position towards `target` to which an op may move: not past its queue, nor past ops of its own unit."""
    num_stages, num_token_slices = tables.times.shape[1:]
    num_units = tables.num_micro_batches * num_token_slices
    op = row[position]
    stage, kind = op // num_units % num_stages, op // num_units // num_stages
    step = 1 if target > position else -1
    while position != target:
        other = row[position + step]
        if other // num_units % num_stages == stage:
            other_kind = other // num_units // num_stages
            # A whole backward is in the queue of input gradients, and in that of weight gradients.
            same_queue = parts[other_kind] & parts[kind] > 0
            if same_queue or other % num_units == op % num_units:
                break
        position += step
    return position


@compiled
def _move(row: Numbers, position: int, target: int) -> None:
    op = row[position]
    step = 1 if target > position else -1
    while position != target:
        row[position] = row[position + step]
        position += step
    row[target] = op


@compiled
def _copy(rows: Numbers, best: Numbers) -> None:
    """Copy element by element: a copy of whole arrays brings checks of shapes that take 3 s to compile."""
    for rank in range(rows.shape[0]):
        for place in range(rows.shape[1]):
            best[rank, place] = rows[rank, place]


@compiled
def _anneal(
    tables: Tables,
    flow: DataFlow,
    copies: CopyEvents,
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
    shortest = makespan = replay(tables, flow, rows, lengths, starts, ends, ready, copies, copies.copying)
    _copy(rows, best)
    path = np.zeros((rows.size, 2), np.int64)
    length = _critical_path(tables, flow, rows, lengths, starts, ends, ready, places, path)
    for number in range(num_moves):
        temperature = makespan * HOT * (COLD / HOT) ** (number / num_moves)
        drawn = np.random.randint(length)
        rank, position = path[drawn]
        distance = 1 + int(-MEAN_DISTANCE * np.log(1 - np.random.random()))
        if np.random.random() < 0.5:
            distance = -distance
        drawn_target = min(max(position + distance, 0), lengths[rank] - 1)
        target = _farthest(tables, flow.parts, rows[rank], position, drawn_target)
        if target == position:
            continue
        _move(rows[rank], position, target)
        changed = UNKNOWN
        if peak_of_row(tables, flow.live_change, rows[rank], lengths[rank]) <= limit:
            changed = replay(tables, flow, rows, lengths, starts, ends, ready, copies, copies.copying)
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
            _copy(rows, best)
    return shortest
