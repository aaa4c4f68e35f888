"""Import files of Hugging Face as a checkpoint."""

from dataclasses import asdict
from pathlib import Path
from shutil import rmtree

import torch

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.text.progress_line import Progress, unseen
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.checkpoint.info import RUN_FILE, CheckpointInfo
from megatron_terapipe.checkpoint.manifest import MANIFEST_FILE, Manifest
from megatron_terapipe.checkpoint.saving.durable import ASIDE, DurableFile, sync_folder, write_durably
from megatron_terapipe.checkpoint.saving.rotation import put_in_place
from megatron_terapipe.config.files.checkpoint import checkpoint_tag
from megatron_terapipe.huggingface.families.registry import read_model
from megatron_terapipe.huggingface.tokenizer_files import import_tokenizer
from megatron_terapipe.huggingface.weights.folder import FolderWeights
from megatron_terapipe.huggingface.weights.tensor_files import DTYPES
from megatron_terapipe.model.gpt import layers_with_weights


def import_model(directory: Path, output: Path, *, dtype: str | None = None, progress: Progress = unseen) -> Path:
    """Write a model of Hugging Face as a checkpoint at iteration 0.

    Args:
        dtype: type of the weights; None as they are there.
        progress: is told how much of the model is written.

    Returns:
        Directory of the checkpoint.

    Raises:
        UserError: if a file is missing or damaged, or our models cannot be such a model.
    """
    family, model = read_model(directory, "--load")
    weights = FolderWeights(directory, family, model)
    weights.check()
    checkpoint = output / checkpoint_tag(0)
    partial = checkpoint.with_name(checkpoint.name + ASIDE)
    info = CheckpointInfo(
        iteration=0,
        consumed_samples=0,
        model=asdict(model),
        layout=asdict(ParallelLayout()),
        optimizer=None,
        partitioned=False,
        tokenizer=import_tokenizer(directory, output / "tokenizer"),
        family=family.name,
        has_manifest=True,
    )
    rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {RUN_FILE: write_durably(partial / RUN_FILE, info.text())}
    indices = list(layers_with_weights(model))
    for number, index in enumerate(indices):
        progress(number / len(indices))
        layer = weights.layer(index)
        if dtype is not None:
            layer = {name: weight.to(DTYPES[dtype]) for name, weight in layer.items()}
        with DurableFile(partial / layer_file(index)) as file:
            torch.save(layer, file)
        files[layer_file(index)] = file.facts
    write_durably(partial / MANIFEST_FILE, Manifest(files).text())
    sync_folder(partial)
    put_in_place(partial, checkpoint)
    return checkpoint
