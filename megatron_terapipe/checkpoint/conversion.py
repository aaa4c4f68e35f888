"""Models of Hugging Face as checkpoints, and checkpoints as models of Hugging Face."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.plan.terminal import Progress, no_progress
from deepspeed_ext.runtime.health.states import are_finite
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.checkpoint.directories import complete
from megatron_terapipe.checkpoint.info import RUN_FILE, CheckpointInfo
from megatron_terapipe.checkpoint.manifest import ASIDE, DurableFile
from megatron_terapipe.checkpoint.saved_weights import SavedWeights
from megatron_terapipe.checkpoint.verify import verify_weights
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.checkpoint import checkpoint_tag
from megatron_terapipe.config.options import one_of
from megatron_terapipe.errors import ConfigError, NumbersError
from megatron_terapipe.huggingface.families.family import Family, check_expressible
from megatron_terapipe.huggingface.families.registry import FAMILIES, family_of, read_model
from megatron_terapipe.huggingface.folder_weights import (
    DTYPES,
    SHARD_BYTES,
    FolderWeights,
    meta_layer,
    rules_of,
    write_tensors,
)
from megatron_terapipe.huggingface.tokenizer_files import export_tokenizer, import_tokenizer
from megatron_terapipe.huggingface.weight_rules import split_layer
from megatron_terapipe.model.gpt import layers_with_weights


def import_model(directory: Path, output: Path, *, dtype: str | None = None, progress: Progress = no_progress) -> Path:
    """Write a model of Hugging Face as a checkpoint at iteration 0, and return its directory.

    Args:
        dtype: type of the weights; None as they are there.
    """
    family, model = read_model(directory, "--load")
    weights = FolderWeights(directory, family, model)
    weights.check()
    checkpoint = output / checkpoint_tag(0)
    partial = checkpoint.with_name(checkpoint.name + ASIDE)
    tokenizer = import_tokenizer(directory, output / "tokenizer")
    info = CheckpointInfo.imported(family.name, model, tokenizer=tokenizer, has_manifest=True)
    rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {}
    indices = list(layers_with_weights(model))
    for number, index in enumerate(indices):
        progress(number / len(indices))
        layer = weights.layer(index)
        layer = {name: _converted(f"{index}.{name}", weight, dtype) for name, weight in layer.items()}
        with DurableFile(partial / layer_file(index)) as file:
            torch.save(layer, file)
        files[layer_file(index)] = file.facts
    complete(partial, checkpoint, files, {RUN_FILE: info.text()})
    return checkpoint


VERIFIED = 0.3
"""Share of the time after which a checkpoint has been verified, about."""


def export_checkpoint(
    directory: Path,
    output: Path,
    *,
    family: str | None = None,
    dtype: str | None = None,
    eod: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = no_progress,
) -> list[str]:
    """Write a checkpoint as a model of Hugging Face, and return the names of the files of its tokenizer.

    Args:
        family: name of the family to write it as; None for the one that it was imported from, or else for the first
            that can express it.
        dtype: type of the weights; None as they were saved.
        eod: id of the token that ends a document; None if it is unknown.
    """
    info = CheckpointInfo.read(directory)
    model = ModelConfig(**info.model)
    chosen = _chosen_family(model, family, info.family)
    verify_weights(directory, info, model, lambda share: progress(VERIFIED * share))
    output.mkdir(parents=True, exist_ok=True)

    def written(share: float) -> None:
        progress(VERIFIED + (1 - VERIFIED) * share)

    tensors = _tensors(chosen, model, SavedWeights(directory, info), dtype, written)
    first_name, first = next(tensors)
    write_tensors(output, chain([(first_name, first)], tensors), shard_bytes=shard_bytes)
    # Null where it is unknown: the default of a family may not be in the vocabulary.
    ends = {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": None}
    settings = chosen.write(model) | ends | {"dtype": str(first.dtype).removeprefix("torch.")}
    _write_json(output / "config.json", settings | {"torch_dtype": settings["dtype"]})
    _write_json(output / "generation_config.json", ends | {"_from_model_config": True})
    return export_tokenizer(info.tokenizer, output)


def _chosen_family(model: ModelConfig, requested: str | None, origin: str | None) -> Family:
    """The family of the flag, or the one that the model was imported from, or the first that can express it."""
    if requested is not None:
        if requested not in FAMILIES:
            raise ConfigError(f"--family {requested} is unknown: choose {one_of(list(FAMILIES))}")
        family = FAMILIES[requested]
        check_expressible(family, model)
        return family
    return family_of(model, origin)


def _tensors(
    family: Family, model: ModelConfig, saved: SavedWeights, dtype: str | None, progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors there, layer by layer."""
    indices = list(layers_with_weights(model))
    for number, index in enumerate(indices):
        progress(number / len(indices))
        weights = saved.whole(index, meta_layer(model, index))
        for name, tensor in split_layer(rules_of(model, family, index), weights).items():
            yield name, _converted(name, tensor, dtype)


def _converted(name: str, weight: Tensor, dtype: str | None) -> Tensor:
    """Return a weight [...] in the type that `--dtype` names; refuse NaN and infinity, as the trainer does."""
    converted = weight if dtype is None else weight.to(DTYPES[dtype])
    if not are_finite([converted]).item():
        remedy = f"do without --dtype {dtype}" if are_finite([weight]).item() else "convert another"
        raise NumbersError(f"--load has NaN or infinity in weight {name}: {remedy}")
    return converted


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n")
