"""Lowers a schedule to one program per pipeline rank: ops, transfers and buffers, ready to run.

    schedule --simulate--> timeline --post messages--> instructions --assign buffers--> Program

Each rank's program is a part of the timeline in the same order, and whatever a rank waits for is earlier on the
timeline, so the programs end:

- a send does not wait: it is posted when its op is done, and travels while the next ops compute;
- a receive does not wait either: it is posted one op ahead of its reader, and only the reader waits;
- a sent tensor is dropped once its send is complete, which a rank waits for only after the end of its reader;
- messages match only by their order, as NCCL requires: on the channel from one rank to another, receives are posted
  in the order in which the other rank sends;
- between two stages of one rank no message is sent: the result is passed on;
- a copy to the host or back is posted, and waits only for its own rank: `host_copies`.

    stage 0 | [F0.0 ....] send [F0.1 ....] send          complete 0.0
    stage 1 | receive 0.0       receive 0.1 [F0.0 ....] receive 1.0 [F0.1 ....]
                                ^ the message of F0.1 travels under F0.0

A posted message is a kernel that runs until the other end is there. So an op that waits for a device to run empty (an
allocator that returns memory, a module that is loaded: a drain) waits for all messages posted before. None of these may
wait, over any number of ranks, for an op after the drain. Two rules ensure it. They read the simulated timeline, in
which an op that depends on another starts no earlier than that one ends:

- A receive is posted one op ahead of its reader, but not before an op that ends by the time its producer starts.
- A send is posted right after its op, but not before an op that ends by the time at which the op before the receive
  starts.

    rank 0 | [0F0.0]   x   [0B0.0     ]        The gradient for 0B0.0 could be received from the start of 0F0.0 on,
    rank 1 |        [1F0.0][1B0.0     ]        one op ahead. But 1B0.0 starts after 0F0.0 has ended and may need
                                               it, so the receive is posted after it, at x.

Posting an end later costs no time on this timeline: the other end is not there earlier. ADR 22 has the proof.

Where all ranks may drain at every op, as in a step in which each may load kernels, no message may be under way
while an op of its ranks runs. Then a receive is posted right in front of its reader, and a send where the op before
that receive has ended. Ops by their start and messages by the end of that op have one order on all ranks. A step whose
forwards drain on all ranks (`ExpertExchange.ALLTOALL`) keeps its messages under ops where that is proven, and else has
this program.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import NamedTuple

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, check_num_ops, num_ops, reader_of, received, result
from deepspeed_ext.plan.programs.device import DeviceModel, Drains, ExpertExchange, check_programs
from deepspeed_ext.plan.programs.host_copies import (
    CopiesOfPlace,
    HostCopySettings,
    check_host_copies,
    copies_by_place,
)
from deepspeed_ext.plan.programs.program import (
    COMPLETE,
    COMPUTE,
    DROP,
    FETCH,
    OFFLOAD,
    PASS,
    RECEIVE,
    SEND,
    UNBUFFERED,
    Channel,
    Instruction,
    InstructionKind,
    Program,
    channels,
    reader_of_message,
    with_reductions,
)
from deepspeed_ext.plan.schedules import Schedule, forward_order, rank_orders
from deepspeed_ext.plan.simulate import check_complete, simulate
from deepspeed_ext.plan.timeline import Span

_NOTHING = Span(Op(OpKind.FORWARD, 0, 0, 0), -inf, -inf)
"""In front of the first op of a rank."""


class Posting(NamedTuple):
    """Places of the ends of one message: a place p is before op p of a rank's order, or after all ops."""

    message: Op
    """The result that travels, as `ops.result` names it."""
    send: int
    """Place on the sending rank."""
    expected: float
    """Time shortly before the receive: messages that are sent at one place go in the order of these."""
    receive: int
    """Place on the receiving rank."""
    reader: int
    """Op that the receive must precede: the reader, or an earlier one that reads a later message of the channel."""
    complete: int
    """Place on the sending rank at which the send has surely been received."""


