"""The fast simulator: op orders as arrays, simulated by compiled code for one set of costs after another.

    orders --CompiledOrders.of--> arrays --simulate(costs)--> SimulatedOrders: starts, ends, makespan, bubble
                                     '----simulate(other costs)--> ...

Ops are numbers in the order in which ranks run them. A result has the number unit + units x kind, where units count
stages, micro-batches and token slices; where it arrives on another rank it has one more number, after all those.

numba is imported when it is first needed.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.memory import token_lengths
from deepspeed_ext.plan.ops import LIVE_CHANGE, Op, OpKind, PipelineShape, parts, reading_stage, reads_of, result
from deepspeed_ext.plan.programs.host_copies import HostCopyPlan, TimedCopy
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.simulate import STEP_PARTS, check_complete, check_orders, simulate
from deepspeed_ext.plan.timeline import Span, Timeline

Numbers = np.ndarray[Any, Any]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

NOTHING = -1

OFFLOADED, FETCHED, DROPPED = range(3)
"""Events of a host copy at a place, and the rows of their times."""


def simulate_ops(
    bounds: Numbers,
    needs: Numbers,
    gives: Numbers,
    arrives: Numbers,
    targets: Numbers,
    channels: Numbers,
    durations: Numbers,
    sending: Numbers,
    latency: Numbers,
    posts: Numbers,
    posted: Numbers,
    copying: Numbers,
    back: Numbers,
    ready: Numbers,
    free: Numbers,
    lanes: Numbers,
    copied: Numbers,
    starts: Numbers,
    ends: Numbers,
) -> int:
    """Simulate all ops of all ranks; a rank that must wait is resumed when the result that it waits for is there.

    Args:
        bounds: [R + 1] first op of each rank, and then the end of all; of N ops in total.
        needs: [K * N] numbers of the results that op n waits for at K * n .. K * n + K; NOTHING fills up.
        gives: [N] number of the op's result on its own rank.
        arrives: [N] number of the result on the rank it is sent to; NOTHING if it stays.
        targets: [N] that rank.
        channels: [N] channel that it takes.
        durations: [N] time of the op.
        sending: [N] time for which its message keeps the channel busy.
        latency: [N] time from then until it is there.
        posts: [N + 1] first index in `posted` of the host copies with a place after op n.
        posted: [events] number of a copy, times 3, plus its event.
        copying: [2 * C] times of C copies to the host, then of those from it.
        back: [N] the copy that op n waits for; NOTHING if none.
        ready: [results] filled with -1; becomes the time at which each result is there.
        free: [channels] filled with 0; becomes the time at which each channel is free.
        lanes: [2 * R] filled with 0; becomes the time at which the lanes of each rank to its host and back are free.
        copied: [3 * C] becomes the start of each copy to the host, then of those from it, then when each was dropped.
        starts: [N] becomes the start of each op.
        ends: [N] becomes the end of each op.

    Returns:
        Ops simulated: fewer than N if ranks wait for each other.
    """
    num_ranks = len(bounds) - 1
    width = len(needs) // max(len(gives), 1)
    position = [bounds[rank] for rank in range(num_ranks)]
    clock = [0.0 for _ in range(num_ranks)]
    awaited = [NOTHING for _ in range(num_ranks)]
    runnable = [num_ranks - 1 - rank for rank in range(num_ranks)]
    num_done = 0
    num_copies = len(copying) // 2
    while len(runnable) > 0:
        rank = runnable.pop()
        time = clock[rank]
        op = position[rank]
        while op < bounds[rank + 1]:
            start = time
            copy = back[op]
            if copy != NOTHING and copied[num_copies + copy] + copying[num_copies + copy] > start:
                start = copied[num_copies + copy] + copying[num_copies + copy]
            missing = NOTHING
            for place in range(width * op, width * op + width):
                needed = needs[place]
                if needed == NOTHING:
                    continue
                there = ready[needed]
                if there < 0:
                    missing = needed
                    break
                if there > start:
                    start = there
            if missing != NOTHING:
                awaited[rank] = missing
                break
            time = start + durations[op]
            starts[op] = start
            ends[op] = time
            ready[gives[op]] = time
            arriving = arrives[op]
            if arriving != NOTHING:
                channel = channels[op]
                leaves = free[channel] if free[channel] > time else time
                sent = leaves + sending[op]
                free[channel] = sent
                ready[arriving] = sent + latency[op]
                if awaited[targets[op]] == arriving:
                    awaited[targets[op]] = NOTHING
                    runnable.append(targets[op])
            for place in range(posts[op], posts[op + 1]):
                copy = posted[place] // 3
                event = posted[place] % 3
                if event == DROPPED:
                    if copied[copy] + copying[copy] > time:
                        time = copied[copy] + copying[copy]
                    copied[2 * num_copies + copy] = time
                else:
                    begins = lanes[2 * rank + event] if lanes[2 * rank + event] > time else time
                    copied[event * num_copies + copy] = begins
                    lanes[2 * rank + event] = begins + copying[event * num_copies + copy]
            op += 1
        num_done += op - position[rank]
        position[rank] = op
        clock[rank] = time
    return num_done


def compiled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a function when it is first called, and cache the code in `cache_folder`, if it can be written."""
    import numba

    _say_when_compiling()
    settings: Any = numba.config
    before = settings.CACHE_DIR, getattr(settings, "CACHE_LOCATOR_CLASSES", "")
    try:
        settings.CACHE_DIR = str(cache_folder(before[0]))
        settings.CACHE_LOCATOR_CLASSES = "UserProvidedCacheLocator"  # Else numba may write beside the file.
        return numba.njit(cache=True)(function)
    except (OSError, RuntimeError):  # The folder cannot be written, or there is no home folder.
        return numba.njit(cache=False)(function)
    finally:
        settings.CACHE_DIR, settings.CACHE_LOCATOR_CLASSES = before


