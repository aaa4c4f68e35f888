"""Orders in numbers: what each op waits for, gives and sends, as arrays for the fast simulator.

A result has the number unit + units x kind, where units count stages, micro-batches and token slices. Where it arrives
on another rank it has one more number, behind all those. Functions import numpy when they are called, so that the
modules that import this one load at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from deepspeed_ext.plan.dependencies import parts, reading_stage, reads_of, result
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.simulate.loop import NOTHING

if TYPE_CHECKING:
    from numpy import ndarray

    Numbers = ndarray[Any, Any]

KINDS = tuple(OpKind)
CODE = {kind: code for code, kind in enumerate(KINDS)}
"""Number of each kind of op."""


@dataclass(frozen=True, eq=False, slots=True)
class OpColumns:
    """Ops in columns, rank after rank; [N] each."""

    kind: "Numbers"
    stage: "Numbers"
    micro_batch: "Numbers"
    token_slice: "Numbers"

    @classmethod
    def of(cls, order: Sequence[Op]) -> "OpColumns":
        """The columns of some ops."""
        import numpy as np

        kinds, *indices = list(zip(*order, strict=True)) or [()] * 4
        kind = np.fromiter(map(CODE.__getitem__, kinds), np.int8, len(order))
        return cls(kind, *(np.array(index, np.int32) for index in indices))

    @classmethod
    def joined(cls, parts: Sequence["OpColumns"]) -> "OpColumns":
        """The columns of one rank after the other."""
        import numpy as np

        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def ops(self, first: int, last: int) -> list[Op]:
        """Return the ops at positions first .. last.

        Args:
            last: position behind the last of them.
        """
        columns = (self.stage, self.micro_batch, self.token_slice)
        indices = (column[first:last].tolist() for column in columns)
        return list(map(Op, map(KINDS.__getitem__, self.kind[first:last].tolist()), *indices))

    def units(self, shape: PipelineShape) -> "Numbers":
        """Return the number of each op's token slice, of one micro-batch on one stage: [ops]."""
        return _unit(self.stage, self.micro_batch, self.token_slice, shape)


@dataclass(frozen=True, eq=False, slots=True)
class Wiring:
    """Arrays by the names that `loop.simulate_ops` has for them, and where to find the times that it wants."""

    needs: "Numbers"
    """[K * N] what each op waits for."""
    gives: "Numbers"
    """[N] its result."""
    arrives: "Numbers"
    """[N] its result where it is sent to."""
    targets: "Numbers"
    """[N] the rank it is sent to."""
    channels: "Numbers"
    """[N] the channel it takes."""
    op_costs: "Numbers"
    """[N] where the op's time is in a table by kind, stage and token slice."""
    message_costs: "Numbers"
    """[N] where those of its message are in tables by boundary and token slice."""
    num_results: int
    """Results of all ops, each counted where it is made and where it arrives."""
    num_channels: int
    """Channels, with one for what stays."""


def fits(bounds: "Numbers", columns: OpColumns, shape: PipelineShape) -> bool:
    """Whether every op is inside the shape, on its own rank, and there but once, whole or in part.

    Args:
        bounds: [R + 1] where the ops of each rank begin and end.
    """
    import numpy as np

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
    """Look up in the table of dependencies what each op waits for, and where its result goes.

    Args:
        columns: the ops, [N] each.
    """
    import numpy as np

    num_made = len(KINDS) * shape.num_stages * shape.num_micro_batches * shape.num_token_slices
    given = np.array([CODE[result(Op(kind, 0, 0, 0)).kind] for kind in KINDS])
    gives = given[columns.kind] * (num_made // len(KINDS)) + columns.units(shape)
    targets, channels, boundaries, num_channels = _ways(shape)
    way = columns.kind.astype(np.int64) * shape.num_stages + columns.stage
    return Wiring(
        _needs(columns, shape, num_made).reshape(-1).astype(np.int32),
        gives.astype(np.int32),
        np.where(targets[way] == NOTHING, NOTHING, gives + num_made).astype(np.int32),
        targets[way].astype(np.int32),
        channels[way].astype(np.int32),
        (way * shape.num_token_slices + columns.token_slice).astype(np.int32),
        (boundaries[way] * shape.num_token_slices + columns.token_slice).astype(np.int32),
        2 * num_made,
        num_channels,
    )


def _needs(columns: OpColumns, shape: PipelineShape, num_made: int) -> "Numbers":
    """[N, K] numbers of results."""
    import numpy as np

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


def _ways(shape: PipelineShape) -> "tuple[Numbers, Numbers, Numbers, int]":
    """Rank, channel and stage boundary that the result of each kind of op on each stage goes by; how many channels."""
    import numpy as np

    targets, boundaries, ways = [], [], []
    for kind in KINDS:
        for stage in range(shape.num_stages):
            given = result(Op(kind, stage, 0, 0))
            reader = reading_stage(given, shape)
            source, target = shape.rank_of(stage), NOTHING if reader is None else shape.rank_of(reader)
            targets.append(NOTHING if target == source else target)
            boundaries.append(0 if reader is None else min(stage, reader))
            ways.append((source, targets[-1], given.kind))
    numbers = {way: number for number, way in enumerate(dict.fromkeys(ways))}
    channels = [numbers[way] for way in ways]
    return np.array(targets), np.array(channels), np.array(boundaries), len(numbers)


def ranks_of_stages(shape: PipelineShape) -> "Numbers":
    """Return the rank that each stage is on: [stages]."""
    import numpy as np

    return np.array([shape.rank_of(stage) for stage in range(shape.num_stages)])


def _unit(stage: "Numbers", micro_batch: "Numbers", token_slice: "Numbers", shape: PipelineShape) -> "Numbers":
    unit: Numbers = (stage.astype("int64") * shape.num_micro_batches + micro_batch) * shape.num_token_slices
    return unit + token_slice
