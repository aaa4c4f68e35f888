"""Proof that programs end on their devices: a model of the waits between events on CPUs and on CUDA devices.

On a CPU the host computes and waits itself. On CUDA it enqueues, and the device has a stream for computing and one for
each communicator, of messages and of collectives:

    host       F0  post receive 1  F1  post receive 2  ...           enqueues in order, and waits for nothing
    compute    [F0     ][F1     ]   ...                              an op starts when those before it and its
    stream a   [receive 1  ][receive 2                ]              message are there
    stream b           [send 0        ]                              a message runs from when the work enqueued before
                                                                     it is done until its other end has run as well
    to host        [offload 0]                                       copies to the host and back need only their rank

The host does wait at the first use of a connection between two ranks, until the other host uses it too; and at a
drain, which ends when all that was enqueued before is done. Streams that share a hardware queue
(`CUDA_DEVICE_MAX_CONNECTIONS`) start their work in the order in which the host enqueued it. Which streams share one is
not documented, and torch makes more streams than there are queues. All streams in one queue is the worst case: the
order of one queue implies the orders of any others, so programs that end with it end with every assignment.

All of this is determined before the programs run: a graph of events, each with those it needs. Programs end if the
graph has no circle. One drain anywhere on one rank does not lock if no message needs an event that its rank enqueues
after posting it. ADR 22 has the sources of these assumptions.

Ranks of a stage may exchange tokens within forwards and backwards, for experts on other ranks, and so couple several
copies of a pipeline. An op then also needs the events that the same op of another copy needs, and no others: without
the numbers of the copies, a circle through exchanges is a circle of one copy. So the graph of one pipeline is enough,
as long as all copies run one program (ADR 47).

One check needs no such model: both ends of a channel name the same messages in the same order.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from deepspeed_ext.plan.errors import ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, prerequisites, result
from deepspeed_ext.plan.programs.program import (
    COMPLETES,
    COMPUTES,
    DROPS,
    HOST_COPIES,
    OFFLOADS,
    RECEIVES,
    SENDS,
    Channel,
    Instruction,
    InstructionKind,
    Program,
    channel_of,
    communicators,
    message_of,
    reader_of_message,
    warm_up_order,
)


def check_channels(programs: Sequence[Program], shape: PipelineShape) -> None:
    """Check that both ends of each channel name the same messages in the same order."""
    sent: dict[Channel, list[Op]] = defaultdict(list)
    taken: dict[Channel, list[Op]] = defaultdict(list)
    for program in programs:
        for instruction in program.instructions:
            if instruction.kind in SENDS:
                sent[channel_of(reader_of_message(instruction.op, shape), shape)].append(instruction.op)
            elif instruction.kind in RECEIVES:
                taken[channel_of(instruction.op, shape)].append(message_of(instruction, shape))
    for channel in sorted(sent.keys() | taken.keys()):
        if sent[channel] != taken[channel]:
            messages, receives = (", ".join(map(str, ops[channel])) or "nothing" for ops in (sent, taken))
            raise ScheduleDeadlock(
                f"rank {channel.source} sends {messages} to rank {channel.target}, which receives {receives}: "
                "both ends of a channel must keep one order"
            )


COMPUTE_STREAM = 0


class Drains(StrEnum):
    """On which ranks a host may wait, at any instruction, until its device has run empty."""

    NONE = "none"
    ONE_RANK = "one rank"
    """One rank, at one instruction."""
    FORWARDS = "forwards"
    """Every rank at every forward, as where hosts wait for the sizes of an exchange for experts."""
    ALL_RANKS = "all ranks"
    """Every rank at every op, as where each loads kernels."""


class ExpertExchange(StrEnum):
    """How tokens reach the experts of other ranks of their stage, within forwards and backwards."""

    NONE = "none"
    ALLTOALL = "alltoall"
    """Each token is sent to its experts. In every forward the hosts of the stage wait for the sizes, all at once."""
    ALLGATHER = "allgather"
    """All tokens are sent to all expert-parallel ranks: sizes are known, and no host waits."""


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """A device that runs the program of a rank, as the proof models it.

    The default waits as often as any device may, so programs that end on it also end on CPUs, and on CUDA devices with
    a hardware queue for each stream.
    """

    hardware_queues: int | None = None
    """Queues that the streams of a rank share, in an unknown way; None for one each."""
    warms_up: bool = True
    """Every connection is used once, in the order of `warm_up_order`, before the programs run. Without, the first
    message of a connection makes it."""
    host_waits: bool = True
    """The host waits for each op and completion: it computes itself, or copies block it."""
    drains: Drains = Drains.ONE_RANK
    copies: bool = False
    """Copies to the host and back have a stream each."""
    exchange: ExpertExchange = ExpertExchange.NONE
    """Of tokens among ranks of a stage."""

    def has_queues_for(self, shape: PipelineShape) -> bool:
        """Whether there are as many hardware queues as a rank has streams."""
        return self.hardware_queues is None or self.hardware_queues >= self._num_streams(shape)

    def sharing(self, shape: PipelineShape) -> str:
        """How many streams share how many hardware queues, and the setting that helps, in words."""
        queues = "1 hardware queue" if self.hardware_queues == 1 else f"{self.hardware_queues} hardware queues"
        return f"{self._num_streams(shape)} streams share {queues}: set CUDA_DEVICE_MAX_CONNECTIONS=32"

    def _num_streams(self, shape: PipelineShape) -> int:
        return num_streams(shape) + 2 * self.copies + EXPERT_GROUPS * (self.exchange is not ExpertExchange.NONE)


COLLECTIVE_GROUPS = 9
"""Process groups of a rank beside the groups of messages: two of all ranks, one each of the replica, of the axes data,
pipe, model and sequence, of shared layers, and of shared modules."""

EXPERT_GROUPS = 2
"""Process groups of a rank with a part of the experts: ranks that exchange tokens, and ranks with the same experts."""


def num_streams(shape: PipelineShape) -> int:
    """Streams of a rank: for computing, and one for each communicator."""
    return 1 + COLLECTIVE_GROUPS + len(set(communicators(shape).values()))


def check_programs(programs: Sequence[Program], shape: PipelineShape, device: DeviceModel | None = None) -> bool:
    """Check that programs end. Returns whether the proof assumes that no two streams share a hardware queue.

    Args:
        device: the device of each rank; None for the default. Nothing is assumed with fewer queues than streams:
            programs must end with every assignment of streams to queues.

    Raises:
        ScheduleDeadlock: if some rank waits for ever, or the two ends of a channel have different orders of messages.
    """
    check_channels(programs, shape)
    device = device or DeviceModel()
    try:
        _check_events(Events(programs, shape, device), device)
    except ScheduleDeadlock:
        if device.hardware_queues is None or not device.has_queues_for(shape):
            raise
    else:
        return False
    device = replace(device, hardware_queues=None)
    _check_events(Events(programs, shape, device), device)
    return True


def _check_events(events: "Events", device: DeviceModel) -> None:
    levels = events.levels()
    if device.drains is Drains.ONE_RANK:
        events.check_drains(levels)


@dataclass
class _Rank:
    """Events of one rank that later ones need."""

    host: int | None = None
    """The last that the host waits for."""
    computed: int | None = None
    """The last on the stream that computes."""
    last: dict[int, int] = field(default_factory=dict)
    """The last message, reduction or host copy by its stream."""
    copies: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The last copy to the host of each token slice of a micro-batch on a stage, and back of any of them."""
    enqueued: int | None = None
    """The last that was enqueued on any stream."""