class RankMessages:
    """The messages that one rank gives and reads."""

    def __init__(self, rank: int, spans: Sequence[Span], shape: PipelineShape) -> None:
        self.spans = spans
        self.given: dict[Channel, list[tuple[Op, int]]] = defaultdict(list)
        """Per channel, the messages in the order of their ops, each with the place of its op."""
        self.readers: dict[Op, int] = {}
        """Per message, the place of the op that reads it."""
        ranks = [shape.rank_of(stage) for stage in range(shape.num_stages)]
        for place, span in enumerate(spans):
            message, reader = result(span.op), reader_of(result(span.op), shape)
            if reader is not None and ranks[reader.stage] != rank:
                self.given[Channel(rank, ranks[reader.stage], message.kind)].append((message, place))
            needed = received(span.op, shape)
            if needed is not None and ranks[needed.stage] != rank:
                self.readers[needed] = place


def postings(
    channel: Channel, source: RankMessages, target: RankMessages, *, under_ops: bool = True
) -> Iterator[Posting]:
    """Yield where the messages of a channel are posted, in their order."""
    # Without their backwards, as in an evaluation, some results have no reader.
    messages = [(message, place) for message, place in source.given[channel] if message in target.readers]
    # Receives keep the order of the sends, so one is due when any that follows it is.
    due = list(accumulate((target.readers[message] for message, _ in reversed(messages)), min))[::-1]
    send = receive = 0
    starts = [span.start for span in source.spans]
    for (message, producer), reader in zip(messages, due, strict=True):
        begins = source.spans[producer].start
        receive = max(receive, reader - under_ops)
        while target.spans[receive].end <= begins:
            receive += 1
        before = target.spans[receive - 1] if receive else _NOTHING
        expected = before.start if under_ops else before.end
        send = max(send, producer + 1)
        while send < len(source.spans) and (
            source.spans[send].end <= expected if under_ops else source.spans[send].start < expected
        ):
            send += 1
        complete = max(send, bisect_left(starts, target.spans[target.readers[message]].end))
        yield Posting(message, send, expected, receive, reader, complete)


FEW_OPS = 16_384
"""Ops of a step for which plain Python takes a second or two, about as long as loading compiled code."""

SpansOfRank = Callable[[int], Sequence[Span]]
"""Called with a pipeline rank, returns its ops with their simulated start and end."""


class Proof(NamedTuple):
    """Under which conditions the programs of a schedule end."""

    assumes_queues: bool
    """Whether no two streams of a rank may share a hardware queue."""
    under_ops: bool = True
    """Whether messages may travel under ops; False if only programs without that are proven."""

    def waits(self, exchange: ExpertExchange) -> str | None:
        """Where hosts wait for the sizes of exchanges, and when messages travel, in words; None without exchanges."""
        if exchange is not ExpertExchange.ALLTOALL:
            return None if exchange is ExpertExchange.NONE else "allgather: no host waits"
        waits = "alltoall: all hosts of a stage wait in every forward for the sizes"
        between = "messages travel between ops; under ops with allgather, or with one stage on each rank"
        return waits if self.under_ops else f"{waits}, and {between}"


def lowering_costs(shape: PipelineShape) -> OpCosts:
    """Costs of the timeline that programs are lowered from where no others are known: a backward takes two forwards."""
    return OpCosts.uniform(shape, weight_gradient=1.0)


