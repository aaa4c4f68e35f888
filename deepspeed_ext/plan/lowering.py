"""Lowers a schedule to one program per stage: ops, transfers and buffers, ready to run.

    schedule --simulate--> global order --place transfers--> instructions --assign buffers--> Program

The global order is that of op starts in the simulated timeline, one list for all stages. Each stage's program is a
part of it in the same order, so the first unfinished op of that list can always run: everything it waits for comes
before it. `check_programs` plays the programs to see that this holds:

- a send never waits: it is posted right after its op, and travels while the next ops compute;
- a receive never waits either: it is posted one op ahead of its consumer; only the consumer waits;
- a sent tensor is dropped once its send is complete, and a stage waits for that only where the global order says
  that the receiver had come that far one op ago;
- messages match by their order alone, as NCCL wants: on the channel from one stage to another, receives are posted
  in the order in which the other stage sends.

    stage 0 | [F0.0 ....] send [F0.1 ....] send   complete 0.0
    stage 1 | receive 0.0       receive 0.1 [F0.0 ....] receive 1.0 [F0.1 ....]
                                ^ the message of F0.1 travels under F0.0
"""

from collections import defaultdict, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.dependencies import prerequisites, transferred
from deepspeed_ext.plan.errors import ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.schedules import Schedule, stage_orders
from deepspeed_ext.plan.simulate import simulate


class InstructionKind(StrEnum):
    """What a stage does next."""

    LOAD_MICRO_BATCH = "load"
    """Take a micro-batch from the data iterator and cut it. Roughly: `batches[m] = split(next(data))`."""
    RECEIVE_ACTIVATION = "receive activation"
    """Post a receive from the stage before. Roughly: `buffers[b].inputs = irecv(stage - 1)`."""
    FORWARD = "forward"
    """Roughly: `buffers[b].outputs = forward(buffers[b].inputs, past[m])`."""
    SEND_ACTIVATION = "send activation"
    """Post a send to the stage after. Roughly: `isend(buffers[b].outputs, stage + 1)`."""
    RECEIVE_GRADIENT = "receive gradient"
    """Post a receive from the stage after. Roughly: `buffers[b].gradients = irecv(stage + 1)`."""
    BACKWARD = "backward"
    """Roughly: `autograd.backward(buffers[b].outputs, buffers[b].gradients)`."""
    SEND_GRADIENT = "send gradient"
    """Post a send to the stage before. Roughly: `isend(buffers[b].inputs.grad, stage - 1)`."""
    COMPLETE_ACTIVATION = "complete activation"
    """Wait for a send and drop what it sent. Roughly: `sends.pop((m, i)).wait()`."""
    COMPLETE_GRADIENT = "complete gradient"
    """The same for a gradient."""
    FREE = "free"
    """Empty a buffer for the next token slice. Roughly: `buffers[b] = None`."""


_RECEIVE = {OpKind.FORWARD: InstructionKind.RECEIVE_ACTIVATION, OpKind.BACKWARD: InstructionKind.RECEIVE_GRADIENT}
_COMPUTE = {OpKind.FORWARD: InstructionKind.FORWARD, OpKind.BACKWARD: InstructionKind.BACKWARD}
_SEND = {OpKind.FORWARD: InstructionKind.SEND_ACTIVATION, OpKind.BACKWARD: InstructionKind.SEND_GRADIENT}
_COMPLETE = {OpKind.FORWARD: InstructionKind.COMPLETE_ACTIVATION, OpKind.BACKWARD: InstructionKind.COMPLETE_GRADIENT}
_BACKWARD_PART = {table[OpKind.BACKWARD] for table in (_RECEIVE, _COMPUTE, _SEND, _COMPLETE)}
_UNBUFFERED = {InstructionKind.LOAD_MICRO_BATCH, *_COMPLETE.values()}


class Instruction(NamedTuple):
    """One step of a stage's program. `buffer` holds the token slice's tensors; -1 where the step needs none."""

    kind: InstructionKind
    micro_batch: int
    token_slice: int = 0
    buffer: int = -1

    def __str__(self) -> str:
        """For example `forward 0.3 @1`: micro-batch 0, token slice 3, buffer 1."""
        where = "" if self.buffer < 0 else f" @{self.buffer}"
        return f"{self.kind.value} {self.micro_batch}.{self.token_slice}{where}"


