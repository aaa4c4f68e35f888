"""Saves a checkpoint, so that what bears a checkpoint's name is always whole."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch.distributed as dist

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.checkpoint.agreement import from_first_rank
from megatron_terapipe.checkpoint.engine_state import destination_of, is_partitioned
from megatron_terapipe.checkpoint.index import INDEX_FILE, PARAMETER_NAMES, Fragment, Place, index_text
from megatron_terapipe.checkpoint.info import RUN_FILE, CheckpointInfo
from megatron_terapipe.checkpoint.manifest import MANIFEST_FILE, FileFacts, Manifest
from megatron_terapipe.checkpoint.saving.durable import ASIDE, sync_folder, write_durably
from megatron_terapipe.checkpoint.saving.file_writer import FileWriter
from megatron_terapipe.checkpoint.saving.room import bytes_to_save, check_room
from megatron_terapipe.checkpoint.saving.rotation import put_in_place, remove_older
from megatron_terapipe.config.files.checkpoint import checkpoint_tag
from megatron_terapipe.errors import CheckpointError, SaveError


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has saved."""

    facts: dict[str, FileFacts]
    """Sizes and hashes of its files."""
    fault: str | None
    """What kept one of them from being written, if anything did."""
    places: list[tuple[str, Place]]
    """Where the state of its parameters lies."""


class UnfinishedSave:
    """A checkpoint of which this rank has copied or written its part, and which has no name yet.

    Args:
        places: where the state of this rank's parameters lies.
        keep_last: checkpoints to keep, the newest; None for all.
    """

    def __init__(
        self,
        directory: Path,
        info: CheckpointInfo,
        writer: FileWriter,
        places: list[tuple[str, Place]],
        keep_last: int | None,
    ) -> None:
        self.directory = directory
        self._info, self._writer, self._places, self._keep_last = info, writer, places, keep_last

    def finish(self, group: dist.ProcessGroup | None = None) -> list[str]:
        """Write what is not written yet, and give the checkpoint its name; every rank must call it.

        Args:
            group: of all ranks, in which nothing else is sent meanwhile; None for that of the run.

        Returns:
            Lines for the log.

        Raises:
            SaveError: on every rank alike, if a rank could not write its part. What was written is then gone.
        """
        self._writer.write_kept()
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(_Part(self._writer.facts, self._writer.fault, self._places), parts, dst=0, group=group)
        return from_first_rank(partial(self._complete, parts or []), group=group, error=SaveError)

    def _complete(self, parts: list[_Part]) -> list[str]:
        partial = _aside(self.directory)
        try:
            for rank, part in enumerate(parts):
                if part.fault is not None:
                    raise OSError(f"rank {rank}, {part.fault}")
            files = {name: facts for part in parts for name, facts in part.facts.items()}
            files[RUN_FILE] = write_durably(partial / RUN_FILE, self._info.text())
            # Ranks count stages slowest.
            if places := [place for part in parts for place in part.places]:
                files[INDEX_FILE] = write_durably(partial / INDEX_FILE, index_text(places))
            write_durably(partial / MANIFEST_FILE, Manifest(files).text())
            sync_folder(partial)
            put_in_place(partial, self.directory)
        except OSError as error:
            rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {self.directory} was not saved ({error.strerror or error}): make room or mend "
                f"{self.directory.parent}, and go on from the one before, which is whole"
            ) from None
        lines = [f" saved checkpoint {self.directory}"]
        try:
            remove_older(self.directory.parent, self._info.iteration, self._keep_last)
        except OSError as error:
            lines.append(f" warning: older checkpoints in {self.directory.parent} could not be removed: {error}")
        return lines


def begin_save(
    engine: TokenSlicePipelineEngine,
    save: str | Path,
    info: CheckpointInfo,
    *,
    keep_last: int | None = None,
    in_memory: bool = False,
) -> UnfinishedSave:
    """Write this rank's part of a checkpoint, or copy it to memory, on every rank.

    Args:
        info: facts of the run; without an optimizer, none is saved.
        keep_last: checkpoints to keep, the newest; None for all.
        in_memory: leave the disk to `UnfinishedSave.finish`, which another thread may call while training goes on.

    Raises:
        SaveError: on every rank alike, if there is no room.
    """
    directory = Path(save) / checkpoint_tag(info.iteration)
    info = replace(info, has_manifest=True)
    with_optimizer = info.optimizer is not None
    size = bytes_to_save(engine, info.optimizer)
    from_first_rank(partial(_prepare, _aside(directory), size), error=SaveError)
    writer = FileWriter(in_memory=in_memory)
    _save_with_deepspeed(engine, _aside(directory), writer, with_optimizer=with_optimizer)
    return UnfinishedSave(directory, info, writer, _places(engine) if with_optimizer else [], keep_last)


def save_checkpoint(
    engine: TokenSlicePipelineEngine, save: str | Path, info: CheckpointInfo, *, keep_last: int | None = None
) -> Path:
    """Save a checkpoint, on every rank. It gets its name, and `latest` names it, only once it is whole.

    Args:
        info: facts of the run; without an optimizer, none is saved.
        keep_last: checkpoints to keep, the newest; None for all.

    Returns:
        The checkpoint's directory.

    Raises:
        SaveError: on every rank alike, if a rank could not write its part.
    """
    unfinished = begin_save(engine, save, info, keep_last=keep_last)
    unfinished.finish()
    return unfinished.directory


def _aside(directory: Path) -> Path:
    """The directory in which a checkpoint is written."""
    return directory.with_name(f"{directory.name}{ASIDE}")


def _prepare(aside: Path, size: int) -> None:
    rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"--save {aside.parent} cannot be written ({error.strerror}): name another") from None
    try:
        check_room(aside.parent, size)
    except CheckpointError:
        aside.rmdir()
        raise


def _save_with_deepspeed(
    engine: TokenSlicePipelineEngine, directory: Path, writer: FileWriter, *, with_optimizer: bool
) -> None:
    state: dict[str, Any] = {}
    if is_partitioned(engine) or not with_optimizer:
        state["optimizer"] = None  # takes the place of what DeepSpeed would save a second time
    else:
        groups = engine.optimizer.param_groups
        state[PARAMETER_NAMES] = [[engine.param_names[each] for each in group["params"]] for group in groups]
    saves_partition, own_writer = engine.save_zero_checkpoint, engine.checkpoint_engine
    engine.save_zero_checkpoint, engine.checkpoint_engine = saves_partition and with_optimizer, writer
    try:
        engine.save_checkpoint(str(directory.parent), tag=directory.name, client_state=state, save_latest=False)
    finally:
        engine.save_zero_checkpoint, engine.checkpoint_engine = saves_partition, own_writer


def _places(engine: TokenSlicePipelineEngine) -> list[tuple[str, Place]]:
    """Where the state of this rank's parameters lies, as far as no other rank says the same."""
    found: list[tuple[str, Place]] = []
    destination, in_fragments = destination_of(engine), is_partitioned(engine)
    replica, tensor_rank = engine.grid.get_data_parallel_rank(), engine.grid.get_slice_parallel_rank()
    # Tensor-parallel ranks deal their parts alike, and where nothing is dealt, so do replicas.
    if tensor_rank == 0 and (in_fragments or replica == 0):
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and (elements := destination.elements(parameter)):
                fragments = (Fragment(replica, len(elements)),) if in_fragments else ()
                found.append((name, Place(engine.grid.get_stage_id(), fragments)))
    return found
