"""Schedules read from a file, and written to one.

One line for each pipeline rank, first to last, with its ops in the order it runs them, between commas or blanks:

    # two ranks, one micro-batch of two token slices
    0F0.0, 0F0.1,        ,        , 0B0.1, 0B0.0
         , 1F0.0, 1F0.1, 1B0.1, 1B0.0

Empty cells, empty lines, and all text after a `#` are skipped. Where there is one token slice it may be left out
(`0F0`), and `I` and `W` may be written for `BI` and `BW`, so that the CSV files of torch.distributed.pipelining can be
read. The extents of the pipeline and the owners of stages follow from the ops.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, PipelineShape, Placement
from deepspeed_ext.plan.programs.lowering import ProvenSchedule
from deepspeed_ext.plan.schedules import Schedule, fixed
from deepspeed_ext.plan.simulate import check_order
from deepspeed_ext.plan.text_files import parse_file

__all__ = ["parse_schedule", "read_schedule", "schedule_from_file", "write_schedule"]


def read_schedule(path: Path | str) -> tuple[PipelineShape, list[list[Op]]]:
    """Read the shape and the op order of every rank, and check that they are whole and can be run.

    Raises:
        ScheduleDeadlock: if ranks would wait for each other.
    """
    return parse_file(path, lambda text: _parse(text, str(path)))[:2]


def parse_schedule(text: str) -> tuple[PipelineShape, list[list[Op]]]:
    """Read a schedule from the text of its file; see `read_schedule`."""
    return _parse(text, "this text")[:2]


def _parse(text: str, name: str) -> tuple[PipelineShape, list[list[Op]], Schedule]:
    lines = dict(_lines_with_ops(text))
    if not lines:
        raise PlanError("no ops: write a line such as '0F0.0, 0B0.0' for each pipeline rank")
    numbers, orders = list(lines), list(lines.values())
    shape = _shape_of(orders, numbers)
    for rank, order in enumerate(orders):
        try:
            check_order(order, shape, rank)
        except PlanError as error:
            raise PlanError(f"line {numbers[rank]}: {error}") from None
    written = fixed(orders)

    def checked(of_run: PipelineShape, rank: int) -> Iterator[Op]:
        if of_run != shape:
            raise PlanError(
                f"the schedule of {name} is for {shape}, and the run has {of_run}: change the run, or choose another "
                "schedule"
            )
        return written(shape, rank)

    ProvenSchedule(checked).proof(shape)
    return shape, orders, checked


def schedule_from_file(path: Path | str) -> Schedule:
    """Return the schedule of a file, which is only for the shape of the file and is proven to end there."""
    return parse_file(path, lambda text: _parse(text, str(path)))[2]


def write_schedule(orders: Sequence[Sequence[Op]]) -> str:
    """The text that `read_schedule` reads back, with a line break at its end."""
    return "".join(", ".join(map(str, order)) + "\n" for order in orders)


def _lines_with_ops(text: str) -> Iterator[tuple[int, list[Op]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.split(r"[,\s]+", line.partition("#")[0])
        try:
            order = [Op.parse(word.strip('"')) for word in words if word.strip('"')]
        except PlanError as error:
            raise PlanError(f"line {number}: {error}") from None
        if order:
            yield number, order


def _shape_of(orders: Sequence[Sequence[Op]], numbers: Sequence[int]) -> PipelineShape:
    """The smallest shape that has all ops, with the placement that puts every stage on the rank of its line."""
    num_ranks = len(orders)
    _, *last = map(max, zip(*(op for order in orders for op in order), strict=True))
    num_stages, num_micro_batches, num_token_slices = (1 + int(index) for index in last)
    placed = {(op.stage, rank) for rank, order in enumerate(orders) for op in order}
    with_ops = {stage for stage, _ in placed}
    gap = next((stage for stage in range(num_stages) if stage not in with_ops), None)
    if gap is not None:
        raise PlanError(f"stage {gap} has no ops, and there are {num_stages} stages: add its ops to a line")
    if num_stages % num_ranks:
        raise PlanError(
            f"{num_stages} stages are on {num_ranks} lines, one for each pipeline rank: give all ranks as many stages"
        )
    shapes = [
        PipelineShape(num_stages, num_micro_batches, num_token_slices, num_stages // num_ranks, placement)
        for placement in (Placement.LOOPED, Placement.V)
    ]
    for shape in shapes:
        if all(shape.rank_of(stage) == rank for stage, rank in placed):
            return shape
    # Against the placement that fits best, the first op that is on a wrong line.
    best = min(shapes, key=lambda shape: sum(shape.rank_of(stage) != rank for stage, rank in placed))
    number, op, rank = next(
        (number, op, rank)
        for rank, (number, order) in enumerate(zip(numbers, orders, strict=True))
        for op in order
        if best.rank_of(op.stage) != rank
    )
    raise PlanError(
        f"line {number}: op {op} is on rank {rank}, and stage {op.stage} of {num_stages} on {num_ranks} ranks is "
        f"rank {shapes[0].rank_of(op.stage)}'s if rank = stage modulo {num_ranks} (looped), "
        f"rank {shapes[1].rank_of(op.stage)}'s if the stages fold back (v): move it"
    )
