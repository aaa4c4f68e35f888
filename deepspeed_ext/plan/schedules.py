"""Schedules: the order of ops on each pipeline rank. One pure generator per schedule, and a registry by name.

Time runs to the right; F0.1 is the forward of token slice 1 of micro-batch 0. Two stages, two micro-batches, two
token slices:

    gpipe   stage 0 | F0.0 F0.1 F1.0 F1.1  .    .   B0.1 B0.0 B1.1 B1.0
            stage 1 |  .   F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0  .

    1f1b    stage 0 | F0.0 F0.1 F1.0  .   B0.1 F1.1 B0.0  .   B1.1 B1.0
            stage 1 |  .   F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0  .

Token slices of a micro-batch go forward first to last, because each attends to the keys and values of those before
it, and backward last to first, because each must first receive the gradients of its keys and values. Micro-batches
go first to last both ways, in every schedule, so that gradients add up in the same order (ADR 0005).

`zero-bubble` computes the gradient of the input (BI), which the stage before waits for, ahead of the gradients of the
weights (BW), which fill the time in which a stage would idle. B is both at once.

    zero-bubble  stage 0 | F0.0  F0.1  F1.0   .    BI0.1 BW0.1 F1.1  BI0.0 BW0.0 BI1.1 BW1.1 BI1.0 BW1.0
                 stage 1 |  .    F0.0  F0.1  BI0.1 F1.0  BI0.0 BW0.1 F1.1  BI1.1 BW0.0 BI1.0 BW1.1 BW1.0

A rank may own several stages, its model chunks. Four stages on two ranks, one micro-batch; 2F0.1 is on stage 2, of
rank 0:

    interleaved  rank 0 | 0F0.0 0F0.1 2F0.0 2F0.1  .     .    2B0.1 2B0.0 0B0.1 0B0.0
                 rank 1 |  .    1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 3B0.0 1B0.1 1B0.0  .

    breadth-first  rank 0 | 0F0.0 0F1.0 2F0.0 2F1.0  .     .    2B0.0 2B1.0 0B0.0 0B1.0
                   rank 1 |  .    1F0.0 1F1.0 3F0.0 3F1.0 3B0.0 3B1.0 1B0.0 1B1.0  .
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, product
from types import MappingProxyType
from typing import NamedTuple, cast

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, Placement
from deepspeed_ext.plan.slicing import TokenSlices

__all__ = [
    "OPTIMISED",
    "SCHEDULES",
    "ClosedForm",
    "Schedule",
    "backward_order",
    "breadth_first",
    "closed_form",
    "fixed",
    "forward_order",
    "gpipe",
    "interleaved",
    "memory_of_1f1b",
    "one_f_one_b",
    "rank_orders",
    "schedule_named",
    "zero_bubble",
]

Schedule = Callable[[PipelineShape, int], Iterator[Op]]
"""Called with the shape and a pipeline rank, yields the ops of that rank's stages in order."""


def forward_order(shape: PipelineShape, rank: int) -> Iterator[Op]:
    """Yield every forward of a rank, in the order of `interleaved`, which is also the order of evaluation."""
    for micro_batches in _groups(shape):
        yield from _ops(OpKind.FORWARD, shape.stages_of(rank), micro_batches, range(shape.num_token_slices))


def backward_order(shape: PipelineShape, rank: int, kind: OpKind = OpKind.BACKWARD) -> Iterator[Op]:
    """Yield every backward of a rank, or every part of one kind."""
    stages, token_slices = list(shape.stages_of(rank))[::-1], range(shape.num_token_slices)[::-1]
    for micro_batches in _groups(shape):
        yield from _ops(kind, stages, micro_batches, token_slices)


def _ops(kind: OpKind, *indices: Iterable[int]) -> Iterator[Op]:
    """Ops of a kind, without a function of Python for each: searches generate millions of them."""
    make = cast(Callable[[object], Op], partial(tuple.__new__, Op))
    return map(make, product((kind,), *indices))


