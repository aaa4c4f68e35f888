"""The problem of the optimiser as arrays, the compiled code that its loops share, and orders replayed.

Kinds are numbers here: 0 forward, 1 input gradient, 2 weight gradient, 3 whole backward. A unit is a token slice of a
micro-batch, `micro_batch * S + token_slice`. An op is one number, `(kind * N + stage) * M * S + unit`, for N stages.

`replay` simulates orders given as numbers, for the loops that change an order or a cost and simulate again; tests
compare it with `simulate.simulate`. numba is imported with this file, and only the solvers import this file.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
from numba import njit

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import LIVE_CHANGE, Op, OpKind, PipelineShape, parts, reads_of, result
from deepspeed_ext.plan.simulate import compiled as arrays
from deepspeed_ext.plan.simulate.compiled import Numbers, OpColumns, compiled

KINDS = (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.BACKWARD)
"""Kinds of ops by their numbers."""
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD = range(4)
RESULTS = (OpKind.FORWARD, OpKind.INPUT_GRADIENT)
"""Results by their numbers: an activation, and the gradient of one."""

ROUNDING = 1e-9
"""How far sums of shares may be over the limit, in activations of one micro-batch."""


class DataFlow(NamedTuple):
    """`ops.DEPENDENCIES` and `ops.LIVE_CHANGE` as arrays for N stages.

    Kernels keep the times at which results are there in an array `ready` of [(4 N + 1) x units]. Result r of stage i
    has the row r N + i of it where it is made; a result that stage i reads from a neighbour has row (2 + r) N + i. The
    last row is for missing inputs: it is always 0.
    """

    reads: Numbers
    """[4 N, S, K] by kind and stage, and token slice: index in `ready` of each result that an op of unit 0 reads; for
    another unit, so many places further. K is the most that any kind of op reads; one that reads less reads the last
    row."""
    makers: Numbers
    """[4 N] stage that makes the results of each row of `ready`."""
    gives: Numbers
    """[4] result of each kind of op; -1 where nothing reads it."""
    parts: Numbers
    """[4] bits of the kinds F, BI and BW that an op computes."""
    is_reversed: Numbers
    """[3] whether ops of a kind go through token slices last to first."""
    live_change: Numbers
    """[4] by how many an op changes the live token slices."""

    @classmethod
    def of(cls, shape: PipelineShape) -> "DataFlow":
        """Make the arrays for a shape."""
        num_stages, num_token_slices = shape.num_stages, shape.num_token_slices
        num_units = shape.num_micro_batches * num_token_slices
        width = max(len(reads_of(kind)) for kind in KINDS)
        reads = np.full(
            (len(KINDS) * num_stages, num_token_slices, width), len(KINDS) * num_stages * num_units, np.int64
        )
        makers = np.tile(np.arange(num_stages), 4)
        places = itertools.product(enumerate(KINDS), range(num_stages), range(num_token_slices))
        for (number, kind), stage, token_slice in places:
            found = []
            for _, needed, stages, token_slices in reads_of(kind):
                if 0 <= stage + stages < num_stages and 0 <= token_slice + token_slices < num_token_slices:
                    row = (RESULTS.index(needed) + 2 * (stages != 0)) * num_stages + stage
                    makers[row] = stage + stages
                    found.append(row * num_units + token_slices)
            reads[number * num_stages + stage, token_slice, : len(found)] = found
        given = [result(Op(kind, 0, 0, 0)).kind for kind in KINDS]
        return cls(
            reads,
            makers,
            np.array([RESULTS.index(kind) if kind in RESULTS else -1 for kind in given], np.int64),
            np.array(
                [sum(1 << KINDS.index(part.kind) for part in parts(Op(kind, 0, 0, 0))) for kind in KINDS], np.int64
            ),
            np.array([_is_reversed(kind) for kind in KINDS[:3]]),
            np.array([LIVE_CHANGE[kind] for kind in KINDS], np.int64),
        )


def _is_reversed(kind: OpKind) -> bool:
    """Whether a token slice needs those after it. Weight gradients need no other, and follow their input gradients."""
    shift = next((each.token_slice for each in reads_of(kind) if each.token_slice), 0)
    return shift > 0 if shift else any(_is_reversed(each.needed) for each in reads_of(kind) if each.needed is not kind)


class Tables(NamedTuple):
    """Arrays that the kernels read. N stages on P ranks with V model chunks each, S token slices.

    Results are activations (0) and their gradients (1).
    """

    num_micro_batches: int
    reader: Numbers
    """[2, N] stage that reads the result of another; -1 if none does."""
    rank_of: Numbers
    """[N] rank of each stage."""
    stages: Numbers
    """[P, V] stages of each rank, first to last."""
    times: Numbers
    """[3, N, S] time of F, BI and BW."""
    activation: Numbers
    """[S] memory of a token slice on one stage, in activations of one micro-batch on one rank."""
    channel: Numbers
    """[2, N] number of the channel that a result takes; -1 where it stays on its rank."""
    sending: Numbers
    """[2, N, S] time for which the result keeps its channel busy."""
    latency: Numbers
    """[2, N] time from then until it is there."""
    free: Numbers
    """[channels] scratch: when each channel is free."""


@dataclass(frozen=True, eq=False)
class SchedulingProblem:
    """A pipeline to find op orders for."""

    shape: PipelineShape
    costs: OpCosts
    lengths: tuple[float, ...]
    """Shares of the token slices in the sequence."""
    memory_limit: float
    """Activations of one micro-batch that a rank may hold; infinite if there is none."""
    is_split: bool
    """Whether backwards may be in two parts: the costs have separate weight gradients."""
    tables: Tables
    flow: DataFlow

    @classmethod
    def of(
        cls,
        shape: PipelineShape,
        costs: OpCosts,
        memory_limit: float | None = None,
        lengths: Sequence[float] | None = None,
    ) -> "SchedulingProblem":
        """Make the arrays.

        Args:
            memory_limit: activations of one micro-batch that a rank may hold; None for no limit.
            lengths: tokens, or shares, of the token slices; None for equal ones.
        """
        if memory_limit is not None and not memory_limit >= 1:
            raise PlanError(
                f"memory limit {memory_limit} is less than one micro-batch, all of which is forward before its "
                "backward begins: give 1 or more"
            )
        lengths = (1.0,) * shape.num_token_slices if lengths is None else tuple(lengths)
        shape.check_lengths(lengths)
        shares = tuple(length / sum(lengths) for length in lengths)
        limit = inf if memory_limit is None else memory_limit
        is_split, tables = costs.weight_gradient is not None, _tables(shape, costs, shares)
        return cls(shape, costs, shares, limit, is_split, tables, DataFlow.of(shape))

    @property
    def num_units(self) -> int:
        """Token slices of all micro-batches."""
        return self.shape.num_micro_batches * self.shape.num_token_slices

    @property
    def num_ops(self) -> int:
        """Ops of all ranks, backwards in two parts."""
        return 3 * self.shape.num_stages * self.num_units

    @property
    def work(self) -> Numbers:
        """[P] time that each rank computes for."""
        by_stage = self.tables.times.sum(axis=(0, 2)) * self.shape.num_micro_batches
        return np.bincount(self.tables.rank_of, by_stage, self.shape.num_ranks)

    def numbered(self, orders: Sequence[Sequence[Op]]) -> list[Numbers]:
        """Return the ops of each rank as numbers: one array of [ops] for each."""
        codes = np.array([KINDS.index(kind) for kind in arrays.KINDS], np.int64)
        ranks = map(OpColumns.of, orders)
        return [
            (codes[ops.kind] * self.shape.num_stages + ops.stage) * self.num_units
            + ops.micro_batch * self.shape.num_token_slices
            + ops.token_slice
            for ops in ranks
        ]

    def named(self, rows: Sequence[Numbers]) -> tuple[tuple[Op, ...], ...]:
        """Return the ops of each rank, of which `rows` has the numbers: one array of [ops] for each."""
        return tuple(tuple(self._op(number) for number in row.tolist()) for row in rows)

    def _op(self, number: int) -> Op:
        place, unit = divmod(number, self.num_units)
        kind, stage = divmod(place, self.shape.num_stages)
        return Op(KINDS[kind], stage, *divmod(unit, self.shape.num_token_slices))


def _tables(shape: PipelineShape, costs: OpCosts, shares: Sequence[float]) -> Tables:
    times = [costs.forward, costs.backward]
    times.append(costs.weight_gradient or ((0.0,) * shape.num_token_slices,) * shape.num_stages)
    ways, rows = arrays.ways_of(shape), [arrays.CODE[kind] for kind in RESULTS]
    boundaries, travels = ways.boundaries[rows], ways.targets[rows] >= 0
    sending, latency = arrays.message_times(costs, shape)
    return Tables(
        shape.num_micro_batches,
        ways.readers[rows],
        arrays.ranks_of_stages(shape),
        np.array([list(shape.stages_of(rank)) for rank in range(shape.num_ranks)], np.int64),
        np.array(times, np.float64),
        np.array(shares, np.float64) / shape.num_model_chunks,
        np.where(travels, ways.channels[rows], -1),
        np.where(travels[..., None], sending[boundaries], 0.0),
        np.where(travels, latency[boundaries, 0], 0.0),
        np.zeros(int(ways.channels.max()) + 1),
    )


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

UNKNOWN = 1e300
"""Time of results that have not been scheduled yet."""


def _inlined(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
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


@dataclass(frozen=True, eq=False)
class NumberedOrders:
    """Op orders of all ranks as numbers."""

    rows: Numbers
    """[P, longest] ops of each rank; entries beyond `lengths` are unused."""
    lengths: Numbers
    """[P] ops of each rank: fewer where backwards are whole."""

    @classmethod
    def of(cls, orders: Sequence[Numbers]) -> "NumberedOrders":
        """Return the orders of which there is one array of [ops] for each rank."""
        lengths = np.array([len(order) for order in orders], np.int64)
        rows = np.full((len(orders), int(lengths.max())), -1, np.int64)
        for row, order in zip(rows, orders, strict=True):
            row[: len(order)] = order
        return cls(rows, lengths)

    def to_list(self) -> list[Numbers]:
        """Return one array of [ops] for each rank."""
        return [row[:length].copy() for row, length in zip(self.rows, self.lengths, strict=True)]


def replay(problem: SchedulingProblem, orders: NumberedOrders) -> float:
    """Return the makespan of orders; infinite if they deadlock."""
    starts, ends = np.zeros(orders.rows.shape), np.zeros(orders.rows.shape)
    ready = np.zeros((4 * problem.shape.num_stages + 1) * problem.num_units)
    makespan = replay_rows(problem.tables, problem.flow, orders.rows, orders.lengths, starts, ends, ready)
    return makespan if makespan < UNKNOWN else np.inf


def peaks(problem: SchedulingProblem, orders: NumberedOrders) -> Numbers:
    """Return the most that each rank holds, in activations of one micro-batch: [P]."""
    return np.array(
        [
            peak_of_row(problem.tables, problem.flow.live_change, row, length)
            for row, length in zip(orders.rows, orders.lengths, strict=True)
        ]
    )


def keeps_limit(problem: SchedulingProblem, orders: NumberedOrders) -> bool:
    """Return whether no rank holds more than the problem allows."""
    return bool(peaks(problem, orders).max() <= problem.memory_limit + ROUNDING)


@compiled
def peak_of_row(tables: Tables, live_change: Numbers, row: Numbers, length: int) -> float:
    """Return the most that one rank holds, in activations of one micro-batch.

    Args:
        live_change: [4] as in `DataFlow`.
        row: [longest] ops of the rank.
    """
    num_stages, num_token_slices = tables.times.shape[1:]
    per_kind = num_stages * tables.num_micro_batches * num_token_slices
    held = peak = 0.0
    for position in range(length):
        change = live_change[row[position] // per_kind]
        held += change * tables.activation[row[position] % num_token_slices]
        peak = max(peak, held)
    return peak


@compiled
def replay_rows(
    tables: Tables, flow: DataFlow, rows: Numbers, lengths: Numbers, starts: Numbers, ends: Numbers, ready: Numbers
) -> float:
    """Simulate orders.

    Args:
        rows: [P, longest] ops of each rank.
        lengths: [P] how many.
        starts: [P, longest] becomes the start of each op.
        ends: [P, longest] becomes its end.
        ready: [(4 N + 1) x units] becomes the time at which each result is there, as in `DataFlow`.

    Returns:
        Makespan; UNKNOWN if ranks wait for each other.
    """
    num_ranks = len(rows)
    num_stages, num_token_slices = tables.times.shape[1:]
    num_units = tables.num_micro_batches * num_token_slices
    reads, gives = flow.reads, flow.gives
    ready[:-num_units] = UNKNOWN
    tables.free[:] = 0.0
    clock = np.zeros(num_ranks)
    positions = np.zeros(num_ranks, np.int64)
    # Ranks that may be able to continue; one that cannot is listed again by the result that it waits for.
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
            if kind == 3:
                end = start + (tables.times[2, stage, token_slice] + tables.times[1, stage, token_slice])
            else:
                end = start + tables.times[kind, stage, token_slice]
            starts[rank, positions[rank]] = start
            ends[rank, positions[rank]] = end
            clock[rank] = end
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
