"""The fast simulator: op orders as arrays, played by compiled code for one set of costs after another.

    orders --CompiledOrders.of--> arrays --play(costs)--> Playback: starts, ends, makespan, bubble
                                     '----play(other costs)--> ...

Which result an op waits for is looked up once, in the table `dependencies.DEPENDENCIES` that the plain simulator reads
too; what is left for a replay is a loop over numbers. A search that changes costs, such as the lengths of token slices,
compiles once and replays.

numpy and numba are imported when they are first needed. Without numba the same loop runs as plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.memory import token_lengths
from deepspeed_ext.plan.ops import LIVE_CHANGE, Op, PipelineShape
from deepspeed_ext.plan.schedules import Schedule, rank_orders
from deepspeed_ext.plan.simulate.plain import check_orders, simulate
from deepspeed_ext.plan.simulate.play import compiled_play, play
from deepspeed_ext.plan.simulate.wiring import CODE, KINDS, OpColumns, Wiring, fits, wire
from deepspeed_ext.plan.timeline import Span, Timeline

if TYPE_CHECKING:
    from deepspeed_ext.plan.simulate.wiring import Numbers


@dataclass(frozen=True)
class Playback:
    """When each op of compiled orders ran.

    Attributes:
        compiled: what was played.
        starts: [N] start of each op, rank after rank.
        ends: [N] end of each op.
    """

    compiled: "CompiledOrders"
    starts: "Numbers"
    ends: "Numbers"

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

    def timeline(self) -> Timeline:
        """The same as a timeline for drawings and the like, without transfers."""
        starts, ends = self.starts.tolist(), self.ends.tolist()
        bounds = self.compiled.bounds.tolist()
        return Timeline(
            self.compiled.shape,
            tuple(
                tuple(map(Span, order, starts[first:last], ends[first:last]))
                for order, (first, last) in zip(self.compiled.orders, pairwise(bounds), strict=True)
            ),
        )


@dataclass(frozen=True, eq=False)
class CompiledOrders:
    """Op orders of all ranks as arrays, one after the other; N ops. Make them with `of`.

    Attributes:
        orders: what was compiled.
        shape: extent of the pipeline.
        bounds: [R + 1] where the ops of each rank begin and end.
        columns: the ops.
        wiring: what they wait for, give and send.
    """

    orders: Sequence[Sequence[Op]]
    shape: PipelineShape
    bounds: "Numbers"
    columns: OpColumns
    wiring: Wiring

    @classmethod
    def of(cls, orders: Sequence[Sequence[Op]], shape: PipelineShape) -> "CompiledOrders":
        """Compile orders. Linear in the number of ops, and several times slower than a replay.

        Raises:
            PlanError: as `simulate.check_orders` does.
        """
        import numpy as np

        bounds = np.cumsum([0, *map(len, orders)])
        kinds, *indices = list(zip(*chain.from_iterable(orders), strict=True)) or [()] * 4
        kind = np.fromiter(map(CODE.__getitem__, kinds), np.int8, bounds[-1])
        columns = OpColumns(kind, *(np.array(index, np.int32) for index in indices))
        if not fits(bounds, columns, shape):
            check_orders(orders, shape)  # says what is wrong
        return cls(orders, shape, bounds, columns, wire(columns, shape))

    @classmethod
    def of_schedule(cls, schedule: Schedule, shape: PipelineShape) -> "CompiledOrders":
        """Generate the orders of a schedule and compile them."""
        return cls.of(rank_orders(schedule, shape), shape)

    def play(self, costs: OpCosts) -> Playback:
        """When each op runs: the same as `simulate.simulate`, to the last bit.

        Raises:
            ScheduleDeadlock, PlanError: as `simulate` does.
        """
        import numpy as np

        num_ops = int(self.bounds[-1])
        starts, ends = np.zeros(num_ops), np.zeros(num_ops)
        wiring = self.wiring
        arrays = {
            "bounds": self.bounds,
            "needs": wiring.needs,
            "gives": wiring.gives,
            "arrives": wiring.arrives,
            "targets": wiring.targets,
            "channels": wiring.channels,
            **self._times(costs),
            "ready": np.full(wiring.num_results, -1.0),
            "free": np.zeros(wiring.num_channels),
            "starts": starts,
            "ends": ends,
        }
        kernel = compiled_play()
        if kernel is not None:
            played = kernel(*arrays.values())
        else:
            # Plain Python is quicker with lists.
            lists = {name: array.tolist() for name, array in arrays.items()}
            played = play(**lists)
            starts, ends = np.array(lists["starts"]), np.array(lists["ends"])
        if played < num_ops:
            simulate(self.orders, self.shape, costs)  # says which ops wait for which
            raise AssertionError("the plain simulator plays what the fast one does not")
        return Playback(self, starts, ends)

    def peak_activation(self, lengths: Sequence[float] | None = None) -> tuple[float, ...]:
        """Per rank the most activation it holds, as `memory.peak_activation` says; it needs no costs."""
        import numpy as np

        lengths = token_lengths(lengths, self.shape)
        signs = np.array([LIVE_CHANGE[kind] for kind in KINDS])
        changes = signs[self.columns.kind] * np.array(lengths)[self.columns.token_slice]
        whole = sum(lengths) * self.shape.num_model_chunks
        bounds = self.bounds.tolist()
        peaks = (np.cumsum(changes[first:last]).max(initial=0) for first, last in pairwise(bounds))
        return tuple(float(peak / whole) for peak in peaks)

    def _times(self, costs: OpCosts) -> "dict[str, Numbers]":
        """Times of each op and of its message."""
        import numpy as np

        num_token_slices = self.shape.num_token_slices
        durations = np.zeros((len(KINDS), self.shape.num_stages, num_token_slices))
        for code in np.flatnonzero(np.bincount(self.columns.kind)).tolist():
            durations[code] = costs.durations(KINDS[code])
        # At least one: results that stay where they are have the first for their boundary.
        boundaries = range(max(self.shape.last_stage, 1))
        sending, latency = np.zeros((2, len(boundaries), num_token_slices))
        if self.shape.last_stage:
            latency[:] = [[costs.latency(boundary)] for boundary in boundaries]
            sending[:] = [[costs.sending_time(each, one) for one in range(num_token_slices)] for each in boundaries]
        return {
            "durations": durations.reshape(-1)[self.wiring.op_costs],
            "sending": sending.reshape(-1)[self.wiring.message_costs],
            "latency": latency.reshape(-1)[self.wiring.message_costs],
        }
