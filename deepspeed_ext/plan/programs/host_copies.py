"""Host copies: keys, values and stage inputs that are not read for long wait in host memory.

The plan (`simulate.host_copies`) places the copies, not hooks at run time: so the memory, the need of copies and the
time for them are known before the run, and every copy is checked.

The forward of a token slice leaves two things on its stage for the backward: the stage's input, from which the stage
is recomputed, and keys and values. Between the last forward that reads one and the first backward that does is a
pause, in which the rank may run whole other stages. A pause longer than a copy to the host and one back is used:

    rank     | [0F0.0][0F0.1]         other stages          [0B0.1][0B0.0]
    to host  |        [offload 0.0][0.1]                                        copies of one direction go one after
    from host|                               [fetch 0.0][0.1]                   the other
    device   | [====== 0.0 ========]         [============================]
    host     |        [=============================]

    offload    posted right after the forward. Keys and values do not change after it, so others may still read them
    drop       after the last forward that reads them, and the end of the copy: the device frees them
    fetch      posted as late as it may be and still arrive in time; the op that reads waits for its end

Copies change the order of no op. Each thing goes to the host and back at most once. A copy is posted at its place p,
when all ops before op p have ended. The rank waits twice: to drop, until the copy to the host has ended; and before an
op, until all that it reads is back.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.program import (
    COMPUTES,
    DROPS,
    FETCHES,
    HOST_COPIES,
    OFFLOADS,
    Content,
    InstructionKind,
    Program,
    content_of,
)
from deepspeed_ext.plan.slicing import TokenSlices


@dataclass(frozen=True, slots=True)
class HostCopySettings:
    """Tensors that may wait on the host, and the bandwidths of their copies."""

    lengths: tuple[int, ...]
    """Tokens of each token slice."""
    input_bytes: tuple[float, ...]
    """Per stage, bytes of its input for one token of a micro-batch; 0 for an input that is never copied, such as the
    tokens that the first stage reads."""
    key_value_bytes: tuple[float, ...]
    """Per stage, bytes of the keys and values of all its layers for one token of a micro-batch."""
    to_host: float = inf
    """Bytes per time from the device to the host, in the unit of the timeline that copies are planned on."""
    from_host: float = inf
    """Bytes per time back."""
    host_bytes: float = inf
    """Most bytes of the host that a rank uses at a time."""
    windows: tuple[int | None, ...] = ()
    """Per stage, its widest sliding window in tokens; None where a layer attends to all tokens before. Empty where no
    stage has one."""

    def __post_init__(self) -> None:
        for name in ("to_host", "from_host"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name}={getattr(self, name)!r} bytes per time would never end: give more than 0")
        if not self.host_bytes >= 0:
            raise PlanError(f"host_bytes={self.host_bytes!r} cannot be: give 0 or more")
        for name in ("input_bytes", "key_value_bytes"):
            if not all(0 <= entry < inf for entry in getattr(self, name)):
                raise PlanError(f"{name} {list(getattr(self, name))} cannot be: give finite numbers of bytes >= 0")
        TokenSlices(self.lengths)

    def fitting(self, shape: PipelineShape) -> "HostCopySettings":
        """Return the settings for a shape; for another number of token slices, with equal lengths of the same sum."""
        windows = self.windows or (None,) * shape.num_stages
        by_stage = {"input_bytes": self.input_bytes, "key_value_bytes": self.key_value_bytes, "windows": windows}
        for name, entries in by_stage.items():
            if len(entries) != shape.num_stages:
                raise PlanError(f"{len(entries)} {name} for {shape.num_stages} stages: give one for each stage")
        lengths = self.lengths
        if len(lengths) != shape.num_token_slices:
            each = max(1, round(sum(lengths) / shape.num_token_slices))
            lengths = (each,) * shape.num_token_slices
        return replace(self, lengths=lengths, windows=windows)

    def size(self, content: Content, stage: int, token_slice: int) -> float:
        """Return the bytes of a copy."""
        table = self.input_bytes if content is Content.INPUT else self.key_value_bytes
        return self.lengths[token_slice] * table[stage]

    def last_reader(self, content: Content, stage: int, token_slice: int) -> int:
        """Return the last token slice that reads a tensor: of keys and values, the last that has them in its window."""
        if content is Content.INPUT:
            return token_slice
        window = self.windows[stage] if self.windows else None
        if window is None:
            return len(self.lengths) - 1
        # A token slice reaches window - 1 tokens back from its first.
        firsts = list(accumulate(self.lengths[:-1], initial=0))
        end = firsts[token_slice] + self.lengths[token_slice]
        return bisect_left(firsts, end + window - 1) - 1


class HostCopy(NamedTuple):
    """The copy of one tensor to the host and back. A place p is before op p of the rank's order."""

    content: Content
    stage: int
    micro_batch: int
    token_slice: int
    size: float
    offload: int
    """Place at which the copy to the host is posted: after the forward of its token slice."""
    drop: int
    """Place at which the device frees it."""
    fetch: int
    """Place at which the copy back is posted."""
    reader: int
    """The op that waits for it, by its number in the rank's order."""

    @property
    def op(self) -> Op:
        """The forward that writes the copied tensors."""
        return Op(OpKind.FORWARD, self.stage, self.micro_batch, self.token_slice)