@cache
def cache_folder(chosen: str = "") -> Path:
    """Return the folder of the machine code of these sources, not beside them: pip would leave it as a package.

    numba compiles a function again when its own file has changed, but not when only a function that it calls has.

    Args:
        chosen: folder in place of the user's, as NUMBA_CACHE_DIR names it; empty = the user's.
    """
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    sources = (Path(__file__), *sorted((Path(__file__).parents[1] / "solve").glob("*.py")))
    version = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    return (Path(chosen) if chosen else user / "terapipe") / f"compiled-{version}"


@cache
def _say_when_compiling() -> None:
    """Announce the first compilation of this process: it takes seconds."""
    from numba.core import event

    class _Announcement(event.Listener):
        said = os.environ.get("LOCAL_RANK", "0") != "0"

        def on_start(self, event: Any) -> None:
            if not self.said and event.data["dispatcher"].py_func.__module__.startswith(
                ("deepspeed_ext.", "megatron_terapipe.")
            ):
                self.said = True
                # On a terminal it replaces a line of progress.
                print(f"\r{COMPILING}" if sys.stderr.isatty() else COMPILING, file=sys.stderr, flush=True)

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", _Announcement())  # type: ignore[no-untyped-call]


COMPILING = "compiling loops of this package: up to 10 s, once on this machine for each version"


@cache
def compiled_loop() -> Callable[..., int]:
    """Return `simulate_ops` as machine code."""
    return compiled(simulate_ops)


KINDS = tuple(OpKind)
CODE = {kind: code for code, kind in enumerate(KINDS)}
"""Number of each kind of op."""


class OpColumns(NamedTuple):
    """Ops in columns, rank after rank; [N] each."""

    kind: Numbers
    stage: Numbers
    micro_batch: Numbers
    token_slice: Numbers

    @classmethod
    def of(cls, order: Sequence[Op]) -> "OpColumns":
        """The columns of some ops."""
        kinds, *indices = list(zip(*order, strict=True)) or [()] * 4
        kind = np.fromiter(map(CODE.__getitem__, kinds), np.int8, len(order))
        return cls(kind, *(np.array(index, np.int32) for index in indices))

    @classmethod
    def joined(cls, ranks: Sequence["OpColumns"]) -> "OpColumns":
        """The columns of one rank after the other."""
        return cls(*map(np.concatenate, zip(*ranks, strict=True)))

    def ops(self, first: int, last: int) -> list[Op]:
        """Return the ops at positions first .. last."""
        columns = (self.stage, self.micro_batch, self.token_slice)
        indices = (column[first:last].tolist() for column in columns)
        return list(map(Op, map(KINDS.__getitem__, self.kind[first:last].tolist()), *indices))

    def units(self, shape: PipelineShape) -> Numbers:
        """Return the number of each op's token slice, of one micro-batch on one stage: [ops]."""
        return _unit(self.stage, self.micro_batch, self.token_slice, shape)


class Wiring(NamedTuple):
    """Arguments of `simulate_ops`, the first five in its order, and indices of the times that it needs."""

    needs: Numbers
    gives: Numbers
    arrives: Numbers
    targets: Numbers
    channels: Numbers
    op_costs: Numbers
    """[N] where the op's time is in a table by kind, stage and token slice."""
    message_costs: Numbers
    """[N] where the times of its message are in tables by boundary and token slice."""
    num_results: int
    """Results of all ops, each counted where it is made and where it arrives."""
    num_channels: int
    """Channels, with one for results that stay on their rank."""


