"""Actions of the first rank for all ranks, and faults that all ranks raise at the same time."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.errors import AgreedCheckpointError, CheckpointError

Result = TypeVar("Result")


def from_first_rank(
    action: Callable[[], Result],
    *,
    group: dist.ProcessGroup | None = None,
    error: type[AgreedCheckpointError] = AgreedCheckpointError,
) -> Result:
    """Return on every rank the result of an action on the first; every rank must call it at the same time.

    Args:
        group: of all ranks; None for the group of the run.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found = [action(), None]
        except (CheckpointError, OSError) as fault:
            found = [None, str(fault)]
    dist.broadcast_object_list(found, src=0, group=group)
    if found[1] is not None:
        raise error(found[1])
    return found[0]


def agreed(make: Callable[[], Result], error: type[UserError], *, of: type[UserError] = UserError) -> Result:
    """Return a function's result on this rank; every rank must call it at the same time.

    Raises:
        error: on every rank, with the message of the first rank on which the function raises an `of`.
    """
    result, mine = None, None
    try:
        result = make()
    except of as raised:
        mine = str(raised)
    if fault := first_fault(mine):
        raise error(fault)
    return cast(Result, result)


def first_fault(mine: str | None) -> str | None:
    """Return the fault of the first rank that has one; every rank must call it at the same time."""
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, mine)
    return next((fault for fault in faults if fault is not None), None)
