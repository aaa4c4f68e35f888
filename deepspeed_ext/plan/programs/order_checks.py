"""Checks that need no model of a device: what channels carry, and where the data of each op are.

channels       both ends of a channel name the same messages in the same order
host copies    what an op reads is on the device; a thing goes to the host once, is dropped after that, comes back
               once, and never while it is there
"""

from collections import defaultdict
from collections.abc import Sequence

from deepspeed_ext.plan.dependencies import reader_of
from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.program import (
    COMPUTES,
    DROPS,
    FETCHES,
    HOST_COPIES,
    OFFLOADS,
    RECEIVES,
    SENDS,
    Channel,
    Content,
    Instruction,
    Program,
    content_of,
    message_of,
)


def check_channels(programs: Sequence[Program], shape: PipelineShape) -> None:
    """Hold what one end of a channel sends against what the other end receives: the same messages in the same order.

    Raises:
        ScheduleDeadlock: if they differ.
    """
    sent: dict[Channel, list[Op]] = defaultdict(list)
    taken: dict[Channel, list[Op]] = defaultdict(list)
    for program in programs:
        for instruction in program.instructions:
            if instruction.kind in SENDS:
                reader = reader_of(instruction.op, shape)
                assert reader is not None, "what is sent is read by another stage"
                sent[Channel(program.rank, shape.rank_of(reader.stage), reader.kind)].append(instruction.op)
            elif instruction.kind in RECEIVES:
                message = message_of(instruction, shape)
                taken[Channel(shape.rank_of(message.stage), program.rank, message.kind)].append(message)
    for channel in sorted(sent.keys() | taken.keys()):
        if sent[channel] != taken[channel]:
            messages, receives = (", ".join(map(str, ops[channel])) or "nothing" for ops in (sent, taken))
            raise ScheduleDeadlock(
                f"rank {channel.source} sends {messages} to rank {channel.target}, which receives {receives}: "
                "both ends of a channel must keep one order"
            )


_Thing = tuple[Content, int, int, int]
"""What a host copy is of: content, stage, micro-batch, token slice."""


def check_host_copies(programs: Sequence[Program], shape: PipelineShape, settings: HostCopySettings) -> None:
    """See that each op finds what it reads on its device, and that each copy is of something that is there.

    Args:
        settings: that the copies follow; they say which token slices read which.

    Raises:
        PlanError: if not.
    """
    settings = settings.fitting(shape)
    for program in programs:
        _Data(settings).follow(program)


class _Data:
    """Where the data of one rank are while its program runs."""

    def __init__(self, settings: HostCopySettings) -> None:
        self._settings = settings
        self._away: dict[tuple[Content, int, int], set[int]] = defaultdict(set)  # token slices that are dropped
        self._done: dict[_Thing, frozenset[str]] = {}  # the last that was done with a thing

    def follow(self, program: Program) -> None:
        """Go through the instructions of a rank, first to last."""
        for instruction in program.instructions:
            if instruction.kind in HOST_COPIES:
                self._copy(instruction, program.rank)
            elif instruction.kind in COMPUTES:
                self._read(instruction, program.rank)
        for thing, done in self._done.items():
            if done is not FETCHES:
                raise PlanError(f"rank {program.rank} leaves {_name(thing)} on the host: fetch it before its backward")

    def _copy(self, instruction: Instruction, rank: int) -> None:
        content = content_of(instruction.kind)
        thing = (content, *instruction[1:4])
        for kinds, before in ((OFFLOADS, None), (DROPS, OFFLOADS), (FETCHES, DROPS)):
            if instruction.kind in kinds:
                if self._done.get(thing) is not before:
                    raise PlanError(
                        f"'{instruction}' of rank {rank} is out of order: offload, drop and fetch {_name(thing)} once "
                        "each, one after the other"
                    )
                self._done[thing] = kinds
        away = self._away[content, instruction.stage, instruction.micro_batch]
        if instruction.kind in DROPS:
            away.add(instruction.token_slice)
        elif instruction.kind in FETCHES:
            away.remove(instruction.token_slice)

    def _read(self, instruction: Instruction, rank: int) -> None:
        op = instruction.op
        if op.kind is OpKind.WEIGHT_GRADIENT:  # it reads what its input gradient has kept
            return
        for content in Content:
            for each in self._away.get((content, op.stage, op.micro_batch), ()):
                if each <= op.token_slice <= self._settings.last_reader(content, op.stage, each):
                    thing = _name((content, op.stage, op.micro_batch, each))
                    raise PlanError(f"'{instruction}' of rank {rank} reads {thing}, not on its device: fetch it before")


def _name(thing: _Thing) -> str:
    content, *unit = thing
    return f"the {content.value} of {Op(OpKind.FORWARD, *unit)}"