class Events:
    """All events of a run of programs: the events that each one needs, and its instruction."""

    def __init__(self, programs: Sequence[Program], shape: PipelineShape, device: DeviceModel) -> None:
        self._programs, self._shape, self._device = programs, shape, device
        self._needs: list[list[int]] = []
        self._places: list[tuple[int, int]] = []  # rank, and position in its program; -1 where there is none
        self._of_instruction: dict[tuple[int, int], int] = {}
        self._results: dict[Op, int] = {}
        self._messages: dict[Op, int] = {}
        self._connections: dict[Channel, tuple[int, int]] = {}  # first use by the hosts of source and target
        self._posted: list[tuple[int, int, int]] = []  # rank, position, message
        self._under_way: dict[int, list[int]] = defaultdict(list)  # per rank, messages that no drain has waited for
        self._ranks = [shape.rank_of(stage) for stage in range(shape.num_stages)]
        self._channels: dict[tuple[OpKind, int], Channel] = {}  # by kind and stage of a message
        self._numbers = communicators(shape)
        self._reduction_stream = COMPUTE_STREAM + 1 + len(set(self._numbers.values()))
        self._connected: set[tuple[int, Channel]] = set()
        for program in programs:
            self._add_program(program)

    def _event(self, rank: int, position: int, *needs: int | None) -> int:
        self._needs.append([need for need in needs if need is not None])
        self._places.append((rank, position))
        return len(self._needs) - 1

    def _result(self, op: Op) -> int:
        """The event that a result is there on its rank."""
        if op not in self._results:
            self._results[op] = self._event(self._ranks[op.stage], -1)
        return self._results[op]

    def _message(self, op: Op) -> int:
        """The event that a message is there, which needs both of its ends."""
        if op not in self._messages:
            self._messages[op] = self._event(-1, -1)
        return self._messages[op]

    def _add_program(self, program: Program) -> None:
        rank = _Rank()
        if self._device.warms_up:
            for channel in warm_up_order(self._shape):
                if program.rank in channel[:2]:
                    rank.host = self._connect(program.rank, channel, rank, -1)
        for position, instruction in enumerate(program.instructions):
            if instruction.kind in COMPUTES:
                event = self._add_op(program.rank, position, instruction.op, rank)
            elif instruction.kind in COMPLETES:
                event = self._event(program.rank, position, rank.host, rank.computed, self._message(instruction.op))
                self._enqueue(event, COMPUTE_STREAM, rank)
            elif instruction.kind is InstructionKind.REDUCE_GRADIENTS:
                # Replicas run one program, so a reduction needs the same events of them as of this rank.
                event = self._add_on_stream(self._reduction_stream, program.rank, position, rank)
            elif instruction.kind in HOST_COPIES:
                event = self._add_copy(program.rank, position, instruction, rank)
            elif instruction.kind in SENDS or instruction.kind in RECEIVES:
                event = self._add_post(program.rank, position, instruction, rank)
            else:
                continue
            self._of_instruction[program.rank, position] = event

    def _add_op(self, number: int, position: int, op: Op, rank: _Rank) -> int:
        event = self._event(number, position, rank.host, rank.computed, rank.copies.get(op[1:3]))
        for needed in prerequisites(op, self._shape):
            here = self._ranks[needed.stage] == number
            self._needs[event].append(self._result(needed) if here else self._message(needed))
        self._needs[self._result(result(op))].append(event)
        drains = self._device.drains
        if drains is Drains.ALL_RANKS or (drains is Drains.FORWARDS and op.kind is OpKind.FORWARD):
            self._needs[event] += self._under_way.pop(number, [])
        self._enqueue(event, COMPUTE_STREAM, rank)
        return event

    def _add_copy(self, number: int, position: int, instruction: Instruction, rank: _Rank) -> int:
        """A copy runs after all that its rank has computed, on a stream after all others; drops wait for it."""
        if instruction.kind in DROPS:
            event = self._event(number, position, rank.host, rank.computed, rank.copies.get(instruction[1:4]))
            self._enqueue(event, COMPUTE_STREAM, rank)
            return event
        goes = instruction.kind in OFFLOADS
        event = self._add_on_stream(self._reduction_stream + (3 if goes else 4), number, position, rank)
        rank.copies[instruction[1:4] if goes else instruction[1:3]] = event
        return event

    def _add_on_stream(self, stream: int, number: int, position: int, rank: _Rank) -> int:
        event = self._event(number, position, rank.host, rank.computed, rank.last.get(stream))
        self._enqueue(event, stream, rank)
        rank.last[stream] = event
        return event

    def _add_post(self, number: int, position: int, instruction: Instruction, rank: _Rank) -> int:
        travels = message_of(instruction, self._shape) if instruction.kind in RECEIVES else instruction.op
        channel = self._channel(travels)
        if (number, channel) not in self._connected:
            rank.host = self._connect(number, channel, rank, position)
        message = self._message(travels)
        stream = COMPUTE_STREAM + 1 + self._numbers[channel]
        event = self._add_on_stream(stream, number, position, rank)
        rank.last[stream] = message  # the next waits for both ends of this one
        self._needs[message].append(event)
        self._posted.append((number, position, message))
        self._under_way[number].append(message)
        return event

    def _channel(self, message: Op) -> Channel:
        way = message.kind, message.stage
        if way not in self._channels:
            self._channels[way] = channel_of(reader_of_message(message, self._shape), self._shape)
        return self._channels[way]

    def _connect(self, number: int, channel: Channel, rank: _Rank, position: int) -> int:
        """Add the first use of a connection by a host. Returns the event that both hosts have used it."""
        self._connected.add((number, channel))
        if channel not in self._connections:
            self._connections[channel] = self._event(channel.source, -1), self._event(channel.target, -1)
        ends = self._connections[channel]
        if rank.host is not None:
            self._needs[ends[number == channel.target]].append(rank.host)
        return self._event(number, position, *ends)

    def _enqueue(self, event: int, stream: int, rank: _Rank) -> None:
        if stream == COMPUTE_STREAM:
            rank.computed = event
            if self._device.host_waits:
                rank.host = event
        if self._device.hardware_queues is not None:
            # The worst case of all assignments of streams to queues: one queue for all.
            if rank.enqueued is not None:
                self._needs[event].append(rank.enqueued)
            rank.enqueued = event

    def levels(self) -> list[list[int]]:
        """Events by level: first those that need none, then those that need these, and so on."""
        followers: dict[int, list[int]] = defaultdict(list)
        missing = []
        for event, needs in enumerate(self._needs):
            for need in needs:
                followers[need].append(event)
            missing.append(len(needs))
        # A result without an op in any program needs no event, and never arrives.
        absent = {event for event in (*self._results.values(), *self._messages.values()) if not self._needs[event]}
        level = [event for event, count in enumerate(missing) if not count and event not in absent]
        levels, reached = [], 0
        while level:
            levels.append(level)
            reached += len(level)
            following = []
            for event in level:
                for follower in followers[event]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        following.append(follower)
            level = following
        if reached < len(missing):
            stuck = absent | {event for event, count in enumerate(missing) if count}
            raise ScheduleDeadlock(self._describe(stuck))
        return levels

    def check_drains(self, levels: Sequence[Sequence[int]]) -> None:
        """Check that one rank may wait at any instruction until its device has run empty."""
        latest = self._latest_positions(levels)
        for rank, position, message in self._posted:
            needed = latest[message][rank]
            if needed > position:
                posted, later = (self._programs[rank].instructions[each] for each in (position, needed))
                raise ScheduleDeadlock(
                    f"the programs deadlock if rank {rank} waits at '{later}' for its device to run empty: "
                    f"'{posted}' is enqueued before, and its other end waits for '{later}'; {self._remedy()}"
                )

    def _latest_positions(self, levels: Sequence[Sequence[int]]) -> list[list[int]]:
        """[events][ranks]: the last position in the program of a rank that an event needs; -1 if none."""
        nothing = [-1] * len(self._programs)
        latest = [nothing] * len(self._needs)
        for level in levels:
            for event in level:
                row = list(map(max, nothing, nothing, *(latest[need] for need in self._needs[event])))
                rank, position = self._places[event]
                row[rank] = max(row[rank], position)
                latest[event] = row
        return latest

    def makespan(self, costs: Any) -> float:
        """Time until the last event, in the unit of the costs."""
        duration = defaultdict[int, float](float)
        for program in self._programs:
            for position, instruction in enumerate(program.instructions):
                if instruction.kind in COMPUTES:
                    duration[self._of_instruction[program.rank, position]] = costs.duration(instruction.op)
        for message, event in self._messages.items():
            boundary = min(message.stage, reader_of_message(message, self._shape).stage)
            duration[event] = costs.sending_time(boundary, message.token_slice) + costs.latency(boundary)
        end: dict[int, float] = {}
        for level in self.levels():
            for event in level:
                end[event] = max((end[need] for need in self._needs[event]), default=0.0) + duration[event]
        return max(end.values(), default=0.0)

    def _describe(self, stuck: set[int]) -> str:
        """Name, for every rank that is stuck, its instruction and the results that this waits for."""
        results = {event: op for op, event in self._results.items()}
        messages = {event: op for op, event in self._messages.items()}
        receives = {
            message: self._of_instruction[rank, position]
            for rank, position, message in self._posted
            if self._programs[rank].instructions[position].kind in RECEIVES
        }

        def waits(event: int) -> Iterator[str]:
            for need in self._needs[event]:
                if need in results and need in stuck:
                    yield str(results[need])
                elif need in messages and need in stuck:
                    yield f"the receive of {messages[need]}" if receives.get(need) in stuck else str(messages[need])

        lines = []
        for program in self._programs:
            for position, instruction in enumerate(program.instructions):
                event = self._of_instruction.get((program.rank, position))
                if event in stuck:
                    missing = " and ".join(waits(event)) or "the host of the other end"
                    lines.append(f"rank {program.rank} at '{instruction}' waits for {missing}")
                    break
        return f"the programs deadlock: {'; '.join(lines)}; {self._remedy()}"

    def _remedy(self) -> str:
        if not self._device.warms_up:
            return "make all connections before the first step"
        if self._device.has_queues_for(self._shape):
            return "reorder these instructions"
        return self._device.sharing(self._shape)
