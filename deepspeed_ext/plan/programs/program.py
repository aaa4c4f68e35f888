"""Programs: the instructions of a pipeline rank, and the channels of its messages.

Reductions sum the gradients of the replicas of a stage, layer by layer, while the pipeline drains. A replica has a
gradient of a layer once the last backward of the iteration has passed that layer. From then on only the optimizer step
waits for its sum over the data-parallel ranks, so it travels while the ranks still compute. Layers finish
last to first, and the reductions of a rank run one after the other on the links to its replicas:

    rank 0 | [B2.1 ...] [B2.0: layer 3 | layer 2 | layer 1 | layer 0]
      link |                           [3 ====][2 ====][1 ====][0 ====]      the step starts here ^
    rank 1 | [B2.0 ............]    idle
      link |    [7 ====][6 ====][5 ====][4 ====]      all of it in the cool-down
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, reader_of, received


class InstructionKind(StrEnum):
    """Kinds of instructions of a rank."""

    LOAD_MICRO_BATCH = "load"
    """Take a micro-batch from the data iterator and cut it, on ranks that read data. Roughly:
    `batches[m] = split(next(data))`."""
    RECEIVE_ACTIVATION = "receive activation"
    """Post a receive from the rank of the stage before. Roughly: `inbox[i, m, t] = irecv(rank_of(i - 1))`."""
    FORWARD = "forward"
    """Roughly: `buffers[b].outputs = forward(inbox[i, m, t], past[i, m])`."""
    SEND_ACTIVATION = "send activation"
    """Post a send to the rank of the stage after. Roughly: `isend(buffers[b].outputs, rank_of(i + 1))`."""
    PASS_ACTIVATION = "pass activation"
    """The stage after is this rank's too. Roughly: `inbox[i + 1, m, t] = buffers[b].outputs`."""
    RECEIVE_GRADIENT = "receive gradient"
    """Post a receive from the rank of the stage after. Roughly: `inbox[i, m, t] = irecv(rank_of(i + 1))`."""
    BACKWARD = "backward"
    """Roughly: `autograd.backward(buffers[b].outputs, inbox[i, m, t])`."""
    INPUT_GRADIENT = "input gradient"
    """Backward with deferred products of weights. Roughly: `buffers[b].deferred_wgrads = products not computed`."""
    WEIGHT_GRADIENT = "weight gradient"
    """Roughly: `for product in buffers[b].deferred_wgrads: product()`."""
    SEND_GRADIENT = "send gradient"
    """Post a send to the rank of the stage before. Roughly: `isend(buffers[b].inputs.grad, rank_of(i - 1))`."""
    PASS_GRADIENT = "pass gradient"
    """The stage before is this rank's too. Roughly: `inbox[i - 1, m, t] = buffers[b].inputs.grad`."""
    COMPLETE_ACTIVATION = "complete activation"
    """Wait for a send and free its tensor. Roughly: `sends.pop((i, m, t)).wait()`."""
    COMPLETE_GRADIENT = "complete gradient"
    """Wait for the send of a gradient and drop the gradient."""
    FREE = "free"
    """Empty a buffer for the next token slice. Roughly: `buffers[b] = None`."""
    REDUCE_GRADIENTS = "reduce gradients"
    """Sum the complete gradients of a stage over its replicas. Roughly: `all_reduce(gradients[i], asynchronous)`."""
    OFFLOAD_INPUT = "offload input"
    """Post a copy of a stage's input to the host. Roughly: `host[i, m, t] = copy(buffers[b].inputs)`."""
    OFFLOAD_KEYS_AND_VALUES = "offload keys and values"
    """Post a copy of a token slice's keys and values to the host. Later token slices may still read them."""
    DROP_INPUT = "drop input"
    """Wait for the copy and free the device's tensors. Roughly: `buffers[b].inputs = None`."""
    DROP_KEYS_AND_VALUES = "drop keys and values"
    FETCH_INPUT = "fetch input"
    """Post the copy back; the op that reads waits for it. Roughly: `buffers[b].inputs = copy(host.pop((i, m, t)))`."""
    FETCH_KEYS_AND_VALUES = "fetch keys and values"


class Content(StrEnum):
    """Content of a host copy: tensors that the forward of a token slice leaves on a stage for its backward."""

    INPUT = "input"
    """The stage's input, from which a stage that is recomputed starts again."""
    KEYS_AND_VALUES = "keys and values"
    """Keys and values of the token slice, of all layers of the stage."""


COMPUTE = {kind: InstructionKind[kind.name] for kind in OpKind}
"""Instruction that is an op of each kind."""