@dataclass(eq=False)
class ProvenSchedule:
    """A schedule on a device: simulated, lowered and proven to end, once for each shape.

    The trainer proves all shapes of a run before any process group exists, and gives the same object to the engine.
    """

    schedule: Schedule
    """Order of the ops."""
    device: DeviceModel = field(default_factory=DeviceModel)
    """Device, as a model, on which programs must end."""
    host_copies: HostCopySettings | None = None
    """Settings of the copies to the host; None for no copies."""
    costs: Callable[[PipelineShape], OpCosts] = lowering_costs
    """Costs of the ops of a shape, the same on all ranks, by which messages are placed."""
    complete: bool = True
    """Whether every token slice must go forward and backward."""

    def __post_init__(self) -> None:
        self.device = replace(self.device, copies=self.host_copies is not None)
        self._spans: dict[PipelineShape, SpansOfRank] = {}
        self._proofs: dict[PipelineShape, Proof] = {}
        self._programs: dict[tuple[PipelineShape, bool, int], Program] = {}

    @cached_property
    def evaluation(self) -> "ProvenSchedule":
        """Forwards only; they end with every assignment of streams to queues."""
        return ProvenSchedule(forward_order, replace(self.device, hardware_queues=None), complete=False)

    def spans(self, shape: PipelineShape) -> SpansOfRank:
        """Return the simulated spans of any rank, by its number."""
        if shape not in self._spans:
            self._spans[shape] = self._simulate(shape)
        return self._spans[shape]

    def _simulate(self, shape: PipelineShape) -> SpansOfRank:
        check_num_ops(shape)
        costs = self.costs(shape).in_order()
        if num_ops(shape) <= FEW_OPS:
            orders = rank_orders(self.schedule, shape)
            if self.complete:
                # A forward without its backward would train on a part of the gradients, without an error.
                check_complete(orders, shape)
            return simulate(orders, shape, costs).spans.__getitem__
        from deepspeed_ext.plan.simulate.compiled import CompiledOrders

        compiled = CompiledOrders.of_schedule(self.schedule, shape)
        if self.complete:
            compiled.check_complete()
        return compiled.simulate(costs).spans

    def forwards_come_first(self, shape: PipelineShape) -> bool:
        """Whether all forwards of a training step precede its backwards on every stage.

        They do if they do on the last stage: its forwards follow, and its backwards precede, those ops elsewhere.
        """
        spans = self.spans(shape)(shape.rank_of(shape.last_stage))
        kinds = [span.op.kind for span in spans if span.op.stage == shape.last_stage]
        return all(kind is OpKind.FORWARD for kind in kinds[: kinds.count(OpKind.FORWARD)])

    @property
    def messages_under_ops(self) -> bool:
        """Whether messages may travel under ops in steps of all shapes that were proven."""
        return all(proof.under_ops for proof in self._proofs.values())

    def proof(self, shape: PipelineShape) -> Proof:
        """Prove that the programs of a shape end.

        Up to `FEW_OPS` ops the model of devices runs the programs of all ranks. For more, it is enough that the
        schedule can be simulated: the rules of `postings` ensure the rest, where each stream has a hardware queue of
        its own, and without drains on all ranks or messages under ops.

        Raises:
            ScheduleDeadlock: if ranks would wait for each other, or that they do not cannot be proven.
        """
        if shape not in self._proofs:
            self._proofs[shape] = self._proof(shape)
        return self._proofs[shape]

    def _proof(self, shape: PipelineShape) -> Proof:
        device, waits = self.device, self.device.exchange is ExpertExchange.ALLTOALL
        if num_ops(shape) > FEW_OPS:
            self.spans(shape)
            if not device.has_queues_for(shape):
                raise ScheduleDeadlock(
                    f"{num_ops(shape):,} ops are too many to prove that they do not deadlock where "
                    f"{device.sharing(shape)}"
                )
            return Proof(device.hardware_queues is not None, under_ops=not waits)
        programs = self.programs(shape)
        assumes, under_ops = check_programs(programs, shape, device), True
        if waits:
            # `DeviceModel.host_waits` has the waits for the computing stream. New sizes of memory may drain the device.
            try:
                assumes |= check_programs(programs, shape, replace(device, drains=Drains.FORWARDS))
            except ScheduleDeadlock:
                under_ops = False
        if device.hardware_queues is not None or not under_ops:
            settled = self.programs(shape, under_ops=False)
            assumes |= check_programs(settled, shape, replace(device, drains=Drains.ALL_RANKS))
        return Proof(assumes, under_ops)

    def programs(self, shape: PipelineShape, *, under_ops: bool = True) -> list[Program]:
        """Lower all ranks, and check their host copies.

        Args:
            under_ops: whether messages may travel while ranks compute; False for steps in which all may drain.
        """
        spans, ranks = self.spans(shape), range(shape.num_ranks)
        messages = {rank: RankMessages(rank, spans(rank), shape) for rank in ranks}
        for rank in ranks:
            self._programs[shape, under_ops, rank] = lower_rank(rank, messages, shape, under_ops, self.host_copies)
        programs = [self._programs[shape, under_ops, rank] for rank in ranks]
        if self.host_copies is not None:
            check_host_copies(programs, shape, self.host_copies)
        return programs

    def program(self, rank: int, shape: PipelineShape, *, under_ops: bool = True) -> Program:
        """Return the proven program of one rank; programs of other ranks are dropped.

        Args:
            under_ops: whether messages may travel under ops, where that is proven; False where ranks may load kernels.
        """
        under_ops &= self.proof(shape).under_ops
        self._programs = {key: program for key, program in self._programs.items() if key[-1] == rank}
        key = shape, under_ops, rank
        if key not in self._programs:
            spans = self.spans(shape)
            messages = {each: RankMessages(each, spans(each), shape) for each in partners(rank, shape)}
            self._programs[key] = lower_rank(rank, messages, shape, under_ops, self.host_copies)
        return self._programs[key]


