"""The bytes of a checkpoint, known from shapes, and the room for it on the disk."""

from collections.abc import Iterable
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.checkpoint.engine_state import is_partitioned
from megatron_terapipe.errors import CheckpointError

STATES_OF_ADAM = 2
"""Tensors that Adam has for each weight once it has stepped; other rules have fewer."""


def bytes_to_save(engine: TokenSlicePipelineEngine, optimizer: str | None) -> int:
    """Return the bytes of tensors that all ranks together save; every rank must call it at the same time.

    Args:
        optimizer: rule of the update; None if its state is not saved.
    """
    mine = 0
    weights = list(engine.module.state_dict().values())
    if engine.grid.get_data_parallel_rank() == 0:
        mine += _bytes(weights)
    partitioned = is_partitioned(engine)
    # Where the state is dealt to replicas, each saves its own; else the first saves it for all.
    if optimizer is not None and (partitioned or engine.grid.get_data_parallel_rank() == 0):
        rule: Any = engine.optimizer.optimizer if partitioned else engine.optimizer
        worked_on = [weight for group in rule.param_groups for weight in group["params"]]
        moments = [value for state in rule.state.values() for value in state.values() if torch.is_tensor(value)]
        expected = STATES_OF_ADAM * _bytes(worked_on) if optimizer.startswith("adam") else 0
        # Before the first step there is no state yet.
        mine += (_bytes(worked_on) if partitioned else 0) + (_bytes(moments) if moments else expected)
    total = torch.tensor(float(mine), dtype=torch.float64, device=engine.device)
    dist.all_reduce(total)
    return int(total.item())


def check_room(save: Path, size: int) -> None:
    """See that a checkpoint fits on the disk before any of it is written.

    Args:
        size: bytes of the checkpoint.

    Raises:
        CheckpointError: if there is less room.
    """
    free = disk_usage(save).free
    if free < size:
        raise CheckpointError(
            f"a checkpoint of {_readable(size)} has no room in {save}, where {_readable(free)} are free: make room, or "
            "name another --save; checkpoints that are there are whole"
        )


def room_warning(save: Path, size: int, num_new: int, keep_last: int | None) -> str | None:
    """Return a line for the log if the disk will be full before the run ends; None if it will not, as far as is known.

    Args:
        size: bytes of one.
        keep_last: checkpoints that are kept; None for all.
    """
    free = disk_usage(save).free
    # One more than are kept is there while the oldest is still whole.
    wanted = num_new if keep_last is None else min(num_new, keep_last + 1)
    fitting = free // size if size else wanted
    if fitting >= wanted:
        return None
    advice = "make room" if keep_last is not None else "make room, or keep fewer with --keep-last-n-checkpoints"
    return (
        f" warning: {save} has room for {fitting} checkpoints of {_readable(size)}, and this run needs {wanted} at a "
        f"time: {advice}"
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _readable(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if size >= unit), (1e3, "kB"))
    return f"{size / unit:.4g} {name}"
