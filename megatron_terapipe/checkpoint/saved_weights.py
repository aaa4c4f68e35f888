"""Weights in files, of a checkpoint of ours or of a folder of Hugging Face, for any number of tensor-parallel ranks.

A folder of Hugging Face counts as a checkpoint saved by one rank at iteration 0, without a state of the optimizer.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.runtime.saved_files import UnsafeFileError, load_saved
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.families.registry import FAMILIES, is_model_folder, read_model
from megatron_terapipe.huggingface.folder_weights import FolderWeights


class SavedWeights:
    """The weights of one checkpoint, a layer at a time."""

    def __init__(self, directory: Path, info: CheckpointInfo) -> None:
        self._directory, self._info = directory, info
        # The layers of a stage come one after the other, and tied weights from the first of all.
        self.layer = lru_cache(maxsize=2 * info.tensor_parallel_size)(self._layer)

    def _path(self, index: int, part: int = 0) -> Path:
        return self._directory / layer_file(*self._info.place(index, part))

    def _layer(self, index: int, part: int = 0) -> Mapping[str, Tensor]:
        """Weights of a layer by their names in it, a part that was saved by itself; mapped, not yet read."""
        path = self._path(index, part)
        try:
            layer: Mapping[str, Tensor] = load_saved(path)
            return layer
        except UnsafeFileError as error:
            raise CheckpointError(str(error)) from None
        except Exception as error:  # On a damaged file an unpickler may raise anything.
            raise CheckpointError(
                f"cannot load layer {index} from {path} ({first_line(error)}): save it again"
            ) from None

    def weight(self, index: int, name: str, part: int = 0) -> Tensor:
        """Return one weight [...] of a layer, or the part of it that was saved by itself."""
        layer = self.layer(index, part)
        if name not in layer:
            raise CheckpointError(f"{self._path(index, part)} lacks {name}: load a checkpoint of the same model")
        return layer[name]

    def whole(self, index: int, layer: nn.Module) -> dict[str, Tensor]:
        """Return the whole weights [...] of a layer by name, put together from all parts.

        Args:
            layer: the layer as one rank alone has it, may be on `meta`; its parameters say how ranks share them.
        """
        parts = [self.layer(index, part) for part in range(self._info.num_parts(index))]
        expected = layer.state_dict()
        cuts = {name: cut_dimension(parameter) for name, parameter in layer.named_parameters()}
        try:
            whole = {name: _joined([part[name] for part in parts], cuts.get(name)) for name in parts[0]}
            shapes = {name: weight.shape for name, weight in whole.items()}
            wanted = {name: weight.shape for name, weight in expected.items()}
            if shapes != wanted:
                raise ValueError(f"it has weights of shapes {_in_words(shapes)}, and not {_in_words(wanted)}")
        except Exception as error:
            raise CheckpointError(
                f"cannot load layer {index} from {self._path(index)} ({first_line(error)}): save it again"
            ) from None
        return whole


def cut_dimension(parameter: nn.Parameter) -> int | None:
    """Dimension along which tensor-parallel ranks share a weight; None if each holds the whole."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def reshare(part: Callable[[int], Tensor], num_parts: int, *, rank: int, size: int, cut: int | None) -> Tensor:
    """Return a rank's part [...] of a tensor that another number of ranks saved.

    Args:
        part: function from a rank to the tensor that it saved.
        rank: the rank whose part is wanted.
        size: ranks that share it now.
        cut: dimension that they share; None if each holds the whole.
    """
    if num_parts == size:
        return part(rank)
    if cut is None:
        return part(0)
    return torch.cat([part(each) for each in range(num_parts)], dim=cut).tensor_split(size, dim=cut)[rank]


def first_line(error: Exception) -> str:
    """First line of an error, or its type if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _joined(parts: list[Tensor], cut: int | None) -> Tensor:
    return parts[0] if cut is None or len(parts) == 1 else torch.cat(parts, dim=cut)


def _in_words(shapes: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items()) or "nothing"


class Weights(Protocol):
    """Weights that lie in files."""

    def weight(self, index: int, name: str, part: int = 0) -> Tensor:
        """Return one weight [...] of a layer, or the part of it that was saved by itself."""


def folder_info(folder: Path, model: ModelConfig) -> CheckpointInfo:
    """Return the facts of a folder.

    Args:
        model: the run's model section, which says how the vocabulary is padded: the folder's is not.
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
    """Return the weights of a checkpoint, or of a folder of Hugging Face."""
    if is_model_folder(directory):
        return folder_weights(directory, info)
    return SavedWeights(directory, info)


def folder_weights(folder: Path, info: CheckpointInfo) -> FolderWeights:
    """Return the weights of a folder."""
    return FolderWeights(folder, FAMILIES[str(info.family)], ModelConfig(**info.model))