def lower(
    schedule: Schedule,
    shape: PipelineShape,
    *,
    costs: OpCosts | None = None,
    under_ops: bool = True,
    device: DeviceModel | None = None,
    host_copies: HostCopySettings | None = None,
) -> list[Program]:
    """Lower a schedule to one program per pipeline rank, and check that they run to their end.

    Args:
        costs: of the ops, which determine the best places of messages; None for `lowering_costs`.
        under_ops: messages may travel while ranks compute; False for steps in which all ranks may drain at any op.
        device: on which they must end; None for the default of `DeviceModel`, with drains on one rank or on all.

    Raises:
        ScheduleDeadlock: if the schedule, or the placement of its transfers, would leave ranks waiting for each other.
    """
    device = device or DeviceModel(drains=Drains.ONE_RANK if under_ops else Drains.ALL_RANKS)
    priced = lowering_costs if costs is None else lambda _: costs
    proven = ProvenSchedule(schedule, device, host_copies, priced, complete=False)
    programs = proven.programs(shape, under_ops=under_ops)
    check_programs(programs, shape, proven.device)
    return programs


_Step = tuple[InstructionKind, Op]
"""An instruction before it has a buffer, and the op that it is or serves."""


def partners(rank: int, shape: PipelineShape) -> set[int]:
    """Return a rank and those it exchanges messages with."""
    return {rank, *(member for channel in channels(shape) if rank in channel[:2] for member in channel[:2])}


def lower_rank(
    rank: int,
    messages: Mapping[int, RankMessages],
    shape: PipelineShape,
    under_ops: bool,
    host_copies: HostCopySettings | None,
) -> Program:
    """Lower the ops of one rank, given the messages of its `partners`."""
    sends, receives, completions = (defaultdict[int, list[Posting]](list) for _ in range(3))
    for channel in channels(shape):
        if rank not in channel[:2]:
            continue
        for posting in postings(channel, messages[channel.source], messages[channel.target], under_ops=under_ops):
            if channel.source == rank:
                sends[posting.send].append(posting)
                completions[posting.complete].append(posting)
            else:
                receives[posting.receive].append(posting)

    def transfers(place: int) -> tuple[list[_Step], list[_Step], list[_Step]]:
        """Sends, receives and completions of a place."""
        sent = sorted(sends[place], key=lambda posting: posting.expected)
        due = sorted(receives[place], key=lambda posting: posting.reader)
        complete = sorted(completions[place], key=lambda posting: (posting.send, posting.expected))
        return (
            [(SEND[posting.message.kind], posting.message) for posting in sent],
            [(RECEIVE[posting.message.kind], reader_of_message(posting.message, shape)) for posting in due],
            [(COMPLETE[posting.message.kind], posting.message) for posting in complete],
        )

    copied, nothing = dict[int, CopiesOfPlace](), CopiesOfPlace([], [], [])
    if host_copies is not None:
        from deepspeed_ext.plan.simulate.host_copies import TimedColumns, plan_host_copies

        timed = TimedColumns.of(messages[rank].spans)
        copied = copies_by_place(plan_host_copies(timed, shape, host_copies).copies())
    steps: list[_Step] = []
    loaded: set[int] = set()
    for place, (op, *_) in enumerate(messages[rank].spans):
        sending, receiving, completing = transfers(place)
        # Sends are first: another rank waits for them. Drops are last: this rank may have to wait for them.
        offloading, fetching, dropping = (
            [(table[copy.content], copy.op) for copy in of_place]
            for table, of_place in zip((OFFLOAD, FETCH, DROP), copied.get(place, nothing), strict=True)
        )
        steps += [*sending, *offloading]
        # Before the first receive, since the shape of a message may depend on the data.
        for each in (*(reader for _, reader in receiving), op):
            if each.micro_batch not in loaded:
                loaded.add(each.micro_batch)
                steps.append((InstructionKind.LOAD_MICRO_BATCH, each))
        steps += [*receiving, *completing, *fetching, *dropping, (COMPUTE[op.kind], op)]
        reader = reader_of(result(op), shape)
        if reader is not None and shape.rank_of(reader.stage) == rank:
            steps.append((PASS[reader.kind], result(op)))
    sending, _, completing = transfers(len(messages[rank].spans))
    return with_reductions(_assign_buffers(rank, steps + sending + completing))


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