# Instructions that serve a transfer, by the kind of result that is transferred.
RECEIVE, SEND, PASS, COMPLETE = (
    {
        OpKind.FORWARD: InstructionKind[f"{verb}_ACTIVATION"],
        OpKind.INPUT_GRADIENT: InstructionKind[f"{verb}_GRADIENT"],
    }
    for verb in ("RECEIVE", "SEND", "PASS", "COMPLETE")
)

# Instructions that serve a host copy, by its content.
OFFLOAD, DROP, FETCH = (
    {content: InstructionKind[f"{verb}_{content.name}"] for content in Content} for verb in ("OFFLOAD", "DROP", "FETCH")
)

UNBUFFERED = {
    InstructionKind.LOAD_MICRO_BATCH,
    InstructionKind.REDUCE_GRADIENTS,
    *COMPLETE.values(),
    *(table[Content.KEYS_AND_VALUES] for table in (OFFLOAD, DROP, FETCH)),
}
"""Instructions that touch no buffer."""

# The same tables as sets, which answer at once.
COMPUTES, RECEIVES = frozenset(COMPUTE.values()), frozenset(RECEIVE.values())
SENDS, COMPLETES = frozenset(SEND.values()), frozenset(COMPLETE.values())
OFFLOADS, DROPS, FETCHES = frozenset(OFFLOAD.values()), frozenset(DROP.values()), frozenset(FETCH.values())
HOST_COPIES = OFFLOADS | DROPS | FETCHES

_OP_KINDS = {instruction: kind for table in (RECEIVE, SEND, PASS, COMPLETE) for kind, instruction in table.items()} | {
    instruction: kind for kind, instruction in COMPUTE.items()
}
_OP_KINDS[InstructionKind.REDUCE_GRADIENTS] = OpKind.BACKWARD


def content_of(kind: InstructionKind) -> Content:
    """Return the content of a host copy."""
    return next(content for content in Content if kind in (OFFLOAD[content], DROP[content], FETCH[content]))


class Instruction(NamedTuple):
    """One step of a rank's program. `buffer` holds the token slice's tensors; -1 where the step needs none."""

    kind: InstructionKind
    stage: int
    micro_batch: int
    token_slice: int = 0
    buffer: int = -1

    def __str__(self) -> str:
        """For example `forward 2F0.3 @1`: stage 2, micro-batch 0, token slice 3, buffer 1."""
        return f"{self.kind.value} {self.place}"

    @property
    def place(self) -> str:
        """The op that it is or serves, and its buffer: `2F0.3 @1`."""
        return str(self.op) if self.buffer < 0 else f"{self.op} @{self.buffer}"

    @property
    def op(self) -> Op:
        """The op that this is or serves, as `ops.result` names it where it serves a transfer."""
        return Op(_OP_KINDS.get(self.kind, OpKind.FORWARD), self.stage, self.micro_batch, self.token_slice)


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions of one pipeline rank."""

    rank: int
    instructions: tuple[Instruction, ...]
    num_buffers: int
    """Buffers the instructions name, counted from 0."""

    def ops(self) -> Iterator[Op]:
        """The ops in the program, without the transfers: equal to the schedule it was lowered from."""
        return (instruction.op for instruction in self.instructions if instruction.kind in COMPUTES)


class Channel(NamedTuple):
    """Messages with results of one kind from one pipeline rank to another."""

    source: int
    target: int
    result: OpKind
    """`FORWARD` for activations, `INPUT_GRADIENT` for their gradients."""


def channel_of(reader: Op, shape: PipelineShape) -> Channel:
    """Return the channel that brings an op the result of another stage that it reads."""
    needed = received(reader, shape)
    assert needed is not None, "only ops that read of another stage have a message"
    return Channel(shape.rank_of(needed.stage), shape.rank_of(reader.stage), needed.kind)


def reader_of_message(message: Op, shape: PipelineShape) -> Op:
    """Return the op that reads a message, as `ops.reader_of` names it."""
    reader = reader_of(message, shape)
    assert reader is not None, "a message is read by another stage"
    return reader


def channels(shape: PipelineShape) -> list[Channel]:
    """Every channel of a pipeline between two ranks."""
    ways = [(shape.rank_of(stage), shape.rank_of(stage + 1)) for stage in range(shape.last_stage)]
    there = {Channel(source, target, OpKind.FORWARD) for source, target in ways}
    back = {Channel(target, source, OpKind.INPUT_GRADIENT) for source, target in ways}
    return sorted(channel for channel in there | back if channel.source != channel.target)


def communicators(shape: PipelineShape) -> dict[Channel, int]:
    """Number of the communicator for each channel: channels that share one have no rank in common.

    A communicator runs the messages of a rank one after the other. A receive that is posted ahead would delay a send
    after it; and where a rank has several stages, the receive may wait for a result of that very send.
    """
    busy: defaultdict[int, set[int]] = defaultdict(set)
    numbers = {}
    for channel in channels(shape):
        ends = {channel.source, channel.target}
        numbers[channel] = next(number for number in count() if busy[number].isdisjoint(ends))
        busy[numbers[channel]] |= ends
    return numbers


def warm_up_order(shape: PipelineShape) -> list[Channel]:
    """Channels in the order in which every rank sends a first message over each of its own.

    A connection is made when both of its ranks first use it. In one order none waits in a circle; by communicator as
    many as possible connect at a time.
    """
    numbers = communicators(shape)
    return sorted(numbers, key=lambda channel: (numbers[channel], channel))


def message_of(receive: Instruction, shape: PipelineShape) -> Op:
    """Return the result that a receive is for."""
    needed = received(receive.op, shape)
    assert needed is not None, "a receive serves an op that reads of another stage"
    return needed


MESSAGE_CTAS = 2
"""Blocks of threads of a message, each of which holds a multiprocessor from the time at which it is posted until both
ends are there. A rank has one message under way on each communicator: four at most, or eight where stages go to the
last rank and back, so at most 8 or 16 of the 132 multiprocessors of an H100. NCCL would take up to 32 for a message."""


_COMPLETING = (OpKind.BACKWARD, OpKind.WEIGHT_GRADIENT)
_AT_ONCE = {*SEND.values(), *PASS.values()}
"""Instructions that go before reductions: another rank waits for them, and only the step waits for reductions."""


class Reduction(NamedTuple):
    """One piece of a stage's gradients on its way over the data-parallel ranks."""

    stage: int
    piece: int
    """Pieces are counted in the order in which they are complete: 0 is the last layer, or the last few."""
    start: float
    end: float


