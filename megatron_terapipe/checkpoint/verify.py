"""Sees that the content of every file is what was saved, before any of it is used."""

import heapq
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from deepspeed_ext.plan.text.progress_line import Progress, unseen
from megatron_terapipe.checkpoint.agreement import first_fault, from_first_rank
from megatron_terapipe.checkpoint.directories import manifest_of
from megatron_terapipe.checkpoint.find import check_files, files_to_load
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.manifest import FileFacts, Manifest
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import AgreedCheckpointError, CheckpointError
from megatron_terapipe.huggingface.families.registry import is_model_folder


def verify_checkpoint(
    directory: Path, info: CheckpointInfo, model: ModelConfig, *, weights_only: bool, reads: bool = True
) -> str | None:
    """Read every file that a run loads once, each on one of the ranks; every rank must call it at the same time.

    Args:
        reads: read the files; if not, only names and sizes are checked.

    Returns:
        A line for the log if nothing says what the files must be, so that nothing could be verified.

    Raises:
        AgreedCheckpointError: on every rank alike, naming a file that is missing, damaged or of another checkpoint.
    """
    manifest = from_first_rank(lambda: _manifest_to_verify(directory, info, model, weights_only=weights_only))
    if manifest is None:
        return None if is_model_folder(directory) else f" warning: {directory} has no manifest: nothing is verified"
    if not reads:
        return None
    try:
        manifest.check_content(directory, shares(manifest.files, dist.get_world_size())[dist.get_rank()])
        mine = None
    except CheckpointError as error:
        mine = str(error)
    if fault := first_fault(mine):
        raise AgreedCheckpointError(fault)
    return None


def verify_weights(directory: Path, info: CheckpointInfo, model: ModelConfig, progress: Progress = unseen) -> None:
    """See that a checkpoint's weights are whole, on one process.

    Args:
        progress: is told how many of the files are read.

    Raises:
        CheckpointError: naming a file that is missing or damaged.
    """
    manifest = _manifest_to_verify(directory, info, model, weights_only=True)
    if manifest is not None:
        for number, name in enumerate(manifest.files):
            progress(number / len(manifest.files))
            manifest.check_content(directory, [name])


def shares(files: Mapping[str, FileFacts], num_ranks: int) -> list[list[str]]:
    """Names of the files that each rank reads: each file once, about as many bytes on every rank."""
    dealt: list[list[str]] = [[] for _ in range(num_ranks)]
    least = [(0, rank) for rank in range(num_ranks)]
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        read, rank = heapq.heappop(least)
        dealt[rank].append(name)
        heapq.heappush(least, (read + files[name].size, rank))
    return dealt


def _manifest_to_verify(
    directory: Path, info: CheckpointInfo, model: ModelConfig, *, weights_only: bool
) -> Manifest | None:
    """Return the part of the manifest with the files that are loaded, all there and of the right sizes."""
    check_files(directory, info, model, weights_only=weights_only)
    manifest = None if is_model_folder(directory) else manifest_of(directory, info)
    if manifest is None or not weights_only:
        return manifest
    names = files_to_load(directory, info, model, weights_only=True)
    return Manifest({name: facts for name, facts in manifest.files.items() if name in names})
