"""The fast simulator: op orders as numbers, simulated by compiled code for one set of costs after another.

    orders --CompiledOrders.of--> numbers --simulate(costs)--> SimulatedOrders: starts, ends, makespan, bubble
                                     '----simulate(other costs)--> ...

`arrays` has the numbers of ops. Solvers change such orders, and simulate them by the same loop, `loop.replay`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.memory import token_lengths
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.host_copies import TimedCopy
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.simulate import STEP_PARTS, check_complete, check_orders, simulate
from deepspeed_ext.plan.simulate.arrays import (
    CODE,
    KINDS,
    NOTHING,
    PARTS,
    Numbers,
    OpColumns,
    Tables,
    data_flow,
    empty_results,
)
from deepspeed_ext.plan.simulate.host_copies import NO_COPIES, CopyEvents, HostCopyPlan, TimedColumns
from deepspeed_ext.plan.timeline import Span, Timeline


@dataclass(frozen=True)
class SimulatedOrders:
    """When each op of compiled orders ran."""

    compiled: "CompiledOrders"
    starts: Numbers
    """[P, longest] start of each op; 0 beyond the ops of a rank."""
    ends: Numbers
    """[P, longest] end of each op; 0 beyond the ops of a rank."""
    plan: HostCopyPlan | None
    """Host copies that ran beside the ops."""
    copies: CopyEvents
    """The same as the loop has read them."""
    copied: Numbers
    """[3 * copies] when each was copied to the host and back, and dropped, as in `loop.replay`."""

    @property
    def makespan(self) -> float:
        """Time from the first op's start, which is 0, to the last op's end."""
        return float(self.ends.max())

    @property
    def bubble_ratio(self) -> float:
        """Idle time over ranks x makespan, in [0, 1)."""
        makespan = self.makespan
        busy = float((self.ends - self.starts).sum())
        return 1 - busy / (self.compiled.shape.num_ranks * makespan) if makespan else 0.0

    @cached_property
    def host_copies(self) -> tuple[TimedCopy, ...]:
        """Copies to the host and back, by rank and start."""
        return () if self.plan is None else tuple(self.copies.timed(self.plan, self.copied))

    def columns(self) -> Iterator[TimedColumns]:
        """Yield the ops of each rank, with their start and end."""
        for rank, length in enumerate(self.compiled.lengths):
            yield TimedColumns(self.compiled.columns(rank), self.starts[rank, :length], self.ends[rank, :length])

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The ops of one rank, with their start and end."""
        order = self.compiled.order(rank)
        times = (each[rank, : len(order)].tolist() for each in (self.starts, self.ends))
        return tuple(map(Span, order, *times))

    def timeline(self) -> Timeline:
        """Return a timeline for drawings and the like, without transfers."""
        spans = tuple(map(self.spans, range(self.compiled.shape.num_ranks)))
        return Timeline(self.compiled.shape, spans, host_copies=self.host_copies)


