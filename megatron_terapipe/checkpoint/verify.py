"""Finds the checkpoint to continue from, and verifies that it is whole before it is used.

`find_checkpoint` runs before any process group exists and looks at names and sizes; `verify_checkpoint` reads every
file once, each on one of the ranks.
"""

import heapq
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.terminal import Progress, no_progress
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.checkpoint.agreement import agreed, from_first_rank
from megatron_terapipe.checkpoint.directories import (
    BF16_PREFIX,
    experts_file,
    experts_state_file,
    names_model_folder,
    no_checkpoint,
    optimizer_files,
    readable_checkpoint,
    state_file,
)
from megatron_terapipe.checkpoint.foreign import refuse_foreign
from megatron_terapipe.checkpoint.info import RUN_FILE, CheckpointInfo
from megatron_terapipe.checkpoint.manifest import FileFacts, Manifest, damage
from megatron_terapipe.checkpoint.megatron_files import MegatronWeights, NamedWeights
from megatron_terapipe.checkpoint.saved_weights import folder_info, weights_of
from megatron_terapipe.config import CheckpointConfig, ModelConfig
from megatron_terapipe.errors import AgreedCheckpointError, CheckpointError
from megatron_terapipe.huggingface.folder_weights import FolderWeights
from megatron_terapipe.model.gpt import layers_with_weights


def find_checkpoint(
    config: CheckpointConfig,
    model: ModelConfig,
    layout: ParallelLayout,
    optimizer: str,
    *,
    checks_files: bool = True,
    program: str | None = None,
) -> tuple[Path, CheckpointInfo] | None:
    """The checkpoint that a run continues from, which fits the run; None to start from the beginning.

    Args:
        checks_files: check that every file exists and is whole. Ranks that leave it to the first one read only the
            facts of the run.
        program: file of the program whose layers the run has; None for the GPT's.
    """
    if config.save is not None:
        refuse_foreign("--save", config.save)
    if config.load is None:
        return None
    from_folder = names_model_folder(config.load)
    if from_folder:
        found = Path(config.load), folder_info(Path(config.load), model)
    else:
        or_previous = config.load_previous_if_damaged
        found = readable_checkpoint(config.load, config.tag, or_previous=or_previous, model=model, program=program)
    if found is None:
        # With one checkpoint in place of the directory above it, training would start from the beginning.
        if (Path(config.load) / RUN_FILE).is_file() or config.exit_on_missing_checkpoint or config.finetune:
            raise CheckpointError(no_checkpoint(config.load))
        return None
    directory, info = found
    extends = config.extend_positions and config.weights_only
    weights_only = config.weights_only
    info.check(model, layout, optimizer, weights_only=weights_only, extends_positions=extends, program=program)
    # If another may replace a damaged one, all ranks check it later, at the same time.
    if checks_files and not config.load_previous_if_damaged:
        check_files(directory, info, model, weights_only=config.weights_only)
    return directory, info


def check_files(directory: Path, info: CheckpointInfo, model: ModelConfig, *, weights_only: bool) -> Manifest | None:
    """Check that every file exists and has its size.

    Returns:
        The part of the manifest with the files that are loaded; None for a model of another program.
    """
    if isinstance(weights := weights_of(directory, info), NamedWeights):
        if not weights_only:
            raise CheckpointError(
                f"checkpoint {directory} of Megatron-LM has an optimizer's state, of which layers of {info.program} "
                "take none: load only the weights, with --no-load-optim or --finetune"
            )
        return None
    if isinstance(weights, FolderWeights):
        weights.check()
        if isinstance(weights, MegatronWeights) and not weights_only:
            weights.check_states()
        return None
    manifest = Manifest.read(directory)
    if not weights_only:
        manifest.check_sizes(directory)
    names = files_to_load(directory, info, model, weights_only=weights_only)
    if not weights_only:
        return manifest
    manifest.check_sizes(directory, names)
    return Manifest({name: facts for name, facts in manifest.files.items() if name in names})


def files_to_load(directory: Path, info: CheckpointInfo, model: ModelConfig, *, weights_only: bool) -> list[str]:
    """Return the names of the files with tensors that a run loads; refuse a checkpoint without one of them."""
    layout = info.layout
    stages, tensor_ranks = range(layout.pipeline_parallel_size), range(layout.tensor_parallel_size)
    experts = range(layout.expert_parallel_size if info.has_files_of_experts() else 0)
    if info.program is not None:
        names = [name for name in Manifest.read(directory).files if name.startswith("layer_")]
    else:
        names = [
            layer_file(*info.place(layer, part))
            for layer in layers_with_weights(model)
            for part in range(info.num_parts(layer))
        ]
        layers = [layer for layer, block in model.blocks_by_index.items() if block.num_experts]
        names += [experts_file(layer, rank) for layer in layers for rank in experts]
    if not weights_only:
        places = [(stage, rank, layout.tensor_parallel_size) for stage in stages for rank in tensor_ranks]
        names += [state_file(*place) for place in places]
        if info.partitioned:
            num_replicas = layout.data_parallel_size * layout.sequence_parallel_size
            names += [name for place in places for name in optimizer_files(*place, num_replicas)]
        else:
            names += [experts_state_file(stage, rank) for stage in stages for rank in experts]
    there = {path.name for path in directory.iterdir()}
    found = []
    for name in names:
        spelled = next((each for each in (name, f"{BF16_PREFIX}{name}") if each in there), None)
        if spelled is None:
            raise CheckpointError(damage(directory, f"lacks {name}"))
        found.append(spelled)
    return found


def verify_checkpoint(
    directory: Path, info: CheckpointInfo, model: ModelConfig, *, weights_only: bool, reads: bool = True
) -> None:
    """Read every file that a run loads once, each on one of the ranks; every rank must call it at the same time.

    Args:
        reads: read the files; if not, only names and sizes are checked.
    """
    manifest = from_first_rank(lambda: check_files(directory, info, model, weights_only=weights_only))
    if manifest is None or not reads:
        return
    own = shares(manifest.files, dist.get_world_size())[dist.get_rank()]
    agreed(lambda: manifest.check_content(directory, own), AgreedCheckpointError, of=CheckpointError)


def verify_weights(directory: Path, info: CheckpointInfo, model: ModelConfig, progress: Progress = no_progress) -> None:
    """Verify the weights of a checkpoint, in one process."""
    manifest = check_files(directory, info, model, weights_only=True)
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
