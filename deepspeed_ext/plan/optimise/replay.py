"""Plays op orders given as numbers, for the loops that change an order or a cost and play again.

`simulate.simulate` is the statement of what this computes, and tests hold the two equal. The arrays of a `Problem` are
read as they are, so that a changed order or a changed table costs nothing but the replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_ext.plan.optimise.kernel import UNKNOWN, hand_over, kernel
from deepspeed_ext.plan.optimise.problem import ROUNDING, Numbers, Problem, Tables


@dataclass(frozen=True, eq=False)
class Orders:
    """Op orders of all ranks as numbers.

    Attributes:
        rows: [P, longest] ops of each rank; what is beyond `lengths` means nothing.
        lengths: [P] ops of each rank: fewer where backwards are whole.
    """

    rows: Numbers
    lengths: Numbers

    @classmethod
    def of(cls, orders: Sequence[Numbers]) -> "Orders":
        """From one array for each rank."""
        lengths = np.array([len(order) for order in orders], np.int64)
        rows = np.full((len(orders), int(lengths.max())), -1, np.int64)
        for row, order in zip(rows, orders, strict=True):
            row[: len(order)] = order
        return cls(rows, lengths)

    def to_list(self) -> list[Numbers]:
        """One array for each rank."""
        return [row[:length].copy() for row, length in zip(self.rows, self.lengths, strict=True)]


def replay(problem: Problem, orders: Orders) -> float:
    """Makespan of orders; infinite if they deadlock."""
    starts, ends = np.zeros(orders.rows.shape), np.zeros(orders.rows.shape)
    arrival = np.zeros((2, problem.shape.num_stages, problem.num_units))
    turned = np.zeros((2, problem.shape.num_stages, problem.num_units), np.bool_)
    makespan = play_rows(problem.tables, orders.rows, orders.lengths, starts, ends, arrival, turned)
    return makespan if makespan < UNKNOWN else np.inf


def peaks(problem: Problem, orders: Orders) -> Numbers:
    """[P] most that each rank holds, in activations of one micro-batch."""
    return np.array(
        [peak_of_row(problem.tables, orders.rows[rank], orders.lengths[rank]) for rank in range(len(orders.rows))]
    )


def keeps_limit(problem: Problem, orders: Orders) -> bool:
    """Whether no rank holds more than the problem allows."""
    return bool(peaks(problem, orders).max() <= problem.memory_limit + ROUNDING)


@kernel
def peak_of_row(tables: Tables, row: Numbers, length: int) -> float:
    """Most that one rank holds."""
    num_stages, num_token_slices = tables.times.shape[1:]
    per_kind = num_stages * tables.num_micro_batches * num_token_slices
    held = peak = 0.0
    for position in range(length):
        kind = row[position] // per_kind
        room = tables.activation[row[position] % num_token_slices]
        if kind == 0:
            held += room
            peak = max(peak, held)
        elif kind >= 2:
            held -= room
    return peak


@kernel
def play_rows(
    tables: Tables, rows: Numbers, lengths: Numbers, starts: Numbers, ends: Numbers, arrival: Numbers, turned: Numbers
) -> float:
    """Play orders.

    Args:
        tables: of the problem.
        rows: [P, longest] ops of each rank.
        lengths: [P] how many.
        starts: [P, longest] becomes the start of each op.
        ends: [P, longest] becomes its end.
        arrival: [2, N, units] becomes the time at which each activation and gradient reaches the stage that reads it.
        turned: [2, N, units] becomes whether the forward, and the input gradient, of a unit has run.

    Returns:
        Makespan; UNKNOWN if ranks wait for each other.
    """
    num_ranks = len(rows)
    num_stages, num_token_slices = tables.times.shape[1:]
    num_units = tables.num_micro_batches * num_token_slices
    arrival[:] = UNKNOWN
    turned[:] = False
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
            unit = op % num_units
            stage = op // num_units % num_stages
            kind = op // num_units // num_stages
            token_slice = unit % num_token_slices
            start = clock[rank]
            if kind == 0:
                if token_slice > 0 and not turned[0, stage, unit - 1]:
                    break
                if stage > 0:
                    start = max(start, arrival[0, stage, unit])
            elif kind == 2:
                if not turned[1, stage, unit]:
                    break
            else:
                if not turned[0, stage, unit]:
                    break
                if token_slice < num_token_slices - 1 and not turned[1, stage, unit + 1]:
                    break
                if stage < num_stages - 1:
                    start = max(start, arrival[1, stage, unit])
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
            if kind != 2:
                result = 0 if kind == 0 else 1
                turned[result, stage, unit] = True
                reader = hand_over(tables, result, stage, unit, end, arrival)
                if reader >= 0 and not is_listed[reader]:
                    is_listed[reader] = True
                    runnable[num_runnable] = reader
                    num_runnable += 1
    return clock.max() if num_played == lengths.sum() else UNKNOWN
