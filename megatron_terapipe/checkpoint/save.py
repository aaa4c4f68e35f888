"""Saves a checkpoint, so that what bears a checkpoint's name is always whole."""

import os
import re
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch.distributed as dist

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.checkpoint.engine_state import destination_of, is_partitioned
from megatron_terapipe.checkpoint.file_names import LATEST
from megatron_terapipe.checkpoint.index import PARAMETER_NAMES, Fragment, Place, write_index
from megatron_terapipe.checkpoint.info import RUN_FILE, CheckpointInfo
from megatron_terapipe.config.checkpoint import checkpoint_tag

PARTIAL = ".partial"
"""Ends the name of a directory that is being written; what a run leaves that dies there."""


def save_checkpoint(
    engine: TokenSlicePipelineEngine, save: str, info: CheckpointInfo, *, keep_last: int | None = None
) -> Path:
    """Save a checkpoint, on every rank. It gets its name, and `latest` names it, only once it is whole.

    Args:
        engine: the engine.
        save: directory of the checkpoints.
        info: facts of the run; without an optimizer, none is saved.
        keep_last: checkpoints to keep, the newest; None for all.

    Returns:
        The checkpoint's directory.
    """
    tag = checkpoint_tag(info.iteration)
    partial, directory = Path(save) / f"{tag}{PARTIAL}", Path(save) / tag
    leads = engine.global_rank == 0
    if leads:
        rmtree(partial, ignore_errors=True)
        info.write(partial)
    _save_with_deepspeed(engine, save, partial.name, with_optimizer=info.optimizer is not None)
    # DeepSpeed has waited for all ranks.
    places = _all_places(engine) if info.optimizer is not None else []
    if leads:
        if places:
            write_index(partial, places)
        put_in_place(partial, directory)
        if keep_last is not None:
            _remove_older(Path(save), info.iteration, keep_last)
    dist.barrier()
    return directory


def _save_with_deepspeed(engine: TokenSlicePipelineEngine, save: str, tag: str, *, with_optimizer: bool) -> None:
    state: dict[str, Any] = {}
    if is_partitioned(engine) or not with_optimizer:
        state["optimizer"] = None  # takes the place of what DeepSpeed would save a second time
    else:
        groups = engine.optimizer.param_groups
        state[PARAMETER_NAMES] = [[engine.param_names[each] for each in group["params"]] for group in groups]
    saves_partition = engine.save_zero_checkpoint
    engine.save_zero_checkpoint = saves_partition and with_optimizer
    engine.save_checkpoint(save, tag=tag, client_state=state, save_latest=False)
    engine.save_zero_checkpoint = saves_partition


def _all_places(engine: TokenSlicePipelineEngine) -> list[tuple[str, Place]]:
    """Where each parameter's state lies, stage by stage and replica by replica; every rank must call it together."""
    mine: list[tuple[str, Place]] = []
    destination, in_fragments = destination_of(engine), is_partitioned(engine)
    replica, tensor_rank = engine.grid.get_data_parallel_rank(), engine.grid.get_slice_parallel_rank()
    # Tensor-parallel ranks deal their parts alike, and where nothing is dealt, so do replicas.
    if tensor_rank == 0 and (in_fragments or replica == 0):
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and (elements := destination.elements(parameter)):
                fragments = (Fragment(replica, len(elements)),) if in_fragments else ()
                mine.append((name, Place(engine.grid.get_stage_id(), fragments)))
    gathered: list[list[tuple[str, Place]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    # Ranks count stages slowest.
    return [place for places in gathered for place in places]


def put_in_place(partial: Path, directory: Path) -> None:
    """Give a whole checkpoint its name, in place of an older one of that name, and let `latest` point to it.

    Args:
        partial: directory that it was written to.
        directory: its final directory.
    """
    replaced = directory.with_name(f"{directory.name}.replaced")
    rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    rmtree(replaced, ignore_errors=True)
    latest = directory.with_name(LATEST)
    written = latest.with_name(f"{LATEST}{PARTIAL}")
    written.write_text(directory.name)
    os.replace(written, latest)


def _remove_older(save: Path, iteration: int, keep_last: int) -> None:
    """Keep so many checkpoints up to an iteration. Later ones, of a run that was set back, and others' files stay."""
    saved = {
        int(match[1]): path
        for path in save.iterdir()
        if (match := re.fullmatch(r"global_step(\d+)", path.name)) and (path / RUN_FILE).is_file()
    }
    for older in sorted(each for each in saved if each <= iteration)[:-keep_last]:
        rmtree(saved[older])