@dataclass(frozen=True, slots=True)
class Program:
    """What one stage runs.

    Attributes:
        stage: the stage.
        instructions: in order.
        num_buffers: buffers the instructions name, counted from 0.
    """

    stage: int
    instructions: tuple[Instruction, ...]
    num_buffers: int

    def ops(self) -> Iterator[Op]:
        """The ops in the program, without the transfers: equal to the schedule it was lowered from."""
        for instruction in self.instructions:
            kind, op = _serves(instruction, self.stage)
            if kind in _COMPUTE.values():
                yield op


def lower(schedule: Schedule, shape: PipelineShape, *, loading_stages: Container[int] | None = None) -> list[Program]:
    """Lower a schedule to one program per stage, and check that they run to their end.

    Args:
        schedule: order of the ops.
        shape: of the pipeline.
        loading_stages: stages that take micro-batches from the data iterator; None for the first and the last, which
            read tokens and labels.

    Raises:
        ScheduleDeadlock: if the schedule, or the placement of its transfers, would leave stages waiting for each other.
    """
    orders = stage_orders(schedule, shape)
    loading_stages = (0, shape.last_stage) if loading_stages is None else loading_stages
    placed = _place_transfers(orders, shape, loading_stages)
    programs = [_assign_buffers(stage, steps) for stage, steps in enumerate(placed)]
    check_programs(programs, shape)
    return programs


def global_order(orders: Sequence[Sequence[Op]], shape: PipelineShape) -> list[Op]:
    """All ops of all stages in one order that keeps every prerequisite: by simulated start, with equal costs.

    Raises:
        ScheduleDeadlock: if there is none.
    """
    timeline = simulate(orders, shape, OpCosts.uniform(shape))
    spans = (span for stage in timeline.spans for span in stage)
    return [span.op for span in sorted(spans, key=lambda span: (span.start, span.op.stage))]


def _place_transfers(
    orders: Sequence[Sequence[Op]], shape: PipelineShape, loading_stages: Container[int]
) -> list[list[tuple[InstructionKind, Op]]]:
    """Per stage, its ops with loads and transfers among them, each beside the op it serves."""
    ordered = global_order(orders, shape)
    turn = {op: position for position, op in enumerate(ordered)}
    consumer = {needed: op for op in ordered if (needed := transferred(op, shape)) is not None}
    # Receives on a channel stand in the order of its sends, which is the order of the producers.
    incoming: dict[tuple[int, OpKind], deque[Op]] = defaultdict(deque)
    for producer in ordered:
        if producer in consumer:
            incoming[consumer[producer].stage, producer.kind].append(consumer[producer])
    posted: set[Op] = set()

    def receives(op: Op) -> Iterator[tuple[InstructionKind, Op]]:
        """The receive that an op waits for, after those that the channel brings before it."""
        pending = incoming[op.stage, op.kind]
        while transferred(op, shape) is not None and op not in posted:
            posted.add(pending[0])
            yield _RECEIVE[op.kind], pending.popleft()

    programs = []
    for stage, order in enumerate(orders):
        steps: list[tuple[InstructionKind, Op]] = []
        loaded = set()
        in_flight: list[Op] = []
        for before, op, ahead in zip([None, *order], order, [*order[1:], None], strict=False):
            if stage in loading_stages and op.micro_batch not in loaded:
                loaded.add(op.micro_batch)
                steps.append((InstructionKind.LOAD_MICRO_BATCH, op))
            steps.extend(receives(op))
            if ahead is not None:
                steps.extend(receives(ahead))
            # One op late, so that the last message has a whole op to travel under.
            arrived = [sent for sent in in_flight if before is not None and turn[consumer[sent]] < turn[before]]
            steps.extend((_COMPLETE[sent.kind], sent) for sent in arrived)
            in_flight = [sent for sent in in_flight if sent not in arrived]
            steps.append((_COMPUTE[op.kind], op))
            if op in consumer:
                steps.append((_SEND[op.kind], op))
                in_flight.append(op)
        steps.extend((_COMPLETE[sent.kind], sent) for sent in in_flight)
        programs.append(steps)
    return programs