@dataclass(frozen=True, eq=False)
class CompiledOrders:
    """Op orders of all ranks as numbers."""

    shape: PipelineShape
    rows: Numbers
    """[P, longest] ops of each rank; entries beyond `lengths` are unused."""
    lengths: Numbers
    """[P] ops of each rank: fewer where backwards are whole."""

    @classmethod
    def of(cls, orders: Iterable[Sequence[Op]], shape: PipelineShape) -> "CompiledOrders":
        """Compile orders. Linear in the number of ops, and several times slower than a simulation.

        Args:
            orders: op order of each rank. Only one is needed at a time, so they may be generated on the way.
        """
        ranks = list(map(OpColumns.of, orders))
        lengths = [len(rank.kind) for rank in ranks]
        columns = OpColumns(*map(np.concatenate, zip(*ranks, strict=True)))
        if len(ranks) != shape.num_ranks or not columns.fit(np.repeat(np.arange(len(ranks)), lengths), shape):
            check_orders([rank.ops() for rank in ranks], shape)  # raises the error
        extents = (len(KINDS), shape.num_stages, shape.num_micro_batches, shape.num_token_slices)
        return cls.of_numbers(np.split(np.ravel_multi_index(columns, extents), np.cumsum(lengths[:-1])), shape)

    @classmethod
    def of_schedule(cls, schedule: Schedule, shape: PipelineShape) -> "CompiledOrders":
        """Generate the orders of a schedule and compile them."""
        return cls.of((list(schedule(shape, rank)) for rank in range(shape.num_ranks)), shape)

    @classmethod
    def of_numbers(cls, ranks: Sequence[Numbers], shape: PipelineShape) -> "CompiledOrders":
        """Return the orders of which there is one array of [ops] for each rank."""
        lengths = np.array(list(map(len, ranks)), np.int64)
        rows = np.full((len(ranks), int(lengths.max())), NOTHING, np.int64)
        for row, order in zip(rows, ranks, strict=True):
            row[: len(order)] = order
        return cls(shape, rows, lengths)

    def numbers(self) -> list[Numbers]:
        """Return one array of [ops] for each rank."""
        return [row[:length].copy() for row, length in zip(self.rows, self.lengths, strict=True)]

    def columns(self, rank: int) -> OpColumns:
        """The ops of one rank in columns."""
        extents = (len(KINDS), self.shape.num_stages, self.shape.num_micro_batches, self.shape.num_token_slices)
        return OpColumns(*np.unravel_index(self.rows[rank, : self.lengths[rank]], extents))

    def order(self, rank: int) -> list[Op]:
        """The ops of one rank."""
        return self.columns(rank).ops()

    @property
    def orders(self) -> list[list[Op]]:
        """The ops of each rank."""
        return list(map(self.order, range(self.shape.num_ranks)))

    @property
    def _num_ops_of_kind(self) -> int:
        """Numbers of ops of one kind, from the first to the last."""
        return self.shape.num_stages * self.shape.num_micro_batches * self.shape.num_token_slices

    @cached_property
    def _counts(self) -> Counter[OpKind]:
        """Ops of each kind."""
        counts = np.bincount((self.rows // self._num_ops_of_kind).reshape(-1) + 1, minlength=len(KINDS) + 1)[1:]
        return Counter(dict(zip(KINDS, counts.tolist(), strict=True)))

    def check_complete(self) -> None:
        """Check that all ops of a training step are there."""
        # No op is there twice, so each part is there for all token slices if there are as many.
        found = (sum(self._counts[kind] for kind in KINDS if CODE[part] in PARTS[kind]) for part in STEP_PARTS)
        if min(found) < self._num_ops_of_kind:
            check_complete(self.orders, self.shape)

    def simulate(self, costs: OpCosts, host_copies: HostCopyPlan | None = None) -> SimulatedOrders:
        """Simulate: the times equal `simulate.simulate`'s to the last bit."""
        from deepspeed_ext.plan.simulate.loop import UNKNOWN, replay

        if costs.weight_gradient is None and self._counts[OpKind.WEIGHT_GRADIENT]:
            costs.durations(OpKind.WEIGHT_GRADIENT)  # raises the error
        starts, ends = np.zeros((2, *self.rows.shape))
        copies = NO_COPIES if host_copies is None else CopyEvents.of(host_copies, self.rows.shape[1])
        copied, ready = np.zeros(3 * len(copies.copying) // 2), empty_results(self.shape)
        tables, flow = Tables.of(self.shape, costs, token_lengths(None, self.shape)), data_flow(self.shape)
        if replay(tables, flow, self.rows, self.lengths, starts, ends, ready, copies, copied) >= UNKNOWN:
            simulate(self.orders, self.shape, costs)  # raises the error
            raise AssertionError("the plain simulator ends where the fast one does not")
        return SimulatedOrders(self, starts, ends, host_copies, copies, copied)

    def peak_activation(self, lengths: Sequence[float] | None = None) -> tuple[float, ...]:
        """Per rank its peak of activations, equal to `memory.peak_activation`; it needs no costs."""
        lengths = token_lengths(lengths, self.shape)
        signs, tokens = data_flow(self.shape).live_change, np.array(lengths)
        whole = sum(lengths) * self.shape.num_model_chunks
        changes = (signs[row // self._num_ops_of_kind] * tokens[row % len(tokens)] for row in self.numbers())
        peaks = (np.cumsum(of_rank).max(initial=0) for of_rank in changes)
        return tuple(float(peak / whole) for peak in peaks)
