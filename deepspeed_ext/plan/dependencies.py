"""Which ops must be done before an op may start: the data flow, stated once."""

from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape


def prerequisites(op: Op, shape: PipelineShape) -> tuple[Op, ...]:
    """Ops whose results an op reads. One on another stage reaches it by a transfer.

    - A forward reads the forward on the stage before (activation), and that of the token slice before (its keys
      and values).
    - A backward reads the forward of its own token slice (its graph), the backward on the stage after (gradient of
      the activation), and that of the token slice after (gradient of this one's keys and values).
    """
    needed = []
    if op.kind is OpKind.FORWARD:
        if op.stage > 0:
            needed.append(op._replace(stage=op.stage - 1))
        if op.token_slice > 0:
            needed.append(op._replace(token_slice=op.token_slice - 1))
    else:
        needed.append(op._replace(kind=OpKind.FORWARD))
        if op.stage < shape.last_stage:
            needed.append(op._replace(stage=op.stage + 1))
        if op.token_slice < shape.last_token_slice:
            needed.append(op._replace(token_slice=op.token_slice + 1))
    return tuple(needed)


def transferred(op: Op, shape: PipelineShape) -> Op | None:
    """The prerequisite on another stage, if there is one: at most one, since stages form a chain."""
    return next((needed for needed in prerequisites(op, shape) if needed.stage != op.stage), None)