def _assign_buffers(stage: int, steps: Sequence[tuple[InstructionKind, Op]]) -> Program:
    """Give each token slice a buffer from a free list, from its first instruction to its last.

    DeepSpeed's cyclic `unit % num_buffers` would overwrite live buffers here, since token slices retire in reverse.
    """
    last_use = {
        (op.micro_batch, op.token_slice): position
        for position, (kind, op) in enumerate(steps)
        if kind not in _UNBUFFERED
    }
    owned: dict[tuple[int, int], int] = {}
    free: list[int] = []
    num_buffers = 0
    instructions = []
    for position, (kind, op) in enumerate(steps):
        unit = op.micro_batch, op.token_slice
        if kind in _UNBUFFERED:
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
    return Program(stage, tuple(instructions), num_buffers)


def check_programs(programs: Sequence[Program], shape: PipelineShape) -> None:
    """Play programs as the engine runs them, one instruction at a time.

    Sends and receives never wait; an op waits for what it reads; a completion waits until the other side has posted
    the receive.

    Raises:
        ScheduleDeadlock: if some stage waits for ever, or a channel's two ends disagree about the order of messages.
    """
    _check_channels(programs)
    positions = [0] * len(programs)
    computed: set[Op] = set()
    receiving: set[Op] = set()

    def missing(kind: InstructionKind, op: Op) -> list[str]:
        """What an instruction still waits for."""
        if kind in _COMPUTE.values():
            return [str(needed) for needed in prerequisites(op, shape) if needed not in computed]
        if kind in _COMPLETE.values() and _receiver(op) not in receiving:
            return [f"the receive for {_receiver(op)}"]
        return []

    progress = True
    while progress:
        progress = False
        for program in programs:
            while (position := positions[program.stage]) < len(program.instructions):
                kind, op = _serves(program.instructions[position], program.stage)
                if missing(kind, op):
                    break
                if kind in _COMPUTE.values():
                    computed.add(op)
                elif kind in _RECEIVE.values():
                    receiving.add(op)
                positions[program.stage] += 1
                progress = True
    stuck = [
        f"stage {program.stage} at '{instruction}' waits for "
        + " and ".join(missing(*_serves(instruction, program.stage)))
        for program in programs
        for instruction in program.instructions[positions[program.stage] :][:1]
    ]
    if stuck:
        raise ScheduleDeadlock(f"the programs deadlock: {'; '.join(stuck)}; reorder these instructions")


def _check_channels(programs: Sequence[Program]) -> None:
    """Hold what one end of a channel sends against what the other end receives: the same messages in the same order."""
    sent: dict[tuple[int, OpKind], list[Op]] = defaultdict(list)
    received: dict[tuple[int, OpKind], list[Op]] = defaultdict(list)
    for program in programs:
        for instruction in program.instructions:
            kind, op = _serves(instruction, program.stage)
            if kind in _SEND.values():
                sent[_receiver(op).stage, op.kind].append(_receiver(op))
            elif kind in _RECEIVE.values():
                received[op.stage, op.kind].append(op)
    for end in sorted(sent.keys() | received.keys()):
        if sent[end] != received[end]:
            messages, receives = (", ".join(map(str, ops[end])) or "nothing" for ops in (sent, received))
            raise ScheduleDeadlock(
                f"stage {end[0]} is sent {messages} but receives {receives}: both ends of a channel must keep one order"
            )


def _serves(instruction: Instruction, stage: int) -> tuple[InstructionKind, Op]:
    """An instruction's kind and the op it is or serves."""
    backward = instruction.kind in _BACKWARD_PART
    op_kind = OpKind.BACKWARD if backward else OpKind.FORWARD
    return instruction.kind, Op(op_kind, stage, instruction.micro_batch, instruction.token_slice)


def _receiver(op: Op) -> Op:
    """The op on the neighbouring stage that reads what this one sends."""
    return op._replace(stage=op.stage + (1 if op.kind is OpKind.FORWARD else -1))
