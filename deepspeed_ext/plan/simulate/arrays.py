"""Pipelines, their costs and host copies as arrays, for code that is compiled.

Kinds are numbers here: 0 forward, 1 input gradient, 2 weight gradient, 3 whole backward. A unit is a token slice of a
micro-batch, `micro_batch * S + token_slice`. An op is one number, `(kind * N + stage) * M * S + unit`, for N stages.

numba is imported when it is first needed.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.ops import LIVE_CHANGE, Op, OpKind, PipelineShape, parts, reading_stage, reads_of, result

Numbers = np.ndarray[Any, Any]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

NOTHING = -1


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
    sources = sorted(Path(__file__).parents[1].glob("s[io]*/*.py"))  # Of `simulate` and `solve`.
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


KINDS = (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.BACKWARD)
"""Kinds of ops by their numbers."""
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD = range(4)
CODE = {kind: code for code, kind in enumerate(KINDS)}
"""Number of each kind of op."""
RESULTS = (OpKind.FORWARD, OpKind.INPUT_GRADIENT)
"""Results by their numbers: an activation, and the gradient of one."""
PARTS = {kind: [CODE[part.kind] for part in parts(Op(kind, 0, 0, 0))] for kind in KINDS}
"""Numbers of the kinds F, BI and BW that each kind of op computes."""


class OpColumns(NamedTuple):
    """Ops in columns; [N] each."""

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

    def ops(self) -> list[Op]:
        """Return the ops."""
        indices = (column.tolist() for column in self[1:])
        return list(map(Op, map(KINDS.__getitem__, self.kind.tolist()), *indices))

    def fit(self, ranks: Numbers, shape: PipelineShape) -> bool:
        """Whether every op is inside the shape, on its own rank of ranks [N], and there once, whole or in part."""
        extents = (shape.num_stages, shape.num_micro_batches, shape.num_token_slices)
        if any(index.max(initial=0) >= extent for index, extent in zip(self[1:], extents, strict=True)):
            return False
        if not np.array_equal(ways_of(shape).rank_of[self.stage], ranks):
            return False
        unit = np.ravel_multi_index(self[1:], extents)
        computing = ([code for code, kind in enumerate(KINDS) if part in PARTS[kind]] for part in range(3))
        return all(np.bincount(unit[np.isin(self.kind, codes)], minlength=1).max() <= 1 for codes in computing)


class Ways(NamedTuple):
    """Places of the stages of a shape, and the ways of their results: activations (0) and their gradients (1)."""

    rank_of: Numbers
    """[N] rank of each stage."""
    stages: Numbers
    """[P, V] stages of each rank, first to last."""
    reader: Numbers
    """[2, N] stage that reads the result of another; -1 if none does."""
    channel: Numbers
    """[2, N] number of the channel that a result takes; -1 where it stays on its rank."""
    boundary: Numbers
    """[2, N] stage boundary that it crosses; 0 if none."""


@lru_cache(maxsize=128)
def ways_of(shape: PipelineShape) -> Ways:
    """Return the ways of all results."""
    rows = []
    numbers: dict[tuple[int, int, OpKind], int] = {}
    for kind in RESULTS:
        for stage in range(shape.num_stages):
            reader, channel, boundary = reading_stage(Op(kind, stage, 0, 0), shape), NOTHING, 0
            if reader is not None and shape.rank_of(reader) != shape.rank_of(stage):
                channel = numbers.setdefault((shape.rank_of(stage), shape.rank_of(reader), kind), len(numbers))
                boundary = min(stage, reader)
            rows.append((NOTHING if reader is None else reader, channel, boundary))
    return Ways(
        np.array([shape.rank_of(stage) for stage in range(shape.num_stages)], np.int64),
        np.array([list(shape.stages_of(rank)) for rank in range(shape.num_ranks)], np.int64),
        *np.array(rows, np.int64).T.reshape(3, len(RESULTS), shape.num_stages).copy(),
    )


class DataFlow(NamedTuple):
    """`ops.DEPENDENCIES` and `ops.LIVE_CHANGE` as arrays for N stages.

    The loop keeps the times at which results are there in an array `ready` of [(4 N + 1) x units]. Result r of stage i
    has the row r N + i of it where it is made; a result that stage i reads from a neighbour has row (2 + r) N + i. The
    last row is for missing inputs: it is always 0.
    """

    reads: Numbers
    """[4 N, S, K] by kind and stage, and token slice: index in `ready` of each result that an op of unit 0 reads; for
    another unit, so many places further. K is the most that any kind of op reads; one that reads less reads the last
    row."""
    makers: Numbers
    """[4 N] stage that makes the results of each row of `ready`."""
    gives: Numbers
    """[4] result of each kind of op; -1 where nothing reads it."""
    parts: Numbers
    """[4] bits of the kinds F, BI and BW that an op computes."""
    is_reversed: Numbers
    """[3] whether ops of a kind go through token slices last to first."""
    live_change: Numbers
    """[4] by how many an op changes the live token slices."""


@lru_cache(maxsize=128)
def data_flow(shape: PipelineShape) -> DataFlow:
    """Return the arrays for a shape."""
    num_stages, num_token_slices = shape.num_stages, shape.num_token_slices
    num_units = shape.num_micro_batches * num_token_slices
    width = max(len(reads_of(kind)) for kind in KINDS)
    reads = np.full((len(KINDS), num_stages, num_token_slices, width), 4 * num_stages * num_units, np.int64)
    stage, token_slice = np.ogrid[:num_stages, :num_token_slices]
    makers = np.tile(np.arange(num_stages), (4, 1))
    for of_kind, kind in zip(reads, KINDS, strict=True):
        for column, (_, needed, stages, token_slices) in enumerate(reads_of(kind)):
            there, then = stage + stages, token_slice + token_slices
            inside = (there >= 0) & (there < num_stages)
            row = RESULTS.index(needed) + 2 * (stages != 0)
            makers[row] = np.where(inside, there, stage)[:, 0]
            read = np.broadcast_to((row * num_stages + stage) * num_units + token_slices, of_kind.shape[:2])
            np.copyto(of_kind[..., column], read, where=inside & (then >= 0) & (then < num_token_slices))
    given = [result(Op(kind, 0, 0, 0)).kind for kind in KINDS]
    return DataFlow(
        reads.reshape(len(KINDS) * num_stages, num_token_slices, width),
        makers.reshape(-1),
        np.array([RESULTS.index(kind) if kind in RESULTS else NOTHING for kind in given], np.int64),
        np.array([sum(1 << part for part in PARTS[kind]) for kind in KINDS], np.int64),
        np.array([_is_reversed(kind) for kind in KINDS[:3]]),
        np.array([LIVE_CHANGE[kind] for kind in KINDS], np.int64),
    )


def empty_results(shape: PipelineShape) -> Numbers:
    """Return an array `ready` for a shape."""
    return np.empty((4 * shape.num_stages + 1) * shape.num_micro_batches * shape.num_token_slices)


def _is_reversed(kind: OpKind) -> bool:
    """Whether a token slice needs those after it. Weight gradients need no other, and follow their input gradients."""
    shift = next((each.token_slice for each in reads_of(kind) if each.token_slice), 0)
    return shift > 0 if shift else any(_is_reversed(each.needed) for each in reads_of(kind) if each.needed is not kind)


class Tables(NamedTuple):
    """Arrays that compiled code reads. N stages on P ranks with V model chunks each, S token slices."""

    num_micro_batches: int
    ways: Ways
    times: Numbers
    """[3, N, S] time of F, BI and BW."""
    activation: Numbers
    """[S] memory of a token slice on one stage, in activations of one micro-batch on one rank."""
    sending: Numbers
    """[2, N, S] time for which a result keeps its channel busy."""
    latency: Numbers
    """[2, N] time from then until it is there."""
    free: Numbers
    """[channels] scratch: when each channel is free."""

    @classmethod
    def of(cls, shape: PipelineShape, costs: OpCosts, shares: Sequence[float]) -> "Tables":
        """Make the arrays, given the shares of the token slices in the sequence."""
        ways, extents = ways_of(shape), (shape.num_stages, shape.num_token_slices)
        sending, latency = np.zeros((max(shape.last_stage, 1), shape.num_token_slices)), np.zeros(shape.num_stages)
        if isinstance(costs.transfer, TransferCosts):
            bandwidth = np.array(costs.transfer.bandwidth).reshape(-1, 1)
            sending[: shape.last_stage] = np.array(costs.transfer.message_bytes) / bandwidth
            latency[: shape.last_stage] = costs.transfer.latency
        else:
            latency[:] = costs.transfer
        travels = ways.channel >= 0
        weight_gradient = np.zeros(extents) if costs.weight_gradient is None else costs.weight_gradient
        return cls(
            shape.num_micro_batches,
            ways,
            np.array([costs.forward, costs.backward, weight_gradient], np.float64),
            np.array(shares, np.float64) / shape.num_model_chunks,
            np.where(travels[..., None], sending[ways.boundary], 0.0),
            np.where(travels, latency[ways.boundary], 0.0),
            np.zeros(int(ways.channel.max()) + 1),
        )
