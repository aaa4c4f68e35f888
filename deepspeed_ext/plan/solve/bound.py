"""A lower bound of the makespan, with which a found order is compared.

It holds for all orders that take micro-batches first to last, in the forwards and (ADR 0005) in the backwards of every
stage, without interrupting ops, under the memory limit. Three arguments, the largest counts.

1.  One rank at a time. An op cannot start before its head: the longest chain of ops and transfers that must run before
    it. After it at least its tail must run. A rank does one op at a time, so even if ops could be interrupted and were
    always chosen by the longest tail (Jackson's rule, optimal for one machine), it is not done earlier.
2.  Memory in the chains. With the limit L, F of unit n on a stage waits for enough of that stage's weight gradients:
    activations of the forwards up to n, less those that backwards have freed, are at most L. If the rank has c stages
    before this one, these have run their forwards up to n too, and have freed at most as much as the input gradients
    of this stage allow; so activations less the ones of its input gradients are at most L / (c + 1), and F waits for an
    input gradient. These are chains across micro-batches.
3.  Memory as an area. A token slice is in memory at least for the longest chain from its F over the last token slice on
    the last stage to its BW. Its share of memory times that, for all token slices of a rank, fits into L x makespan.

Heads and tails also count the work of the op's own rank that must run before it, or after it.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from deepspeed_ext.plan.simulate.arrays import FORWARD, INPUT_GRADIENT, RESULTS, WEIGHT_GRADIENT, Numbers
from deepspeed_ext.plan.solve.problem import ROUNDING, SchedulingProblem


class _Key(NamedTuple):
    """Kind, stage and unit of an op, as in the arrays."""

    kind: int
    stage: int
    unit: int


def lower_bound(problem: SchedulingProblem) -> float:
    """Makespan that no order within the memory limit can beat."""
    heads, tails = _heads_and_tails(problem)
    ranks = range(problem.shape.num_ranks)
    by_rank = [_one_rank(problem, list(problem.shape.stages_of(rank)), heads, tails) for rank in ranks]
    return max(*by_rank, _area(problem))


def _duration(problem: SchedulingProblem, key: _Key) -> float:
    return float(problem.tables.times[key.kind, key.stage, key.unit % problem.shape.num_token_slices])


def _in_order(problem: SchedulingProblem) -> Iterator[_Key]:
    """All ops, each after its dependencies."""
    for first in range(0, problem.num_units, problem.shape.num_token_slices):
        yield from (_Key(kind, stage, first + at) for kind, stage, at in _one_micro_batch(problem))


def _one_micro_batch(problem: SchedulingProblem) -> Iterator[_Key]:
    """Ops of the first micro-batch, each after those that it reads."""
    shape, flow = problem.shape, problem.flow
    for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
        token_slices = range(shape.num_token_slices)[:: -1 if flow.is_reversed[kind] else 1]
        first = [_Key(kind, stage, token_slices[0]) for stage in range(shape.num_stages)]
        needs_later = any(earlier.stage > key.stage for key in first for earlier, _ in _read(problem, key))
        yield from (_Key(kind, key.stage, at) for key in first[:: -1 if needs_later else 1] for at in token_slices)


def _read(problem: SchedulingProblem, key: _Key) -> Iterator[tuple[_Key, float]]:
    """Ops whose results an op reads, and the least time of their transfers."""
    shape, flow, sending, latency = problem.shape, problem.flow, problem.tables.sending, problem.tables.latency
    kind, stage, unit = key
    for offset in flow.reads[kind * shape.num_stages + stage, unit % shape.num_token_slices].tolist():
        row, earlier = divmod(offset + unit, problem.num_units)
        if row < len(flow.makers):
            # Results have the numbers of the kinds that make them, whole backwards being two ops here.
            result, maker = row // shape.num_stages % len(RESULTS), int(flow.makers[row])
            # The least time of a transfer: 0 where the result stays on its rank.
            delay = sending[result, maker, earlier % shape.num_token_slices] + latency[result, maker]
            yield _Key(result, maker, earlier), 0.0 if maker == stage else float(delay)


def _before(problem: SchedulingProblem, key: _Key, room: "_Room") -> Iterator[tuple[_Key, float]]:
    """Ops that must end before an op starts, and by how much."""
    yield from _read(problem, key)
    kind, stage, unit = key
    last = problem.shape.num_token_slices - 1
    # The op before it in its queue.
    if not problem.flow.is_reversed[kind]:
        ahead = unit - 1
    else:
        ahead = unit + 1 if unit % (last + 1) < last else unit - 2 * last - 1
    if ahead >= 0:
        yield _Key(kind, stage, ahead), 0.0
    if problem.flow.live_change[kind] > 0:
        yield from ((earlier, 0.0) for earlier in room.makers(stage, unit))


class _Room:
    """The backwards that must have freed memory before a forward starts: the second argument above."""

    def __init__(self, problem: SchedulingProblem) -> None:
        shape, activation = problem.shape, problem.tables.activation
        self._limit = problem.memory_limit + ROUNDING
        self._forward = np.cumsum(np.tile(activation, shape.num_micro_batches))
        self._back = np.cumsum(np.tile(activation[::-1], shape.num_micro_batches))
        self._num_token_slices = shape.num_token_slices
        self._stages_before = {
            stage: number for rank in range(shape.num_ranks) for number, stage in enumerate(shape.stages_of(rank))
        }

    def makers(self, stage: int, unit: int) -> Iterator[_Key]:
        """The BW, and the BI, that F of a unit waits for."""
        yield from self._maker(2, stage, unit, self._limit)
        if self._stages_before[stage]:
            yield from self._maker(1, stage, unit, self._limit / (self._stages_before[stage] + 1))

    def _maker(self, kind: int, stage: int, unit: int, limit: float) -> Iterator[_Key]:
        missing = self._forward[unit] - limit
        if missing <= ROUNDING:
            return
        position = int(np.searchsorted(self._back, missing - ROUNDING))
        token_slice = position % self._num_token_slices
        yield _Key(kind, stage, position - token_slice + self._num_token_slices - 1 - token_slice)


def _heads_and_tails(problem: SchedulingProblem) -> tuple[Numbers, Numbers]:
    """Heads and tails, [3, N, units] each: the least time before an op, and after it."""
    order = list(_in_order(problem))
    room = _Room(problem)
    heads, tails = _loads(problem)
    # A rank starts when the first token slice reaches it.
    starts: dict[int, float] = {}
    for stage in range(problem.shape.num_stages):
        reached = [
            starts[key.stage] + (_duration(problem, key) + delay)
            for key, delay in _read(problem, _Key(FORWARD, stage, 0))
        ]
        starts[stage] = max(reached, default=0.0)
    for rank in range(problem.shape.num_ranks):
        stages = list(problem.shape.stages_of(rank))
        heads[:, stages] += min(starts[stage] for stage in stages)
    edges = [(key, [*_before(problem, key, room)]) for key in order]
    for key, needed in edges:
        for earlier, delay in needed:
            heads[key] = max(heads[key], heads[earlier] + _duration(problem, earlier) + delay)
    for key, needed in reversed(edges):
        after = tails[key] + _duration(problem, key)
        for earlier, delay in needed:
            tails[earlier] = max(tails[earlier], after + delay)
    return heads, tails


def _loads(problem: SchedulingProblem) -> tuple[Numbers, Numbers]:
    """Work of its own rank that must be done before, and after, each op; [3, N, units] each."""
    shape, times = problem.shape, problem.tables.times
    before, after = (np.zeros((3, shape.num_stages, problem.num_units)) for _ in range(2))
    micro_batch = np.arange(problem.num_units) // shape.num_token_slices
    for rank in range(shape.num_ranks):
        stages = list(shape.stages_of(rank))
        forward, back, weight = times[:, stages].sum(axis=(1, 2))
        for number, stage in enumerate(stages):
            own, earlier, later = (
                [_Queue.of(problem, kind, group) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)]
                for group in ([stage], stages[:number], stages[number + 1 :])
            )
            before[0, stage] = own[0].upto - own[0].each + earlier[0].upto
            before[1, stage] = own[1].upto - own[1].each + later[1].upto + (micro_batch + 1) * forward
            before[2, stage] = before[1, stage] + own[1].each + own[2].upto - own[2].each
            after[0, stage] = own[0].left + np.cumsum(later[0].each[::-1])[::-1]
            after[0, stage] += (shape.num_micro_batches - micro_batch) * (back + weight)
            after[1, stage] = own[1].left + own[2].left + own[2].each
            after[1, stage] += earlier[1].left + earlier[2].left + (earlier[1].each + earlier[2].each)
            after[2, stage] = own[2].left
    return before, after


class _Queue(NamedTuple):
    """Times of the ops of one kind on some stages of a rank; [units] each."""

    each: Numbers
    upto: Numbers
    """Of all ops up to each one, with it."""
    left: Numbers
    """Of all ops after it."""

    @classmethod
    def of(cls, problem: SchedulingProblem, kind: int, stages: list[int]) -> "_Queue":
        each = np.tile(problem.tables.times[kind, stages].sum(axis=0), (problem.shape.num_micro_batches, 1))
        turn = slice(None, None, -1 if problem.flow.is_reversed[kind] else 1)
        upto = np.cumsum(each[:, turn]).reshape(each.shape)[:, turn]
        return cls(each.reshape(-1), upto.reshape(-1), (upto.max() - upto).reshape(-1))


def _one_rank(problem: SchedulingProblem, stages: list[int], heads: Numbers, tails: Numbers) -> float:
    """The first argument above for one rank."""
    jobs = sorted(
        zip(
            heads[:, stages].reshape(-1).tolist(),
            (-tails[:, stages]).reshape(-1).tolist(),
            np.tile(problem.tables.times[:, stages], problem.shape.num_micro_batches).reshape(-1).tolist(),
            strict=True,
        )
    )
    waiting: list[tuple[float, float]] = []  # (-tail, work left)
    time = longest = 0.0
    position = 0
    while position < len(jobs) or waiting:
        if not waiting:
            time = max(time, jobs[position][0])
        while position < len(jobs) and jobs[position][0] <= time:
            heappush(waiting, jobs[position][1:])
            position += 1
        turn, work = heappop(waiting)
        until = jobs[position][0] if position < len(jobs) else inf
        if time + work > until:
            heappush(waiting, (turn, time + work - until))
            time = until
        else:
            time += work
            longest = max(longest, time - turn)
    return longest


def _area(problem: SchedulingProblem) -> float:
    """The third argument above."""
    if problem.memory_limit == inf:
        return 0.0
    shape = problem.shape
    extents = (shape.num_stages, shape.num_token_slices)
    # Longest chains from the start of each forward of a micro-batch to the end of each op after it.
    chains: dict[_Key, Numbers] = {}
    longest = np.zeros(extents)
    for key in _one_micro_batch(problem):
        chain = np.full(extents, -inf)
        for earlier, delay in _read(problem, key):
            chain = np.maximum(chain, chains[earlier] + delay)
        if key.kind == FORWARD:
            chain[key[1:]] = 0.0
        chain += _duration(problem, key)
        if problem.flow.live_change[key.kind] < 0:
            longest[key[1:]] = chain[key[1:]]
        else:
            chains[key] = chain
    held = longest * problem.tables.activation * shape.num_micro_batches
    by_rank = np.bincount(problem.tables.ways.rank_of, held.sum(axis=1), shape.num_ranks)
    return float(by_rank.max()) / problem.memory_limit
