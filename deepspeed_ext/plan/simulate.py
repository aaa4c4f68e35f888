"""Plays the op orders of all stages against the clock, or says why they cannot be played."""

from collections import deque
from collections.abc import Container, Sequence

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.dependencies import prerequisites
from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.timeline import Span, Timeline


def simulate(orders: Sequence[Sequence[Op]], shape: PipelineShape, costs: OpCosts) -> Timeline:
    """Start every op as soon as its stage is free and its prerequisites are done.

    A result of another stage arrives `costs.transfer` after its op ends; transfers overlap with compute, as the
    engine's do.

    Args:
        orders: op order of each stage, as `schedules.stage_orders` gives them.
        shape: extent of the pipeline.
        costs: times of the ops.

    Raises:
        ScheduleDeadlock: if the orders cannot be played to their end; names what each stuck stage waits for.
        PlanError: if an op stands on another stage's order, or twice.
    """
    check_orders(orders, shape)
    end: dict[Op, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    # A stage that cannot go on parks under the op it waits for; the end of that op wakes it. The work is thus
    # linear in the number of ops, whatever their order.
    waiting: dict[Op, list[int]] = {}
    runnable = deque(range(len(orders)))
    while runnable:
        stage = runnable.popleft()
        order, done = orders[stage], spans[stage]
        clock = done[-1].end if done else 0.0
        for op in order[len(done) :]:
            needs = prerequisites(op, shape)
            missing = next((needed for needed in needs if needed not in end), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(stage)
                break
            arrivals = (end[needed] + (costs.transfer if needed.stage != stage else 0.0) for needed in needs)
            start = max(clock, *arrivals) if needs else clock
            clock = end[op] = start + costs.duration(op)
            done.append(Span(op, start, clock))
            runnable.extend(waiting.pop(op, ()))
    if waiting:
        raise ScheduleDeadlock(_describe_deadlock(orders, [len(done) for done in spans], shape, end))
    return Timeline(shape, tuple(tuple(stage) for stage in spans))


def check_orders(orders: Sequence[Sequence[Op]], shape: PipelineShape) -> None:
    """Hold orders against the shape.

    Raises:
        PlanError: if a stage has no order, or an op stands outside the shape, on another stage's order, or twice.
    """
    if len(orders) != shape.num_stages:
        raise PlanError(f"{len(orders)} op orders for {shape.num_stages} stages: give one for each stage")
    for stage, order in enumerate(orders):
        seen = set()
        for op in order:
            inside = op.micro_batch < shape.num_micro_batches and op.token_slice < shape.num_token_slices
            if op.stage != stage or not inside:
                raise PlanError(f"op {op} does not belong to stage {stage} of {shape}: remove it from that order")
            if op in seen:
                raise PlanError(f"op {op} stands twice in the order of stage {stage}: remove one of them")
            seen.add(op)


def _describe_deadlock(
    orders: Sequence[Sequence[Op]], positions: Sequence[int], shape: PipelineShape, done: Container[Op]
) -> str:
    """Say for every stage that is not done which op it is at, and which op it waits for."""
    stuck = []
    for stage, (order, position) in enumerate(zip(orders, positions, strict=True)):
        if position < len(order):
            op = order[position]
            missing = [str(needed) for needed in prerequisites(op, shape) if needed not in done]
            stuck.append(f"stage {stage} at {op} waits for {' and '.join(missing)}")
    return f"the schedule deadlocks: {'; '.join(stuck)}; reorder these ops"