def _groups(shape: PipelineShape) -> Iterator[range]:
    """Micro-batches that pass a model chunk together: the fewest that keep all ranks busy until they come back.

    With fewer, the first would come back to its rank before the rank is done with the last: a bubble in every pass.
    The remainder joins the groups, which are then a little longer.
    """
    least = -(-shape.num_ranks // shape.num_token_slices)
    num_groups = max(shape.num_micro_batches // least, 1)
    length, longer = divmod(shape.num_micro_batches, num_groups)
    start = 0
    for group in range(num_groups):
        end = start + length + (group < longer)
        yield range(start, end)
        start = end


def gpipe(shape: PipelineShape, rank: int) -> Iterator[Op]:
    """All forwards, then all backwards: TeraPipe's order (arXiv 2102.07988 section 3.2), GPipe's if S = 1."""
    yield from forward_order(shape, rank)
    yield from backward_order(shape, rank)


def one_f_one_b(shape: PipelineShape, rank: int) -> Iterator[Op]:
    """Warmup forwards, then one forward and one backward in turn, then the cooldown backwards.

    Seq1F1B's order (arXiv 2406.03488 section 3.2), PipeDream-flush for one token slice. The S - 1 warmup forwards
    beyond the classic P - i - 1 are there because the last token slice of a micro-batch turns back first: at most
    min(P - i - 1 + S, M * S) token slices are live on stage i.
    """
    _check_one_stage_each(shape, "1f1b")
    yield from _alternate(shape, rank, warmup=shape.num_ranks - rank - 2 + shape.num_token_slices)


def interleaved(shape: PipelineShape, rank: int) -> Iterator[Op]:
    """1f1b over several stages a rank: Megatron's interleaving (arXiv 2104.04473 section 2.2) for any M and S.

    Groups of micro-batches pass the first of a rank's stages, then the second, and so on. A rank warms up with all
    stages but the last of the first group, with the S - 1 token slices that turn back after the first, and with two
    forwards for each rank after it, since by the time the first backward returns every one of these has run two ops.
    Where whole micro-batches fill the pipeline (S divides P, P divides M * S) that is Seq1F1B-I's
    (V - 1) * P + 2 * (P - i - 1) + S - 1, and its bubble is (P - 1) / (V * M * S + P - 1). Groups of whole
    micro-batches also run where S > P, which locks Seq1F1B-I's groups of P token slices.
    """
    if shape.num_model_chunks == 1:
        yield from one_f_one_b(shape, rank)
        return
    if shape.placement is not Placement.LOOPED:
        raise PlanError(
            f"schedule 'interleaved' needs the placement 'looped', and the placement is {shape.placement.value!r}: "
            "choose 'looped', or the schedule 'optimised'"
        )
    longest = len(next(_groups(shape)))
    passes = (shape.num_model_chunks - 1) * longest * shape.num_token_slices
    yield from _alternate(shape, rank, warmup=passes + shape.num_token_slices - 1 + 2 * (shape.num_ranks - rank - 1))


def breadth_first(shape: PipelineShape, rank: int) -> Iterator[Op]:
    """All forwards of a rank's first stage, of its second, and so on, then all backwards: last stage first.

    Breadth-first pipelining (arXiv 2211.05953) for token slices. Its makespan is interleaved's, and a rank keeps all
    of its V * M * S token slices. With one micro-batch `interleaved` runs the very same order.
    """
    stages, token_slices = list(shape.stages_of(rank)), range(shape.num_token_slices)
    for kind, ways in ((OpKind.FORWARD, (stages, token_slices)), (OpKind.BACKWARD, (stages[::-1], token_slices[::-1]))):
        for stage, micro_batch, token_slice in product(ways[0], range(shape.num_micro_batches), ways[1]):
            yield Op(kind, stage, micro_batch, token_slice)


def _alternate(shape: PipelineShape, rank: int, warmup: int) -> Iterator[Op]:
    forwards, backwards = forward_order(shape, rank), backward_order(shape, rank)
    yield from islice(forwards, warmup)
    yield from chain.from_iterable(zip(forwards, backwards, strict=False))
    yield from backwards


def zero_bubble(shape: PipelineShape, rank: int) -> Iterator[Op]:
    """1f1b with the backward in two parts, weight gradients delayed by as many ops as there are ranks before this one.

    ZB-H1's order (arXiv 2401.10241 section 3), for token slices. The last rank has the shortest warmup and the most
    weight gradients to fill its cooldown with; every rank keeps min(P - 1 + S, M * S) token slices. If all three
    parts cost the same, the makespan is 2 M S + max(M S + P - 1, S + 2 (P - 1)) ops.
    """
    _check_one_stage_each(shape, "zero-bubble")
    forwards = forward_order(shape, rank)
    input_gradients = backward_order(shape, rank, OpKind.INPUT_GRADIENT)
    weight_gradients = backward_order(shape, rank, OpKind.WEIGHT_GRADIENT)
    yield from islice(forwards, shape.num_ranks - rank - 2 + shape.num_token_slices)
    for number, input_gradient in enumerate(input_gradients):
        yield from islice(forwards, 1)
        yield input_gradient
        if number >= rank:
            yield next(weight_gradients)
    yield from weight_gradients


def _check_one_stage_each(shape: PipelineShape, name: str) -> None:
    if shape.num_model_chunks > 1:
        raise PlanError(
            f"schedule {name!r} has one stage on each pipeline rank, and there are {shape.num_model_chunks} model "
            "chunks: choose 'interleaved' or 'optimised', or one model chunk"
        )


OPTIMISED = "optimised"
"""Name of the schedule that `optimise` searches for; `SCHEDULES` has those that need no search."""

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zero-bubble": zero_bubble,
        "breadth-first": breadth_first,
    }
)
"""Schedules by the name that flags, strategies and pictures use."""