def fits(bounds: Numbers, columns: OpColumns, shape: PipelineShape) -> bool:
    """Whether every op is inside the shape, on its own rank, and there once, whole or in part; bounds [ranks + 1]."""
    if len(bounds) != shape.num_ranks + 1:
        return False
    extents = (shape.num_stages, shape.num_micro_batches, shape.num_token_slices)
    indices = (columns.stage, columns.micro_batch, columns.token_slice)
    if any(index.max(initial=0) >= extent for index, extent in zip(indices, extents, strict=True)):
        return False
    ranks = np.repeat(np.arange(shape.num_ranks), np.diff(bounds))
    if not np.array_equal(ranks_of_stages(shape)[columns.stage], ranks):
        return False
    units = columns.units(shape)
    for part in (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT):
        computes = [CODE[kind] for kind in KINDS if Op(part, 0, 0, 0) in parts(Op(kind, 0, 0, 0))]
        if np.bincount(units[np.isin(columns.kind, computes)], minlength=1).max() > 1:
            return False
    return True


def wire(columns: OpColumns, shape: PipelineShape) -> Wiring:
    """Look up in the table of dependencies the results that each op waits for, and the target of its own."""
    num_made = len(KINDS) * shape.num_stages * shape.num_micro_batches * shape.num_token_slices
    given = np.array([CODE[result(Op(kind, 0, 0, 0)).kind] for kind in KINDS])
    gives = given[columns.kind] * (num_made // len(KINDS)) + columns.units(shape)
    ways = ways_of(shape)
    way = columns.kind.astype(np.int64) * shape.num_stages + columns.stage
    targets = ways.targets.reshape(-1)[way]
    return Wiring(
        _needs(columns, shape, num_made).reshape(-1).astype(np.int32),
        gives.astype(np.int32),
        np.where(targets == NOTHING, NOTHING, gives + num_made).astype(np.int32),
        targets.astype(np.int32),
        ways.channels.reshape(-1)[way].astype(np.int32),
        (way * shape.num_token_slices + columns.token_slice).astype(np.int32),
        (ways.boundaries.reshape(-1)[way] * shape.num_token_slices + columns.token_slice).astype(np.int32),
        2 * num_made,
        int(ways.channels.max()) + 1,
    )


def _needs(columns: OpColumns, shape: PipelineShape, num_made: int) -> Numbers:
    """[N, K] numbers of results."""
    ranks = ranks_of_stages(shape)
    needs = np.full((len(columns.kind), max(len(reads_of(kind)) for kind in KINDS)), NOTHING, np.int64)
    for kind in KINDS:
        ops = np.flatnonzero(columns.kind == CODE[kind])
        for column, (_, needed, stages, token_slices) in enumerate(reads_of(kind)):
            there, then = columns.stage[ops] + stages, columns.token_slice[ops] + token_slices
            inside = (there >= 0) & (there < shape.num_stages) & (then >= 0) & (then < shape.num_token_slices)
            readers, there, then = ops[inside], there[inside], then[inside]
            unit = _unit(there, columns.micro_batch[readers], then, shape)
            travels = ranks[there] != ranks[columns.stage[readers]]
            needs[readers, column] = CODE[needed] * (num_made // len(KINDS)) + unit + num_made * travels
    return needs


class Ways(NamedTuple):
    """Ways of the result of each kind of op on each stage; [4 kinds, N stages] each."""

    readers: Numbers
    """The stage that reads it; NOTHING if none does."""
    targets: Numbers
    """The rank it is sent to; NOTHING if it stays."""
    channels: Numbers
    """The channel it takes; results that stay on their rank have channels of their own."""
    boundaries: Numbers
    """The stage boundary it crosses; 0 if none."""


def ways_of(shape: PipelineShape) -> Ways:
    """Return the ways of all results."""
    rows = []
    numbers: dict[tuple[int, int, OpKind], int] = {}
    for op in (Op(kind, stage, 0, 0) for kind in KINDS for stage in range(shape.num_stages)):
        reader = reading_stage(result(op), shape)
        source, target = shape.rank_of(op.stage), NOTHING if reader is None else shape.rank_of(reader)
        target = NOTHING if target == source else target
        channel = numbers.setdefault((source, target, result(op).kind), len(numbers))
        rows.append((NOTHING if reader is None else reader, target, channel, min(op.stage, reader or 0)))
    return Ways(*np.array(rows).T.reshape(4, len(KINDS), shape.num_stages).copy())


def message_times(costs: OpCosts, shape: PipelineShape) -> tuple[Numbers, Numbers]:
    """Return the times that messages keep their channel busy, and their latencies: [boundaries, token slices] each.

    There is at least one boundary, for results that stay where they are.
    """
    sending, latency = np.zeros((2, max(shape.last_stage, 1), shape.num_token_slices))
    for boundary in range(shape.last_stage):
        sending[boundary] = [costs.sending_time(boundary, each) for each in range(shape.num_token_slices)]
        latency[boundary] = costs.latency(boundary)
    return sending, latency


def ranks_of_stages(shape: PipelineShape) -> Numbers:
    """Return the rank that each stage is on: [stages]."""
    return np.array([shape.rank_of(stage) for stage in range(shape.num_stages)])


def _unit(stage: Numbers, micro_batch: Numbers, token_slice: Numbers, shape: PipelineShape) -> Numbers:
    unit: Numbers = (stage.astype("int64") * shape.num_micro_batches + micro_batch) * shape.num_token_slices
    return unit + token_slice


class CopyEvents(NamedTuple):
    """Arguments of `simulate_ops` in its order. Copies are numbered rank by rank."""

    posts: Numbers
    posted: Numbers
    copying: Numbers
    back: Numbers

    @classmethod
    def of(cls, plan: HostCopyPlan | None, bounds: Numbers) -> "CopyEvents":
        """Number the copies of a plan; bounds [ranks + 1] of the rows of ops."""
        num_ops, ranks = int(bounds[-1]), () if plan is None else plan.ranks
        copies = list(chain.from_iterable(ranks))
        content, *_, size, offload, drop, fetch, reader = zip(*copies, strict=True) if copies else [()] * 9
        first = np.repeat(bounds[: len(ranks)], list(map(len, ranks)))
        number = np.arange(len(copies))
        back = np.full(num_ops, NOTHING, np.int32)
        # Of an op the last one, since they are back in this order.
        np.maximum.at(back, first + np.array(reader, np.int64), number)
        # By op, then by event, then in the order in which copies are posted.
        op = np.concatenate([first + np.array(each, np.int64) - 1 for each in (offload, fetch, drop)])
        event = np.repeat([OFFLOADED, FETCHED, DROPPED], len(copies))
        keys_later = np.concatenate([[each is Content.KEYS_AND_VALUES for each in content], np.zeros(2 * len(copies))])
        order = np.lexsort((keys_later, event, op))
        counts = np.bincount(op, minlength=num_ops)
        speeds = (1.0, 1.0) if plan is None else (plan.to_host, plan.from_host)
        return cls(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            (3 * np.tile(number, 3) + event)[order].astype(np.int32),
            np.concatenate([np.array(size, np.float64) / speed for speed in speeds]),
            back,
        )

    @property
    def num_copies(self) -> int:
        """Copies of all ranks."""
        return len(self.copying) // 2

    def timed(self, plan: HostCopyPlan | None, copied: Numbers) -> Iterator[TimedCopy]:
        """Yield the copies that have run, by rank and start, from their times [3 * copies]."""
        if plan is None:
            return
        to_host, from_host = self.copying.reshape(2, -1)
        offloaded, fetched, dropped = copied.reshape(3, -1)
        times = zip(
            *(each.tolist() for each in (offloaded, offloaded + to_host, dropped, fetched, fetched + from_host)),
            strict=True,
        )
        for copies in plan.ranks:
            timed = [(copy.offload, TimedCopy(*copy[:4], *next(times))) for copy in copies]
            yield from (copy for _, copy in sorted(timed, key=lambda each: (each[0], each[1].content)))


@dataclass(frozen=True)
class SimulatedOrders:
    """When each op of compiled orders ran."""

    compiled: "CompiledOrders"
    starts: Numbers
    """[N] start of each op, rank after rank."""
    ends: Numbers
    """[N] end of each op."""
    copies: CopyEvents
    plan: HostCopyPlan | None
    copied: Numbers
    """[3 * C] times of the copies, as `simulate_ops` has them."""

    @cached_property
    def host_copies(self) -> tuple[TimedCopy, ...]:
        """Copies to the host and back, by rank and start."""
        return tuple(self.copies.timed(self.plan, self.copied))

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

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The ops of one rank, with their start and end."""
        own = slice(*self.compiled.bounds[rank : rank + 2].tolist())
        return tuple(map(Span, self.compiled.order(rank), self.starts[own].tolist(), self.ends[own].tolist()))

    def timeline(self) -> Timeline:
        """Return a timeline for drawings and the like, without transfers."""
        spans = tuple(map(self.spans, range(self.compiled.shape.num_ranks)))
        return Timeline(self.compiled.shape, spans, host_copies=self.host_copies)


@dataclass(frozen=True, eq=False)
class CompiledOrders:
    """Op orders of all ranks as arrays, one after the other; N ops. Make them with `of`."""

    shape: PipelineShape
    bounds: Numbers
    """[R + 1] where the ops of each rank begin and end."""
    columns: OpColumns
    wiring: Wiring
    """The results that they wait for, give and send."""

    @classmethod
    def of(cls, orders: Iterable[Sequence[Op]], shape: PipelineShape) -> "CompiledOrders":
        """Compile orders. Linear in the number of ops, and several times slower than a simulation.

        Args:
            orders: op order of each rank. Only one is needed at a time, so they may be generated on the way.
        """
        ranks = list(map(OpColumns.of, orders))
        bounds = np.cumsum([0, *(len(rank.kind) for rank in ranks)])
        columns = OpColumns.joined(ranks)
        if not fits(bounds, columns, shape):
            check_orders([columns.ops(first, last) for first, last in pairwise(bounds)], shape)  # raises the error
        return cls(shape, bounds, columns, wire(columns, shape))

    @classmethod
    def of_schedule(cls, schedule: Schedule, shape: PipelineShape) -> "CompiledOrders":
        """Generate the orders of a schedule and compile them."""
        return cls.of((list(schedule(shape, rank)) for rank in range(shape.num_ranks)), shape)

    def order(self, rank: int) -> list[Op]:
        """The ops of one rank."""
        return self.columns.ops(*self.bounds[rank : rank + 2])

    @property
    def orders(self) -> list[list[Op]]:
        """The ops of each rank."""
        return list(map(self.order, range(self.shape.num_ranks)))

    def check_complete(self) -> None:
        """Check that all ops of a training step are there."""
        units = self.shape.num_stages * self.shape.num_micro_batches * self.shape.num_token_slices
        counts = np.bincount(self.columns.kind, minlength=len(KINDS))
        computed = Counter[OpKind]()
        for code, kind in enumerate(KINDS):
            for part in parts(Op(kind, 0, 0, 0)):
                computed[part.kind] += int(counts[code])
        # No op is there twice, so each part is there for all token slices if there are as many.
        if any(computed[kind] < units for kind in STEP_PARTS):
            check_complete(self.orders, self.shape)

    def simulate(self, costs: OpCosts, host_copies: HostCopyPlan | None = None) -> SimulatedOrders:
        """Simulate: the times equal `simulate.simulate`'s to the last bit."""
        num_ops = int(self.bounds[-1])
        starts, ends = np.zeros(num_ops), np.zeros(num_ops)
        wiring = self.wiring
        copies = CopyEvents.of(host_copies, self.bounds)
        copied = np.zeros(3 * copies.num_copies)
        ready, free = np.full(wiring.num_results, -1.0), np.zeros(wiring.num_channels)
        lanes = np.zeros(2 * self.shape.num_ranks)
        num_done = compiled_loop()(
            *(self.bounds, *wiring[:5], *self._times(costs), *copies, ready, free, lanes, copied, starts, ends)
        )
        if num_done < num_ops:
            simulate(self.orders, self.shape, costs)  # raises the error
            raise AssertionError("the plain simulator ends where the fast one does not")
        return SimulatedOrders(self, starts, ends, copies, host_copies, copied)

    def peak_activation(self, lengths: Sequence[float] | None = None) -> tuple[float, ...]:
        """Per rank its peak of activations, equal to `memory.peak_activation`; it needs no costs."""
        lengths = token_lengths(lengths, self.shape)
        signs = np.array([LIVE_CHANGE[kind] for kind in KINDS])
        changes = signs[self.columns.kind] * np.array(lengths)[self.columns.token_slice]
        whole = sum(lengths) * self.shape.num_model_chunks
        bounds = self.bounds.tolist()
        peaks = (np.cumsum(changes[first:last]).max(initial=0) for first, last in pairwise(bounds))
        return tuple(float(peak / whole) for peak in peaks)

    def _times(self, costs: OpCosts) -> tuple[Numbers, Numbers, Numbers]:
        """Durations, and times of messages on their channel and after it: [N] each."""
        durations = np.zeros((len(KINDS), self.shape.num_stages, self.shape.num_token_slices))
        for code in np.flatnonzero(np.bincount(self.columns.kind)).tolist():
            durations[code] = costs.durations(KINDS[code])
        sending, latency = message_times(costs, self.shape)
        messages = self.wiring.message_costs
        return durations.reshape(-1)[self.wiring.op_costs], sending.reshape(-1)[messages], latency.reshape(-1)[messages]
