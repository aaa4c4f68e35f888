"""A folder of Hugging Face as a checkpoint: saved by one rank at iteration 0, without a state of the optimizer."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.saved_weights import SavedWeights
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.huggingface.families.registry import FAMILIES, is_model_folder, read_model
from megatron_terapipe.huggingface.weights.folder import FolderWeights


class Weights(Protocol):
    """Weights that lie in files."""

    def weight(self, index: int, name: str, part: int = 0) -> Tensor:
        """Return one weight [...] of a layer, or the part of it that was saved by itself."""


def folder_info(folder: Path, model: ModelConfig) -> CheckpointInfo:
    """Return the facts of a folder.

    Args:
        model: the run's model section, which says how the vocabulary is padded: the folder's is not.

    Raises:
        UserError: if its `config.json` cannot be read, or our models cannot be such a model.
    """
    family, theirs = read_model(folder, "--load")
    padding = {name: getattr(model, name) for name in ("make_vocab_size_divisible_by", "vocab_rows")}
    return CheckpointInfo(
        iteration=0,
        consumed_samples=0,
        model=asdict(replace(theirs, **padding)),
        layout=asdict(ParallelLayout()),
        optimizer=None,
        partitioned=False,
        tokenizer={},
        family=family.name,
    )


def weights_of(directory: Path, info: CheckpointInfo) -> Weights:
    """Return the weights of a checkpoint, or of a folder of Hugging Face.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    if is_model_folder(directory):
        return folder_weights(directory, info)
    return SavedWeights(directory, info)


def folder_weights(folder: Path, info: CheckpointInfo) -> FolderWeights:
    """Return the weights of a folder.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    return FolderWeights(folder, FAMILIES[str(info.family)], ModelConfig(**info.model))
