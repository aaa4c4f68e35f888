"""Reductions: gradients of the replicas of a stage summed, layer by layer, while the pipeline drains.

A replica has a gradient of a layer once the last backward of the iteration has passed that layer. From then on only the
optimizer step waits for its sum over the data-parallel ranks, so it travels beside whatever the ranks still compute.
Layers finish last to first, and the reductions of a rank run one after the other on the links to its replicas:

    rank 0 | [B2.1 ...] [B2.0: layer 3 | layer 2 | layer 1 | layer 0]
      link |                           [3 ====][2 ====][1 ====][0 ====]      the step starts here ^
    rank 1 | [B2.0 ............]    idle
      link |    [7 ====][6 ====][5 ====][4 ====]      all of it in the cool-down

They change the order of no op. What completes a stage's gradients, where a program starts their reductions and when
they end are stated here once, for the lowering, the simulators, the pictures, the search and the engine.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.program import COMPUTE, PASS, SEND, Instruction, InstructionKind, Program

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
    """The ops of a rank that complete the gradients of its stages: of each stage, its last gradient of weights.

    Returns:
        The op by stage, in the order in which they run; none for orders of evaluation.
    """
    completing: dict[int, Op] = {}
    for op in order:
        if op.kind in _COMPLETING:
            completing.pop(op.stage, None)
            completing[op.stage] = op
    return completing


def with_reductions(program: Program) -> Program:
    """A program that starts the reductions of each stage after the op that completes them, and after what it sends."""
    completing = {Instruction(COMPUTE[op.kind], *op[1:])[:4] for op in completing_ops(program.ops()).values()}
    placed: list[Instruction] = []
    due: Instruction | None = None
    for instruction in program.instructions:
        if due is not None and instruction.kind not in _AT_ONCE:
            placed.append(due)
            due = None
        placed.append(instruction)
        if instruction[:4] in completing:
            due = Instruction(InstructionKind.REDUCE_GRADIENTS, *instruction[1:4])
    if due is not None:
        placed.append(due)
    return replace(program, instructions=tuple(placed))


def reductions_beside(
    spans: Sequence[Sequence[tuple[Op, float, float]]], shape: PipelineShape, costs: Sequence[Sequence[float]] | None
) -> Iterator[Reduction]:
    """Yield the reductions of an iteration whose ops have run; see `reductions`.

    Args:
        spans: per rank, its ops with start and end.
        costs: per stage, the time of each of its pieces on the link; None for no reductions.
    """
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
        shape: of the pipeline; stages of one rank share its link.

    Yields:
        The reductions of every rank, rank by rank, in the order in which they run.
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
