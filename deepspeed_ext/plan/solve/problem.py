"""The problem of the optimiser, its replays, and the memory of its orders.

`replay` simulates orders for the loops that change an order or a cost and simulate again. numba is imported with this
file, and only the solvers import this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.simulate import loop
from deepspeed_ext.plan.simulate.arrays import DataFlow, Numbers, Tables, compiled, data_flow, empty_results
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.simulate.host_copies import NO_COPIES

ROUNDING = 1e-9
"""How far sums of shares may be over the limit, in activations of one micro-batch."""


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
        is_split, tables = costs.weight_gradient is not None, Tables.of(shape, costs, shares)
        return cls(shape, costs, shares, limit, is_split, tables, data_flow(shape))

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
        return np.bincount(self.tables.ways.rank_of, by_stage, self.shape.num_ranks)


def replay(problem: SchedulingProblem, orders: CompiledOrders) -> float:
    """Return the makespan of orders; infinite if they deadlock."""
    starts, ends = np.zeros((2, *orders.rows.shape))
    ready = empty_results(problem.shape)
    order = orders.rows, orders.lengths
    makespan = loop.replay(problem.tables, problem.flow, *order, starts, ends, ready, NO_COPIES, NO_COPIES.copying)
    return makespan if makespan < loop.UNKNOWN else inf


def peaks(problem: SchedulingProblem, orders: CompiledOrders) -> Numbers:
    """Return the most that each rank holds, in activations of one micro-batch: [P]."""
    return np.array(
        [
            peak_of_row(problem.tables, problem.flow.live_change, row, length)
            for row, length in zip(orders.rows, orders.lengths, strict=True)
        ]
    )


def keeps_limit(problem: SchedulingProblem, orders: CompiledOrders) -> bool:
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
