"""Export a checkpoint to files of Hugging Face."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_terapipe.checkpoint.find import check_files
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.saved_weights import SavedWeights
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.huggingface.families import family_of
from megatron_terapipe.huggingface.family import Family
from megatron_terapipe.huggingface.tokenizer_files import export_tokenizer
from megatron_terapipe.huggingface.weight_files import DTYPES, SHARD_BYTES, write_tensors
from megatron_terapipe.inference.whole_model import WholeModel


def export_checkpoint(
    directory: Path,
    output: Path,
    *,
    dtype: str | None = None,
    eod: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a checkpoint as a model of Hugging Face.

    Args:
        directory: directory of one checkpoint.
        output: directory to write to.
        dtype: type of the weights; None as they were saved.
        eod: id of the token that ends a document, if it is known.
        shard_bytes: bytes of tensors in one file.

    Returns:
        Names of the files of the tokenizer that were written, too.

    Raises:
        UserError: if the checkpoint is not whole, or there is no such model there.
    """
    info = CheckpointInfo.read(directory)
    model = ModelConfig(**info.model)
    family = family_of(model)
    check_files(directory, info, model, weights_only=True)
    wanted = None if dtype is None else DTYPES[dtype]
    output.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(family, model, SavedWeights(directory, info.tensor_parallel_size), wanted)
    first_name, first = next(tensors)

    def all_tensors() -> Iterator[tuple[str, Tensor]]:
        yield first_name, first
        yield from tensors

    write_tensors(output, all_tensors(), shard_bytes=shard_bytes)
    ends = {} if eod is None else {"bos_token_id": eod, "eos_token_id": eod}
    settings = family.settings(model) | ends | {"dtype": str(first.dtype).removeprefix("torch.")}
    _write_json(output / "config.json", settings | {"torch_dtype": settings["dtype"]})
    _write_json(output / "generation_config.json", ends | {"_from_model_config": True})
    return export_tokenizer(info.tokenizer, output)


def _tensors(
    family: Family, model: ModelConfig, saved: SavedWeights, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors there, layer by layer."""
    with torch.device("meta"):
        layers = WholeModel(model).layers
    for index, rules in family.rules(model).items():
        weights = saved.whole(index, layers[str(index)])
        for rule in rules:
            for name, tensor in zip(rule.theirs, rule.split(weights[rule.ours]), strict=True):
                yield name, tensor if dtype is None else tensor.to(dtype)


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n")
