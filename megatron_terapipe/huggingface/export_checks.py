"""An export, read back before it is called done: by its own description, and by its class of transformers."""

from collections.abc import Iterable, Iterator, Mapping
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
    written, or not the weights of the class of transformers.
    """
    family, model = read_model(directory, "--output")
    FolderWeights(directory, family, model).check()
    tensors = SavedTensors(directory)
    for name in sorted(tensors.names):
        if _fingerprint(tensors.read(name)) != written.get(name):
            raise CheckpointError(f"{directory} has other values in {name} than were written: convert to another disk")
    if find_spec("transformers") is None:
        return []
    return check_class(directory, family.architecture, {name: tensors.shape(name) for name in tensors.names})


def check_class(directory: Path, architecture: str, ours: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Compare the shapes of tensors with the weights of a class of transformers, built on the meta device.

    Returns why it cannot be built by the `config.json` of a folder, or nothing.
    """
    try:
        transformers = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            built = getattr(transformers, architecture)._from_config(config)
    except Exception as error:  # Of a version that has no such class or reads its settings otherwise, or of its import.
        return [f"the transformers that is installed cannot read it: {first_line(error)}"]
    theirs = built.state_dict(keep_vars=True)
    # Experts may be divided otherwise in files, and tied weights have several names: their elements are counted.
    counts = sum({id(weight): weight.numel() for weight in theirs.values()}.values()), sum(map(prod, ours.values()))
    other = [name for name in sorted(ours.keys() & theirs.keys()) if ours[name] != tuple(theirs[name].shape)]
    if other or counts[0] != counts[1]:
        # The base model has not the same name in files and in the class; the output layer is outside of it.
        names = [{each.partition(".")[2] if each.count(".") > 1 else each for each in side} for side in (theirs, ours)]
        other += sorted(names[0] ^ names[1])
        raise CheckpointError(
            f"transformers {transformers.__version__} would load another model: its {architecture} has "
            f"{counts[0]} weights, the export {counts[1]}; {next(iter(other), 'a weight')} differs: keep the model in "
            "our files, or name another --family"
        )
    return []
