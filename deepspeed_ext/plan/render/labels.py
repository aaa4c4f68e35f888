"""Labels of ops and rows in pictures: a stage is named in each op where its row, a pipeline rank, owns several."""

from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape


def rank_name(shape: PipelineShape, rank: int) -> str:
    """Return the name of a row."""
    return f"rank {rank}" if shape.num_model_chunks > 1 else f"stage {rank}"


def op_label(op: Op, shape: PipelineShape) -> str:
    """Name of an op within its row, as short as it can be: `F0.1`, `2F0.1` on one of several stages, `F0` uncut."""
    stage = f"{op.stage}" if shape.num_model_chunks > 1 else ""
    token_slice = f".{op.token_slice}" if shape.num_token_slices > 1 else ""
    return f"{stage}{op.kind.value}{op.micro_batch}{token_slice}"


KIND_NAMES = {
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD: "backward",
    OpKind.INPUT_GRADIENT: "input gradient",
    OpKind.WEIGHT_GRADIENT: "weight gradient",
}
"""Kinds of ops in words."""


def with_unit(time: float, unit: str, *, digits: int = 4) -> str:
    """Return a time as it is shown.

    Args:
        time: in the unit.
        unit: `s`, or empty for times without one.
    """
    return f"{time:.{digits}g}{unit and ' ' + unit}"


def count(number: int, noun: str) -> str:
    """Return a number of things: `1 stage`, `2 stages`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def extents(shape: PipelineShape) -> list[str]:
    """The extents of a pipeline in words."""
    words = [
        count(shape.num_stages, "stage"),
        count(shape.num_micro_batches, "micro-batch"),
        count(shape.num_token_slices, "token slice"),
    ]
    if shape.num_model_chunks > 1:
        words[0] += f" on {count(shape.num_ranks, 'rank')}"
    return words
