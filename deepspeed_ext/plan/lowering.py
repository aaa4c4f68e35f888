"""Lowers a schedule to one program per pipeline rank: ops, transfers and buffers, ready to run.

    schedule --simulate--> global order --place transfers--> instructions --assign buffers--> Program

The global order is that of op starts in the simulated timeline, one list for all ranks. Each rank's program is a
part of it in the same order, so the first unfinished op of that list can always run: everything it waits for comes
before it. `check_programs` plays the programs to see that this holds:

- a send never waits: it is posted right after its op, and travels while the next ops compute;
- a receive never waits either: it is posted one op ahead of its consumer; only the consumer waits;
- a sent tensor is dropped once its send is complete, and a rank waits for that only where the global order says
  that the receiver had come that far one op ago;
- messages match by their order alone, as NCCL wants: on the channel from one rank to another, receives are posted
  in the order in which the other rank sends;
- between two stages of one rank nothing travels: the result is passed on.

    stage 0 | [F0.0 ....] send [F0.1 ....] send   complete 0.0
    stage 1 | receive 0.0       receive 0.1 [F0.0 ....] receive 1.0 [F0.1 ....]
                                ^ the message of F0.1 travels under F0.0
"""

from collections import defaultdict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from heapq import heappop, heappush

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.dependencies import received, result
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.programs import (
    COMPLETE,
    COMPUTE,
    PASS,
    RECEIVE,
    SEND,
    UNBUFFERED,
    Channel,
    Instruction,
    InstructionKind,
    Program,
    channel_of,
    check_programs,
)
from deepspeed_ext.plan.reductions import with_reductions
from deepspeed_ext.plan.schedules import Schedule, rank_orders
from deepspeed_ext.plan.simulate import simulate

_Step = tuple[InstructionKind, Op]
"""An instruction before it has a buffer, and the op that it is or serves."""


def lower(schedule: Schedule, shape: PipelineShape, *, loading_ranks: Container[int] | None = None) -> list[Program]:
    """Lower a schedule to one program per pipeline rank, and check that they run to their end.

    Args:
        schedule: order of the ops.
        shape: of the pipeline.
        loading_ranks: ranks that take micro-batches from the data iterator; None for those of the first and the last
            stage, which read tokens and labels.

    Raises:
        ScheduleDeadlock: if the schedule, or the placement of its transfers, would leave ranks waiting for each other.
    """
    orders = rank_orders(schedule, shape)
    if loading_ranks is None:
        loading_ranks = {shape.rank_of(0), shape.rank_of(shape.last_stage)}
    placed = _place_transfers(orders, shape, loading_ranks)
    programs = [with_reductions(_assign_buffers(rank, steps)) for rank, steps in enumerate(placed)]
    check_programs(programs, shape)
    return programs


def global_order(orders: Sequence[Sequence[Op]], shape: PipelineShape) -> list[Op]:
    """All ops of all ranks in one order that keeps every prerequisite: by simulated start, with equal costs.

    Raises:
        ScheduleDeadlock: if there is none.
    """
    timeline = simulate(orders, shape, OpCosts.uniform(shape, weight_gradient=1.0))
    spans = ((span.start, rank, span.op) for rank, spans in enumerate(timeline.spans) for span in spans)
    return [op for *_, op in sorted(spans, key=lambda entry: entry[:2])]


def _place_transfers(
    orders: Sequence[Sequence[Op]], shape: PipelineShape, loading_ranks: Container[int]
) -> list[list[_Step]]:
    """Per rank, its ops with loads and transfers among them, each beside the op it serves."""
    ordered = global_order(orders, shape)
    turn = {op: position for position, op in enumerate(ordered)}
    consumer = {needed: op for op in ordered if (needed := received(op, shape)) is not None}
    brings = {op: channel for op in consumer.values() if (channel := channel_of(op, shape)) is not None}
    # Receives on a channel stand in the order of its sends, which is the order of the producers.
    incoming: dict[Channel, deque[Op]] = defaultdict(deque)
    for producer in ordered:
        if (reader := consumer.get(result(producer))) is not None:
            incoming[brings[reader]].append(reader)
    return [
        _place_on_rank(order, rank in loading_ranks, turn, consumer, brings, incoming)
        for rank, order in enumerate(orders)
    ]


def _place_on_rank(
    order: Sequence[Op],
    loads: bool,
    turn: Mapping[Op, int],
    consumer: Mapping[Op, Op],
    brings: Mapping[Op, Channel],
    incoming: Mapping[Channel, deque[Op]],
) -> list[_Step]:
    posted: set[Op] = set()

    def receives(op: Op) -> Iterator[_Step]:
        """The receive that an op waits for, after those that the channel brings before it."""
        channel = brings.get(op)
        while channel is not None and not channel.is_local and op not in posted:
            posted.add(incoming[channel][0])
            yield RECEIVE[channel.result], incoming[channel].popleft()

    steps: list[_Step] = []
    loaded = set()
    in_flight: list[tuple[int, int, Op]] = []  # a heap: turn of the reader, number of the step, result
    for before, op, ahead in zip([None, *order], order, [*order[1:], None], strict=False):
        if loads and op.micro_batch not in loaded:
            loaded.add(op.micro_batch)
            steps.append((InstructionKind.LOAD_MICRO_BATCH, op))
        steps.extend(receives(op))
        if ahead is not None:
            steps.extend(receives(ahead))
        # One op late, so that the last message has a whole op to travel under.
        arrived = []
        while in_flight and before is not None and in_flight[0][0] < turn[before]:
            arrived.append(heappop(in_flight)[1:])
        steps.extend((COMPLETE[sent.kind], sent) for _, sent in sorted(arrived))
        steps.append((COMPUTE[op.kind], op))
        gives = result(op)
        channel = brings[consumer[gives]] if gives in consumer else None
        if channel is not None and channel.is_local:
            steps.append((PASS[gives.kind], gives))
        elif channel is not None:
            heappush(in_flight, (turn[consumer[gives]], len(steps), gives))
            steps.append((SEND[gives.kind], gives))
    steps.extend((COMPLETE[sent.kind], sent) for *_, sent in sorted(in_flight, key=lambda entry: entry[1]))
    return steps


def _assign_buffers(rank: int, steps: Sequence[_Step]) -> Program:
    """Give each token slice of a stage a buffer from a free list, from its first instruction to its last.

    DeepSpeed's cyclic `unit % num_buffers` would overwrite live buffers here, since token slices retire in reverse.
    """
    last_use = {op[1:]: position for position, (kind, op) in enumerate(steps) if kind not in UNBUFFERED}
    owned: dict[tuple[int, int, int], int] = {}
    free: list[int] = []
    num_buffers = 0
    instructions = []
    for position, (kind, op) in enumerate(steps):
        unit = op[1:]
        if kind in UNBUFFERED:
            instructions.append(Instruction(kind, *unit))
            continue
        if unit not in owned:
            if not free:
                free.append(num_buffers)
                num_buffers += 1
            owned[unit] = free.pop()
        instructions.append(Instruction(kind, *unit, owned[unit]))
        if last_use[unit] == position:
            free.append(owned.pop(unit))
            instructions.append(Instruction(InstructionKind.FREE, *unit, free[-1]))
    return Program(rank, tuple(instructions), num_buffers)
