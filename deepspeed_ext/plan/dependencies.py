"""Which ops must be done before an op may start: the data flow, stated once.

    stage i - 1 |  F ------.                 .---> B or BI
    stage i     |          '-> F ... B or BI-'     BW
                                     |             ^
                                     '-- of BI ----'      time to the right

Token slices of a micro-batch on one stage: F of the first to the last, then B (or BI) of the last to the first.
"""

from typing import NamedTuple

from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape

__all__ = [
    "DEPENDENCIES",
    "Dependency",
    "prerequisites",
    "reader_of",
    "reading_stage",
    "reads_of",
    "received",
    "result",
]


class Dependency(NamedTuple):
    """An op of kind `op` reads a result of kind `needed`, so far away. One outside the pipeline is not needed."""

    op: OpKind
    needed: OpKind
    stage: int = 0
    token_slice: int = 0


_ACTIVATION = OpKind.FORWARD
_GRADIENT = OpKind.INPUT_GRADIENT
"""Kind of a result: an activation, or the gradient of one, whether the op that gives it is a BI or a whole B."""

DEPENDENCIES = (
    # The activation of the stage before, and the keys and values of the token slice before.
    Dependency(OpKind.FORWARD, _ACTIVATION, stage=-1),
    Dependency(OpKind.FORWARD, _ACTIVATION, token_slice=-1),
    # Its own graph, the gradient of its activation, and that of its keys and values from the token slice after.
    *(
        dependency
        for backward in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT)
        for dependency in (
            Dependency(backward, _ACTIVATION),
            Dependency(backward, _GRADIENT, stage=+1),
            Dependency(backward, _GRADIENT, token_slice=+1),
        )
    ),
    Dependency(OpKind.WEIGHT_GRADIENT, _GRADIENT),
)
"""The data flow as a table, which all that puts ops in order or times them reads."""

_BY_KIND = {kind: [dependency for dependency in DEPENDENCIES if dependency.op is kind] for kind in OpKind}
_RECEIVED = {dependency.op: dependency for dependency in DEPENDENCIES if dependency.stage}
"""Result of another stage that an op reads: one thing at most, since stages form a chain."""
_WAY = {dependency.needed: -dependency.stage for dependency in _RECEIVED.values()}
"""Where the stage is that reads a result of its neighbour, by the kind of the result."""


def reads_of(kind: OpKind) -> tuple[Dependency, ...]:
    """Return the rows of the table for ops of one kind, of which simulators and searches make their arrays."""
    return tuple(_BY_KIND[kind])


def result(op: Op) -> Op:
    """Return the result of an op, named as the op that gives no more: of a whole backward, its input gradient."""
    return Op(_GRADIENT, *op[1:]) if op.kind is OpKind.BACKWARD else op


def parts(op: Op) -> tuple[Op, ...]:
    """Return the parts that an op computes: of a whole backward, both halves; of any other op, itself."""
    if op.kind is not OpKind.BACKWARD:
        return (op,)
    return Op(OpKind.INPUT_GRADIENT, *op[1:]), Op(OpKind.WEIGHT_GRADIENT, *op[1:])


def reading_stage(given: Op, shape: PipelineShape) -> int | None:
    """Return the neighbouring stage that reads a result; None if there is none."""
    way = _WAY.get(given.kind)
    return None if way is None or not 0 <= given.stage + way < shape.num_stages else given.stage + way


def reader_of(given: Op, shape: PipelineShape) -> Op | None:
    """Return the op that reads a result, as a forward or an input gradient; None if no other stage reads it."""
    stage = reading_stage(given, shape)
    return None if stage is None else Op(given.kind, stage, given.micro_batch, given.token_slice)


def prerequisites(op: Op, shape: PipelineShape) -> tuple[Op, ...]:
    """Return the results that an op reads, as `result` names them.

    Args:
        op: on any stage of the shape.
    """
    kind, stage, micro_batch, token_slice = op
    num_stages, num_token_slices = shape.num_stages, shape.num_token_slices
    needed = []
    for _, of_kind, stages, token_slices in _BY_KIND[kind]:
        if 0 <= stage + stages < num_stages and 0 <= token_slice + token_slices < num_token_slices:
            needed.append(Op(of_kind, stage + stages, micro_batch, token_slice + token_slices))
    return tuple(needed)


def received(op: Op, shape: PipelineShape) -> Op | None:
    """Return the result of another stage that an op reads; None if it reads none.

    Args:
        op: on any stage of the shape.
    """
    dependency = _RECEIVED.get(op.kind)
    if dependency is None or not 0 <= op.stage + dependency.stage < shape.num_stages:
        return None
    return Op(dependency.needed, op.stage + dependency.stage, op.micro_batch, op.token_slice)
