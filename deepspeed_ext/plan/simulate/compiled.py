"""The fast simulator: op orders as arrays, simulated by compiled code for one set of costs after another.

    orders --CompiledOrders.of--> arrays --simulate(costs)--> SimulatedOrders: starts, ends, makespan, bubble
                                     '----simulate(other costs)--> ...

numba is imported when it is first needed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.memory import token_lengths
from deepspeed_ext.plan.ops import LIVE_CHANGE, Op, OpKind, PipelineShape, parts
from deepspeed_ext.plan.programs.host_copies import HostCopyPlan, HostCopySettings, TimedCopy
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.simulate.arrays import (
    KINDS,
    CopyEvents,
    Numbers,
    OpColumns,
    Wiring,
    compiled_loop,
    fits,
    message_times,
    wire,
)
from deepspeed_ext.plan.simulate.plain import STEP_PARTS, check_complete, check_orders, simulate
from deepspeed_ext.plan.timeline import Span, Timeline


@dataclass(frozen=True)
class SimulatedOrders:
    """When each op of compiled orders ran."""

    compiled: "CompiledOrders"
    starts: Numbers
    """[N] start of each op, rank after rank."""
    ends: Numbers
    """[N] end of each op."""
    host_copies: tuple[TimedCopy, ...] = ()
    """Copies to the host and back, by rank and start."""

    @property
    def makespan(self) -> float:
        """Time from the first op's start to the last op's end."""
        return float(self.ends.max() - self.starts.min())

    @property
    def bubble_ratio(self) -> float:
        """Idle time over ranks x makespan, in [0, 1)."""
        makespan = self.makespan
        busy = float((self.ends - self.starts).sum())
        return 1 - busy / (self.compiled.shape.num_ranks * makespan) if makespan else 0.0

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The ops of one rank, with their start and end."""
        own = slice(*self.compiled.bounds[rank : rank + 2].tolist())
        return tuple(map(Span, self.compiled.order(rank), self.starts[own].tolist(), self.ends[own].tolist()))

    def timeline(self) -> Timeline:
        """Return a timeline for drawings and the like, without transfers."""
        spans = tuple(map(self.spans, range(self.compiled.shape.num_ranks)))
        return Timeline(self.compiled.shape, spans, host_copies=self.host_copies)

    def with_host_copies(self, costs: OpCosts, settings: HostCopySettings) -> "SimulatedOrders":
        """Simulate the orders again, with the host copies that are planned on these times."""
        return self.compiled.simulate(costs, HostCopyPlan.of(self.spans, self.compiled.shape, settings))


@dataclass(frozen=True, eq=False)
class CompiledOrders:
    """Op orders of all ranks as arrays, one after the other; N ops. Make them with `of`."""

    shape: PipelineShape
    bounds: Numbers
    """[R + 1] where the ops of each rank begin and end."""
    columns: OpColumns
    wiring: Wiring
    """The results that they wait for, give and send."""

    @classmethod
    def of(cls, orders: Iterable[Sequence[Op]], shape: PipelineShape) -> "CompiledOrders":
        """Compile orders. Linear in the number of ops, and several times slower than a simulation.

        Args:
            orders: op order of each rank. Only one is needed at a time, so they may be generated on the way.
        """
        ranks = list(map(OpColumns.of, orders))
        bounds = np.cumsum([0, *(len(rank.kind) for rank in ranks)])
        columns = OpColumns.joined(ranks)
        if not fits(bounds, columns, shape):
            check_orders([columns.ops(first, last) for first, last in pairwise(bounds)], shape)  # raises the error
        return cls(shape, bounds, columns, wire(columns, shape))

    @classmethod
    def of_schedule(cls, schedule: Schedule, shape: PipelineShape) -> "CompiledOrders":
        """Generate the orders of a schedule and compile them."""
        return cls.of((list(schedule(shape, rank)) for rank in range(shape.num_ranks)), shape)

    def order(self, rank: int) -> list[Op]:
        """The ops of one rank."""
        return self.columns.ops(*self.bounds[rank : rank + 2])

    @property
    def orders(self) -> list[list[Op]]:
        """The ops of each rank."""
        return list(map(self.order, range(self.shape.num_ranks)))

    def check_complete(self) -> None:
        """Check that all ops of a training step are there."""
        units = self.shape.num_stages * self.shape.num_micro_batches * self.shape.num_token_slices
        counts = np.bincount(self.columns.kind, minlength=len(KINDS))
        computed = Counter[OpKind]()
        for code, kind in enumerate(KINDS):
            for part in parts(Op(kind, 0, 0, 0)):
                computed[part.kind] += int(counts[code])
        # No op is there twice, so each part is there for all token slices if there are as many.
        if any(computed[kind] < units for kind in STEP_PARTS):
            check_complete(self.orders, self.shape)

    def simulate(self, costs: OpCosts, host_copies: HostCopyPlan | None = None) -> SimulatedOrders:
        """Simulate: the times equal `simulate.simulate`'s to the last bit."""
        num_ops = int(self.bounds[-1])
        starts, ends = np.zeros(num_ops), np.zeros(num_ops)
        wiring = self.wiring
        copies = CopyEvents.of(host_copies, self.bounds)
        copied = np.zeros(3 * copies.num_copies)
        ready, free = np.full(wiring.num_results, -1.0), np.zeros(wiring.num_channels)
        lanes = np.zeros(2 * self.shape.num_ranks)
        num_done = compiled_loop()(
            *(self.bounds, *wiring[:5], *self._times(costs), *copies, ready, free, lanes, copied, starts, ends)
        )
        if num_done < num_ops:
            simulate(self.orders, self.shape, costs)  # raises the error
            raise AssertionError("the plain simulator ends where the fast one does not")
        return SimulatedOrders(self, starts, ends, tuple(copies.timed(host_copies, copied)))

    def peak_activation(self, lengths: Sequence[float] | None = None) -> tuple[float, ...]:
        """Per rank its peak of activations, equal to `memory.peak_activation`; it needs no costs."""
        lengths = token_lengths(lengths, self.shape)
        signs = np.array([LIVE_CHANGE[kind] for kind in KINDS])
        changes = signs[self.columns.kind] * np.array(lengths)[self.columns.token_slice]
        whole = sum(lengths) * self.shape.num_model_chunks
        bounds = self.bounds.tolist()
        peaks = (np.cumsum(changes[first:last]).max(initial=0) for first, last in pairwise(bounds))
        return tuple(float(peak / whole) for peak in peaks)

    def _times(self, costs: OpCosts) -> tuple[Numbers, Numbers, Numbers]:
        """Durations, and times of messages on their channel and after it: [N] each."""
        durations = np.zeros((len(KINDS), self.shape.num_stages, self.shape.num_token_slices))
        for code in np.flatnonzero(np.bincount(self.columns.kind)).tolist():
            durations[code] = costs.durations(KINDS[code])
        sending, latency = message_times(costs, self.shape)
        messages = self.wiring.message_costs
        return durations.reshape(-1)[self.wiring.op_costs], sending.reshape(-1)[messages], latency.reshape(-1)[messages]