KEEPING_ALL = ("gpipe", "breadth-first")
"""Schedules that run all forwards of a rank before its first backward."""


def schedule_named(name: str) -> Schedule:
    """Look a schedule up."""
    try:
        return SCHEDULES[name]
    except KeyError:
        raise PlanError(f"schedule {name!r} is not known: choose one of {', '.join(SCHEDULES)}") from None


def rank_orders(schedule: Schedule, shape: PipelineShape) -> list[list[Op]]:
    """Return the op order of every pipeline rank."""
    return [list(schedule(shape, rank)) for rank in range(shape.num_ranks)]


def fixed(orders: Sequence[Sequence[Op]]) -> Schedule:
    """A schedule that was written down or found by a solver: these orders, whatever the shape."""
    return lambda _, rank: iter(orders[rank])


class ClosedForm(NamedTuple):
    """A bubble ratio, and the formula that gives it."""

    formula: str
    bubble_ratio: float


def closed_form(schedule: str, shape: PipelineShape, costs: OpCosts) -> ClosedForm | None:
    """Return the bubble ratio of a schedule, if it has a closed form for this shape and these costs.

    P ranks, M micro-batches, S token slices, V model chunks; all ops of a kind cost the same, transfers nothing.
    `gpipe` and `1f1b`: arXiv 2102.07988 and 2406.03488, bubble (P-1)/(MS+P-1). `interleaved`: arXiv 2104.04473 section
    2.2 for token slices, (P-1)/(VMS+P-1), if P token slices are there to fill the pipeline; `breadth-first`, arXiv
    2211.05953, has the same. `zero-bubble`: arXiv 2401.10241 section 3 for token slices, if the three parts cost the
    same.
    """
    tables = (costs.forward, costs.backward, costs.weight_gradient or costs.forward)
    if costs.transfer != 0 or any(len({time for row in table for time in row}) > 1 for table in tables):
        return None
    warmup, units = shape.num_ranks - 1, shape.num_micro_batches * shape.num_token_slices
    if schedule in ("gpipe", "1f1b", "interleaved", "breadth-first") and shape.num_model_chunks == 1:
        return ClosedForm("(P-1)/(MS+P-1)", warmup / (units + warmup))
    round_and_round = schedule in ("interleaved", "breadth-first") and shape.placement is Placement.LOOPED
    if round_and_round and units >= shape.num_ranks:
        return ClosedForm("(P-1)/(VMS+P-1)", warmup / (shape.num_model_chunks * units + warmup))
    if schedule == "zero-bubble" and costs.forward == costs.backward == costs.weight_gradient:
        makespan = 2 * units + max(units + warmup, shape.num_token_slices + 2 * warmup)
        return ClosedForm("1-3MS/(2MS+max(MS+P-1,S+2(P-1)))", 1 - 3 * units / makespan)
    return None


def memory_of_1f1b(shape: PipelineShape, token_slices: TokenSlices) -> float:
    """Return the activations that 1f1b keeps on the first rank, in activations of one micro-batch on it.

    1f1b keeps P - 1 + S token slices in a row, from the first of a micro-batch on, or all that there are.
    """
    whole, rest = divmod(shape.num_ranks - 1 + len(token_slices), len(token_slices))
    return min(shape.num_micro_batches, whole + token_slices.prefix_len(rest) / token_slices.seq_length)
