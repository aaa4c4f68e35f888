"""Simulates the op orders of all pipeline ranks, or explains their deadlock.

`compiled` simulates the same orders many times faster, with times that are equal to the last bit, for searches. Both
read the dependencies of ops from one table, `ops.DEPENDENCIES`.
"""

from collections import defaultdict, deque
from collections.abc import Container, Sequence
from itertools import product
from typing import TYPE_CHECKING

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, parts, prerequisites, reading_stage, result
from deepspeed_ext.plan.programs.host_copies import CopyLanes, HostCopySettings
from deepspeed_ext.plan.programs.program import Channel, reductions_beside
from deepspeed_ext.plan.timeline import Span, Timeline, Transfer

if TYPE_CHECKING:
    from deepspeed_ext.plan.simulate.host_copies import HostCopyPlan

__all__ = ["check_complete", "check_order", "check_orders", "simulate", "simulate_with_host_copies"]


def simulate(
    orders: Sequence[Sequence[Op]], shape: PipelineShape, costs: OpCosts, host_copies: "HostCopyPlan | None" = None
) -> Timeline:
    """Start every op as soon as its rank is free and its prerequisites are there.

    A result for another rank leaves as its op ends, or once its channel has sent those before it, and travels while
    both ranks compute, as the engine's messages do.

    Args:
        host_copies: copies to the host and back; a rank waits for those that it reads. None for no copies.

    Raises:
        ScheduleDeadlock: if ranks wait for each other; names the results that each of them waits for.
    """
    check_orders(orders, shape)
    ranks = [shape.rank_of(stage) for stage in range(shape.num_stages)]
    network = _Network(shape, costs)
    # When each result is there on the rank of its op, and on the rank that reads it.
    end: dict[Op, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    # When each rank is free for its next op.
    clocks = [0.0] * len(orders)
    lanes = [CopyLanes() for _ in orders]
    if (plan := host_copies) is not None:
        lanes = [CopyLanes(copies.copies(), plan.to_host, plan.from_host) for copies in plan.ranks]
    # A rank that must wait is listed under the result it waits for; the end of that op resumes it. The work is thus
    # linear in the number of ops, whatever their order.
    waiting: dict[Op, list[int]] = {}
    runnable = deque(range(len(orders)))
    while runnable:
        rank = runnable.popleft()
        order, done = orders[rank], spans[rank]
        for op in order[len(done) :]:
            start = max(clocks[rank], lanes[rank].fetched_at(len(done)))
            for needed in prerequisites(op, shape):
                if needed not in end:
                    waiting.setdefault(needed, []).append(rank)
                    break
                there = end[needed] if ranks[needed.stage] == rank else network.arrival[needed]
                start = max(start, there)
            else:
                ended = start + costs.duration(op)
                given = result(op)
                end[given] = ended
                network.send(given, ended)
                done.append(Span(op, start, ended))
                clocks[rank] = lanes[rank].post(len(done), ended)
                runnable.extend(waiting.pop(given, ()))
                continue
            break
    if waiting:
        raise ScheduleDeadlock(_describe_deadlock(orders, [len(done) for done in spans], shape, end))
    return Timeline(
        shape,
        tuple(map(tuple, spans)),
        transfers=network.transfers(),
        reductions=tuple(reductions_beside(spans, shape, costs.reductions)),
        host_copies=tuple(copy for of_rank in lanes for copy in of_rank.timed()),
    )


def simulate_with_host_copies(
    orders: Sequence[Sequence[Op]], shape: PipelineShape, costs: OpCosts, settings: HostCopySettings
) -> Timeline:
    """Return the timeline with the host copies that are planned on the timeline without them."""
    from deepspeed_ext.plan.simulate.host_copies import HostCopyPlan, TimedColumns

    without = simulate(orders, shape, costs)
    return simulate(orders, shape, costs, HostCopyPlan.of(map(TimedColumns.of, without.spans), shape, settings))


class _Network:
    """The channels between ranks: messages of one channel leave one after the other, in the order of their ops."""

    def __init__(self, shape: PipelineShape, costs: OpCosts) -> None:
        self.arrival: dict[Op, float] = {}
        """When each result that left is there."""
        self._shape, self._costs = shape, costs
        self._ranks = [shape.rank_of(stage) for stage in range(shape.num_stages)]
        self._free: dict[Channel, float] = defaultdict(float)
        self._transfers: dict[Channel, list[Transfer]] = defaultdict(list)

    def send(self, given: Op, time: float) -> None:
        """Send a result at a time, if another rank reads it."""
        target = reading_stage(given, self._shape)
        if target is None or self._ranks[target] == self._ranks[given.stage]:
            return
        channel = Channel(self._ranks[given.stage], self._ranks[target], given.kind)
        boundary = min(given.stage, target)
        start = max(time, self._free[channel])
        sent = start + self._costs.sending_time(boundary, given.token_slice)
        there = sent + self._costs.latency(boundary)
        self._free[channel] = sent
        self.arrival[given] = there
        # Those that take no time too where one may have to wait for another: slack is counted along them.
        if there > time or isinstance(self._costs.transfer, TransferCosts):
            self._transfers[channel].append(Transfer(given, channel, start, there, sent))

    def transfers(self) -> tuple[Transfer, ...]:
        """All but those that can never take time."""
        return tuple(transfer for channel in sorted(self._transfers) for transfer in self._transfers[channel])


def check_orders(orders: Sequence[Sequence[Op]], shape: PipelineShape) -> None:
    """Check orders for a shape."""
    if len(orders) != shape.num_ranks:
        raise PlanError(f"{len(orders)} op orders for {shape.num_ranks} pipeline ranks: give one for each rank")
    for rank, order in enumerate(orders):
        check_order(order, shape, rank)


def check_order(order: Sequence[Op], shape: PipelineShape, rank: int) -> None:
    """Check the order of one rank for a shape; see `check_orders`."""
    stages = set(shape.stages_of(rank))
    seen: set[Op] = set()
    for op in order:
        if not isinstance(op, Op):
            raise PlanError(f"{op!r} in the order of rank {rank} is not an op: yield Op(...), or Op.parse('2F0.3')")
        inside = op.micro_batch < shape.num_micro_batches and op.token_slice < shape.num_token_slices
        if op.stage not in stages or not inside:
            raise PlanError(
                f"op {op} does not belong to rank {rank} in a pipeline of {shape}: remove it from that order"
            )
        computes = parts(op)
        if not seen.isdisjoint(computes):
            raise PlanError(f"op {op} appears twice in the order of rank {rank}, whole or in part: remove one of them")
        seen.update(computes)


def check_complete(orders: Sequence[Sequence[Op]], shape: PipelineShape) -> None:
    """Check that all ops of a training step are there; orders of evaluation have no backward, and are not complete."""
    check_orders(orders, shape)
    for rank, order in enumerate(orders):
        computed = {part for op in order for part in parts(op)}
        micro_batches, token_slices = range(shape.num_micro_batches), range(shape.num_token_slices)
        for unit in product(shape.stages_of(rank), micro_batches, token_slices):
            missing = [kind for kind in STEP_PARTS if Op(kind, *unit) not in computed]
            if missing:
                # Neither part of a backward: most likely the whole backward is missing.
                kind = OpKind.BACKWARD if len(missing) > 1 and missing[0] in _HALVES else missing[0]
                raise PlanError(f"op {Op(kind, *unit)} is missing in the order of rank {rank}: add it")


_HALVES = (OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT)
STEP_PARTS = (OpKind.FORWARD, *_HALVES)
"""Kinds of the parts that a training step has of each token slice on each stage."""


def _describe_deadlock(
    orders: Sequence[Sequence[Op]], positions: Sequence[int], shape: PipelineShape, done: Container[Op]
) -> str:
    """Name, for every rank that is not done, its op and the ops that this waits for."""
    named = {result(op): op for order in orders for op in order}
    stuck = []
    for rank, (order, position) in enumerate(zip(orders, positions, strict=True)):
        if position < len(order):
            op = order[position]
            missing = [str(named.get(needed, needed)) for needed in prerequisites(op, shape) if needed not in done]
            stuck.append(f"rank {rank} at {op} waits for {' and '.join(missing)}")
    return f"the schedule deadlocks: {'; '.join(stuck)}; reorder these ops"
