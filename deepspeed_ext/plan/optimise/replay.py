"""Simulates op orders given as numbers, for the loops that change an order or a cost and simulate again.

`simulate.simulate` is the statement of what this computes, and tests hold the two equal. The arrays of a
`SchedulingProblem` are read as they are, so that a changed order or a changed table costs nothing but the replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_ext.plan.optimise.kernel import UNKNOWN, available_at, hand_over, kernel
from deepspeed_ext.plan.optimise.problem import ROUNDING, DataFlow, Numbers, SchedulingProblem, Tables


@dataclass(frozen=True, eq=False)
class NumberedOrders:
    """Op orders of all ranks as numbers."""

    rows: Numbers
    """[P, longest] ops of each rank; what is beyond `lengths` means nothing."""
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


@kernel
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


@kernel
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
    # Ranks that may be able to go on; one that cannot is put back by what it waits for.
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
