"""Weights in files, of a checkpoint of ours or of a folder of Hugging Face, for any number of tensor-parallel ranks.

A folder of Hugging Face counts as a checkpoint saved by one rank at iteration 0, without a state of the optimizer.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from deepspeed_ext.runtime.saved_files import UnsafeFileError, load_saved
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.checkpoint.directories import experts_file
from megatron_terapipe.checkpoint.foreign import is_megatron
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.megatron_files import MegatronWeights, NamedWeights
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError, first_line
from megatron_terapipe.huggingface.families.registry import FAMILIES, is_model_folder, read_model
from megatron_terapipe.huggingface.folder_weights import FolderWeights


class SavedWeights:
    """The weights of one checkpoint, a layer at a time."""

    def __init__(self, directory: Path, info: CheckpointInfo) -> None:
        self._directory, self._info = directory, info
        # The layers of a stage come one after the other, and tied weights from the first of all.
        size = 2 * (info.layout.tensor_parallel_size + info.layout.expert_parallel_size)
        self._file = lru_cache(maxsize=size)(self._read_file)

    def _path(self, index: int, part: int = 0, name: str = "") -> Path:
        if self._info.has_files_of_experts(name):
            return self._directory / experts_file(index, part)
        return self._directory / layer_file(*self._info.place(index, part))

    def _read_file(self, path: Path, index: int) -> Mapping[str, Tensor]:
        """Weights of a layer by their names in it, a part that was saved by itself; mapped, not yet read."""
        try:
            layer: Mapping[str, Tensor] = load_saved(path)
            strange = [name for name, each in layer.items() if not (isinstance(name, str) and _is_whole(each))]
            if strange:
                raise ValueError(f"{strange[0]!r} is not the name of a tensor with storage of its size")
            return layer
        except UnsafeFileError as error:
            raise CheckpointError(str(error)) from None
        except Exception as error:  # On a damaged file an unpickler may raise anything.
            raise CheckpointError(
                f"cannot load layer {index} from {path} ({first_line(error)}): save it again"
            ) from None

    def weight(self, index: int, name: str, part: int = 0) -> Tensor:
        """Return one weight [...] of a layer, or the part of it that was saved by itself."""
        path = self._path(index, part, name)
        layer = self._file(path, index)
        if name not in layer:
            raise CheckpointError(f"{path} lacks {name}: load a checkpoint of the same model")
        return layer[name]

    def whole(self, index: int, layer: nn.Module) -> dict[str, Tensor]:
        """Return the whole weights [...] of a layer by name, put together from all parts.

        Args:
            layer: the layer on a single rank, may be on `meta`; its parameters have the dimension that ranks cut.
        """
        parameters = layer.named_parameters()
        cuts = {name: 0 if self._info.deals(name) else cut_dimension(weight) for name, weight in parameters}
        files = {self._path(index, 0, name) for name in ("", *cuts)}
        held = {
            name: [self.weight(index, name, part) for part in range(self._info.num_parts(index, name))]
            for path in files
            for name in self._file(path, index)
        }
        try:
            whole = {}
            for name, parts in held.items():
                cut = cuts.get(name)
                whole[name] = parts[0] if cut is None or len(parts) == 1 else torch.cat(parts, dim=cut)
            found = {name: tuple(weight.shape) for name, weight in whole.items()}
            expected = {name: tuple(weight.shape) for name, weight in layer.state_dict().items()}
            if found != expected:
                raise ValueError(f"it has weights of shapes {_in_words(found)}, and not {_in_words(expected)}")
        except Exception as error:
            raise CheckpointError(
                f"cannot load layer {index} from {self._path(index)} ({first_line(error)}): save it again"
            ) from None
        return whole


def _is_whole(found: object) -> bool:
    """Whether an object of a file is a tensor whose elements are all in the file."""
    return isinstance(found, Tensor) and found.nbytes <= found.untyped_storage().nbytes()


def cut_dimension(parameter: nn.Parameter) -> int | None:
    """Dimension along which tensor-parallel ranks share a weight; None if each holds the whole."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no weights"


def folder_info(folder: Path, model: ModelConfig) -> CheckpointInfo:
    """Return the facts of a folder.

    Args:
        model: the run's model section, which has the padding of the vocabulary, and the number of layers that predict
            further tokens: the folder's has neither.
    """
    family, theirs = read_model(folder, "--load")
    ours = {name: getattr(model, name) for name in ("make_vocab_size_divisible_by", "vocab_rows", "mtp_num_layers")}
    return CheckpointInfo.imported(family.name, replace(theirs, **ours))


def left_out(directory: Path, info: CheckpointInfo) -> str | None:
    """Return a sentence about weights of a folder of Hugging Face that the run does not read; None without any."""
    weights = weights_of(directory, info)
    return weights.left_out() if isinstance(weights, FolderWeights) else None


def weights_of(directory: Path, info: CheckpointInfo) -> SavedWeights | FolderWeights | NamedWeights:
    """Return the weights of a checkpoint, of ours or of Megatron-LM, or of a folder of Hugging Face."""
    if is_megatron(directory) and info.program is not None:
        return NamedWeights(directory, ModelConfig(**info.model))
    if is_megatron(directory):
        return MegatronWeights(directory, ModelConfig(**info.model))
    if is_model_folder(directory):
        return FolderWeights(directory, FAMILIES[str(info.family)], ModelConfig(**info.model))
    return SavedWeights(directory, info)
