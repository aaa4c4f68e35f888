"""An export, read back before it is called done: by its own description, and by its class of transformers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from megatron_terapipe.errors import CheckpointError, first_line
from megatron_terapipe.huggingface.families.family import Family
from megatron_terapipe.huggingface.families.registry import read_model
from megatron_terapipe.huggingface.folder_weights import FolderWeights, SavedTensors

Fingerprints = dict[str, tuple[torch.dtype, int]]
"""Type and checksum of each tensor, by name."""


def fingerprinted(tensors: Iterable[tuple[str, Tensor]], found: Fingerprints) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors [...] as they come, and store the fingerprint of each."""
    for name, tensor in tensors:
        found[name] = _fingerprint(tensor)
        yield name, tensor


def _fingerprint(tensor: Tensor) -> tuple[torch.dtype, int]:
    return tensor.dtype, crc32(tensor.contiguous().flatten().view(torch.uint8).numpy())


def check_export(directory: Path, written: Fingerprints) -> list[str]:
    """Read a folder again and compare its tensors; return why a transformers that is installed does not read it.

    Raises a `CheckpointError` if it has not the tensors that its description promises, those that were written, or
    those that the class of transformers loads.
    """
    family, model = read_model(directory, "--output")
    FolderWeights(directory, family, model).check()
    tensors = SavedTensors(directory)
    for name in sorted(tensors.names):
        if _fingerprint(tensors.read(name)) != written.get(name):
            raise CheckpointError(
                f"{directory} has other values in {name} than were written: convert again, to another disk"
            )
    if find_spec("transformers") is None:
        return []
    base = family.names(model).prefix.partition(".")[0] + "."
    return _check_class(directory, family, {name.removeprefix(base): tensors.shape(name) for name in tensors.names})


def _check_class(directory: Path, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Compare the shapes of tensors with the weights of the class, which is built on the meta device.

    Their names are those without the name of the base model, which is not the same in files and in the class.
    """
    transformers = import_module("transformers")
    try:
        weights = _quietly(transformers, lambda: _weights_of_class(transformers, directory, family))
    except Exception as error:  # Of a version that has no such class, or reads its settings otherwise.
        return [f"transformers {transformers.__version__}, which is installed, cannot read it: {first_line(error)}"]
    # Its names of experts may differ from those in files, and tied weights have several; their number may not differ.
    elements = sum({id(weight): weight.numel() for weight in weights.values()}.values())
    other = [name for name in sorted(shapes.keys() & weights.keys()) if shapes[name] != tuple(weights[name].shape)]
    if other or elements != sum(map(prod, shapes.values())):
        first = next(iter(other or sorted(weights.keys() ^ shapes.keys())), "all of them")
        raise CheckpointError(
            f"transformers {transformers.__version__} would load another model: its {family.architecture} has "
            f"{elements} weights, the export {sum(map(prod, shapes.values()))}, and they differ in {first}; keep the "
            "model in our files, or name another --family"
        )
    return []


def _weights_of_class(transformers: Any, directory: Path, family: Family) -> dict[str, Tensor]:
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = getattr(transformers, family.architecture)._from_config(config)
    weights: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {name.removeprefix(f"{model.base_model_prefix}."): weight for name, weight in weights.items()}


def _quietly(transformers: Any, action: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Act without the warnings of transformers."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return action()
    finally:
        transformers.logging.set_verbosity(before)
