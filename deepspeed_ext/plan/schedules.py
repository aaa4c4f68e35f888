"""Schedules: in what order each stage runs its ops. One pure generator per schedule, and a registry by name.

The engine, the simulator, the memory estimate, the search and the pictures all read the generators in this file.
Time runs to the right; F0.1 is the forward of token slice 1 of micro-batch 0. Two stages, two micro-batches, two
token slices:

    gpipe   stage 0 | F0.0 F0.1 F1.0 F1.1  .    .   B0.1 B0.0 B1.1 B1.0
            stage 1 |  .   F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0  .

    1f1b    stage 0 | F0.0 F0.1 F1.0  .   B0.1 F1.1 B0.0  .   B1.1 B1.0
            stage 1 |  .   F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0  .

Token slices of a micro-batch go forward first to last, because each attends to the keys and values of those before
it, and backward last to first, because each must first receive the gradients of its keys and values. Micro-batches
go first to last both ways, in every schedule, so that gradients add up in the same order (ADR 0005).
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape

Schedule = Callable[[PipelineShape, int], Iterator[Op]]
"""Called with the shape and a stage, yields the ops of that stage in order."""


def forward_order(shape: PipelineShape, stage: int) -> Iterator[Op]:
    """Every forward of a stage; alone, the order of evaluation."""
    for micro_batch in range(shape.num_micro_batches):
        for token_slice in range(shape.num_token_slices):
            yield Op(OpKind.FORWARD, stage, micro_batch, token_slice)


def backward_order(shape: PipelineShape, stage: int) -> Iterator[Op]:
    """Every backward of a stage."""
    for micro_batch in range(shape.num_micro_batches):
        for token_slice in reversed(range(shape.num_token_slices)):
            yield Op(OpKind.BACKWARD, stage, micro_batch, token_slice)


def gpipe(shape: PipelineShape, stage: int) -> Iterator[Op]:
    """All forwards, then all backwards: TeraPipe's order (arXiv 2102.07988 section 3.2), GPipe's if S = 1."""
    yield from forward_order(shape, stage)
    yield from backward_order(shape, stage)


def one_f_one_b(shape: PipelineShape, stage: int) -> Iterator[Op]:
    """Warmup forwards, then one forward and one backward in turn, then the cooldown backwards.

    Seq1F1B's order (arXiv 2406.03488 section 3.2), PipeDream-flush for one token slice. The S - 1 warmup forwards
    beyond the classic P - i - 1 are there because the last token slice of a micro-batch turns back first: at most
    min(P - i - 1 + S, M * S) token slices are live on stage i.
    """
    forwards, backwards = forward_order(shape, stage), backward_order(shape, stage)
    yield from islice(forwards, shape.num_stages - stage - 2 + shape.num_token_slices)
    for forward in forwards:
        yield forward
        yield next(backwards)
    yield from backwards


SCHEDULES: Mapping[str, Schedule] = MappingProxyType({"gpipe": gpipe, "1f1b": one_f_one_b})
"""Schedules by the name that flags, strategies and pictures use."""


def schedule_named(name: str) -> Schedule:
    """Look a schedule up.

    Raises:
        PlanError: if there is none of that name.
    """
    try:
        return SCHEDULES[name]
    except KeyError:
        raise PlanError(f"schedule {name!r} is not known: choose one of {', '.join(SCHEDULES)}") from None


def stage_orders(schedule: Schedule, shape: PipelineShape) -> list[list[Op]]:
    """The op order of every stage."""
    return [list(schedule(shape, stage)) for stage in range(shape.num_stages)]
