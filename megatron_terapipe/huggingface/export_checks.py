"""An export, read back before it is called done: by its own description, and by its class of transformers."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from megatron_terapipe.errors import CheckpointError, first_line
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
    """Read a folder again; return why a transformers that is installed does not read it, or nothing.

    Raises a `CheckpointError` if it has not the tensors that its description promises, or not the values that were
    written, or not the weights of the class of transformers, which is built on the meta device.
    """
    family, model = read_model(directory, "--output")
    FolderWeights(directory, family, model).check()
    tensors = SavedTensors(directory)
    for name in sorted(tensors.names):
        if _fingerprint(tensors.read(name)) != written.get(name):
            raise CheckpointError(f"{directory} has other values in {name} than were written: convert to another disk")
    if find_spec("transformers") is None:
        return []
    transformers = import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            built = getattr(transformers, family.architecture)._from_config(config)
    except Exception as error:  # Of a version that has no such class, or reads its settings otherwise.
        return [f"transformers {transformers.__version__}, which is installed, cannot read it: {first_line(error)}"]
    # The base model has not the same name in files and in the class.
    base = family.names(model).prefix.partition(".")[0] + "."
    ours = {name.removeprefix(base): tensors.shape(name) for name in tensors.names}
    theirs = {
        name.removeprefix(f"{built.base_model_prefix}."): weight
        for name, weight in built.state_dict(keep_vars=True).items()
    }
    # Experts may be divided otherwise in files, and tied weights have several names: their elements are counted.
    counts = sum({id(weight): weight.numel() for weight in theirs.values()}.values()), sum(map(prod, ours.values()))
    other = [name for name in sorted(ours.keys() & theirs.keys()) if ours[name] != tuple(theirs[name].shape)]
    if other or counts[0] != counts[1]:
        other += sorted(theirs.keys() ^ ours.keys())
        raise CheckpointError(
            f"transformers {transformers.__version__} would load another model: its {family.architecture} has "
            f"{counts[0]} weights, the export {counts[1]}; {other[0]} differs: keep the model in our files, or "
            "name another --family"
        )
    return []