def completing_ops(order: Iterable[Op]) -> dict[int, Op]:
    """Return the last gradient of weights of each stage of a rank, in the order in which they run."""
    completing: dict[int, Op] = {}
    for op in order:
        if op.kind in _COMPLETING:
            completing.pop(op.stage, None)
            completing[op.stage] = op
    return completing


def with_reductions(program: Program) -> Program:
    """A program that starts the reductions of each stage after the op that completes them, and after its sends."""
    completing = {Instruction(COMPUTE[op.kind], *op[1:])[:4] for op in completing_ops(program.ops()).values()}
    placed: list[Instruction] = []
    due: list[Instruction] = []
    for instruction in program.instructions:
        if instruction.kind not in _AT_ONCE:
            placed += due
            due = []
        placed.append(instruction)
        if instruction[:4] in completing:
            due = [Instruction(InstructionKind.REDUCE_GRADIENTS, *instruction[1:4])]
    return replace(program, instructions=(*placed, *due))


def reductions_beside(
    spans: Sequence[Sequence[tuple[Op, float, float]]], shape: PipelineShape, costs: Sequence[Sequence[float]] | None
) -> Iterator[Reduction]:
    """Yield the reductions of an iteration, given its ops; see `reductions`. No reductions if costs are None."""
    completed: dict[int, tuple[float, float]] = {}
    for rank in spans:
        times = {op: (start, end) for op, start, end in rank}
        completed |= {stage: times[op] for stage, op in completing_ops(times).items()}
    if costs is not None and len(completed) == shape.num_stages:
        yield from reductions(completed, costs, shape)


def reductions(
    completed: Mapping[int, tuple[float, float]], costs: Sequence[Sequence[float]], shape: PipelineShape
) -> Iterator[Reduction]:
    """When the reductions of an iteration run.

    Args:
        completed: by stage, start and end of the op that completes its gradients. Its layers are taken to finish at
            even steps of that time.
        costs: per stage, the time of each of its pieces on the link, in the order in which they are complete.
    """
    for rank in range(shape.num_ranks):
        free = 0.0
        for stage in sorted(shape.stages_of(rank), key=lambda stage: completed[stage][1]):
            start, end = completed[stage]
            pieces = costs[stage]
            for piece, time in enumerate(pieces):
                left = len(pieces) - 1 - piece
                begin = max(free, end - (end - start) * left / len(pieces))
                free = begin + time
                yield Reduction(stage, piece, begin, free)