class CopiesOfPlace(NamedTuple):
    """Copies that have an instruction at one place of a rank, in the order in which they are posted."""

    offloaded: list[HostCopy]
    fetched: list[HostCopy]
    dropped: list[HostCopy]
    """Last, since the rank may have to wait to drop."""


def copies_by_place(copies: Iterable[HostCopy]) -> dict[int, CopiesOfPlace]:
    """Return the copies offloaded, fetched and dropped at each place of a rank; missing places have none."""
    places: dict[int, CopiesOfPlace] = defaultdict(lambda: CopiesOfPlace([], [], []))
    for copy in copies:
        places[copy.offload].offloaded.append(copy)
        places[copy.drop].dropped.append(copy)
        places[copy.fetch].fetched.append(copy)
    for place in places.values():
        place.offloaded.sort(key=lambda copy: copy.content)
    return dict(places)


class TimedCopy(NamedTuple):
    """The copy of one tensor to the host and back. It is on the device until `dropped`, and from `fetch_start` on."""

    content: Content
    stage: int
    micro_batch: int
    token_slice: int
    offload_start: float
    offload_end: float
    dropped: float
    fetch_start: float
    fetch_end: float


class CopyLanes:
    """The lanes of one rank while its ops are simulated, first to last."""

    def __init__(self, copies: Sequence[HostCopy] = (), to_host: float = inf, from_host: float = inf) -> None:
        self._places = copies_by_place(copies)
        self._speeds = to_host, from_host
        self._free = [-inf, -inf]
        self._fetched: dict[int, float] = {}
        self._offloads: dict[HostCopy, tuple[float, float]] = {}
        self._dropped: dict[HostCopy, float] = {}
        self._fetches: dict[HostCopy, tuple[float, float]] = {}

    def _run(self, lane: int, copy: HostCopy, time: float) -> tuple[float, float]:
        """Start and end of a copy that is posted at a time."""
        start = max(time, self._free[lane])
        self._free[lane] = start + copy.size / self._speeds[lane]
        return start, self._free[lane]

    def post(self, place: int, time: float) -> float:
        """Post the copies of a place, and return the time at which the rank continues: a drop waits for the copy."""
        copied = self._places.get(place)
        if copied is None:
            return time
        for copy in copied.offloaded:
            self._offloads[copy] = self._run(0, copy, time)
        for copy in copied.fetched:
            self._fetches[copy] = self._run(1, copy, time)
            self._fetched[copy.reader] = self._fetches[copy][1]
        for copy in copied.dropped:
            time = max(time, self._offloads[copy][1])
            self._dropped[copy] = time
        return time

    def fetched_at(self, number: int) -> float:
        """Time at which all fetches of an op are back, by its number in the order of the rank."""
        return self._fetched.get(number, -inf)

    def timed(self) -> Iterator[TimedCopy]:
        """Yield the copies that have run, in the order in which they went to the host."""
        for copy, offload in self._offloads.items():
            fetch = self._fetches[copy]
            yield TimedCopy(*copy[:4], *offload, self._dropped[copy], *fetch)


def check_host_copies(programs: Sequence[Program], shape: PipelineShape, settings: HostCopySettings) -> None:
    """Check that the inputs of each op are on its device, and that each copy is of a tensor that exists."""
    settings = settings.fitting(shape)
    before = {OFFLOADS: None, DROPS: OFFLOADS, FETCHES: DROPS}
    for program in programs:
        # The last that was done with a thing, and the token slices of a micro-batch on a stage that are dropped.
        done: dict[tuple[Content, int, int, int], frozenset[InstructionKind]] = {}
        away: dict[tuple[Content, int, int], set[int]] = defaultdict(set)
        for instruction in program.instructions:
            _, stage, micro_batch, token_slice, _ = instruction
            if instruction.kind in HOST_COPIES:
                content = content_of(instruction.kind)
                kinds = next(kinds for kinds in before if instruction.kind in kinds)
                if done.get((content, stage, micro_batch, token_slice)) is not before[kinds]:
                    raise PlanError(
                        f"'{instruction}' of rank {program.rank} is out of order: offload, drop and fetch "
                        f"{_name(content, stage, micro_batch, token_slice)} once each, one after the other"
                    )
                done[content, stage, micro_batch, token_slice] = kinds
                if kinds is DROPS:
                    away[content, stage, micro_batch].add(token_slice)
                elif kinds is FETCHES:
                    away[content, stage, micro_batch].remove(token_slice)
            elif instruction.kind in COMPUTES and instruction.kind is not InstructionKind.WEIGHT_GRADIENT:
                # A weight gradient reads tensors that its input gradient has kept.
                for content in Content:
                    for each in away[content, stage, micro_batch]:
                        if each <= token_slice <= settings.last_reader(content, stage, each):
                            raise PlanError(
                                f"'{instruction}' of rank {program.rank} reads "
                                f"{_name(content, stage, micro_batch, each)}, not on its device: fetch it before"
                            )
        for thing, kinds in done.items():
            if kinds is not FETCHES:
                raise PlanError(f"rank {program.rank} leaves {_name(*thing)} on the host: fetch it before its backward")


def _name(content: Content, *unit: int) -> str:
    return f"the {content.value} of {Op(OpKind.FORWARD, *unit)}"
