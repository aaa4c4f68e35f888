"""Models of Hugging Face and checkpoints of Megatron-LM as checkpoints of ours, and back."""

import json
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from math import prod
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.terminal import Progress, no_progress
from deepspeed_ext.runtime.health.states import are_finite
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.checkpoint.directories import checkpoint_info, complete, state_file
from megatron_terapipe.checkpoint.foreign import MEGATRON_RELEASE
from megatron_terapipe.checkpoint.info import RUN_FILE, CheckpointInfo
from megatron_terapipe.checkpoint.manifest import ASIDE, DurableFile, FileFacts
from megatron_terapipe.checkpoint.megatron_files import DistributedWriter, MegatronWeights
from megatron_terapipe.checkpoint.megatron_model import MEGATRON, megatron_info
from megatron_terapipe.checkpoint.model_files import (
    GENERATION_FILE,
    MODEL_FILES,
    export_files,
    files_beside,
    ids_of_ends,
    in_checkpoint,
)
from megatron_terapipe.checkpoint.optimizer_state import INDEX_FILE, Place, index_text
from megatron_terapipe.checkpoint.saved_weights import SavedWeights, weights_of
from megatron_terapipe.checkpoint.verify import verify_weights
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.checkpoint import checkpoint_tag
from megatron_terapipe.config.options import one_of
from megatron_terapipe.errors import CheckpointError, ConfigError, NumbersError, first_line
from megatron_terapipe.huggingface.families.family import Family, check_expressible
from megatron_terapipe.huggingface.families.registry import FAMILIES, family_of, read_model, tokenizer_of
from megatron_terapipe.huggingface.folder_weights import (
    DTYPES,
    FolderWeights,
    SavedTensors,
    meta_layer,
    rules_of,
    write_tensors,
)
from megatron_terapipe.huggingface.weight_rules import split_layer
from megatron_terapipe.model.gpt import layers_with_weights


def import_model(
    directory: Path,
    output: Path,
    *,
    mtp_num_layers: int = 0,
    dtype: str | None = None,
    progress: Progress = no_progress,
) -> tuple[Path, list[str]]:
    """Write a model of Hugging Face as a checkpoint at iteration 0.

    Returns its directory, and remarks on files and tensors that it does not keep, a sentence each.

    Args:
        mtp_num_layers: layers that predict further tokens to be read.
        dtype: type of the weights; None as they are there.
    """
    family, model = read_model(directory, "--load")
    model = replace(model, mtp_num_layers=mtp_num_layers)
    weights = FolderWeights(directory, family, model)
    weights.check()
    beside, left = files_beside(directory)
    remarks = [f"{directory} also has {', '.join(left)}, not kept: no export will have them"] if left else []
    remarks += [each for each in [weights.left_out()] if each is not None]
    tokenizer = {
        name: value if name == "tokenizer_type" else f"{MODEL_FILES}/{Path(value).name}"
        for name, value in tokenizer_of(directory).items()
    }
    info = CheckpointInfo.imported(family.name, model, tokenizer=tokenizer)
    layers = ((layer_file(index), layer) for index, layer in _layers(model, weights, dtype, progress))
    return _write_checkpoint(output, info, chain(layers, in_checkpoint(beside).items())), remarks


def import_megatron(
    directory: Path,
    output: Path,
    *,
    vocab_size: int | None = None,
    dtype: str | None = None,
    progress: Progress = no_progress,
) -> tuple[Path, str | None]:
    """Write a checkpoint of Megatron-LM as one of ours.

    Args:
        vocab_size: tokens before padding; None for the number in its arguments or, without one, all rows.
        dtype: type of the weights; None for the type of the optimizer's weights or, without an optimizer, the model's.

    Returns:
        Its directory; and why it has no state of the optimizer, or None if it has one.
    """
    info = megatron_info(directory)
    model = ModelConfig(**info.model)
    if vocab_size is not None:
        rows = model.vocab_rows
        if rows is not None and not 1 <= vocab_size <= rows:
            raise ConfigError(
                f"--vocab-size {vocab_size} is not 1 to {rows}, the rows of {directory}: give one of them"
            )
        model = replace(model, vocab_size=vocab_size)
    weights = MegatronWeights(directory, model)
    weights.check()
    # The optimizer's state of each layer is a stage of its own, so that only one layer is in memory.
    layout = ParallelLayout(pipeline_parallel_size=len(layers_with_weights(model)))
    optimizer = None if weights.no_states else info.optimizer
    info = replace(info, model=asdict(model), layout=layout, optimizer=optimizer)

    def files() -> Iterator[tuple[str, Any]]:
        places: dict[str, Place] = {}
        for stage, (index, layer) in enumerate(_layers(model, weights, dtype, progress)):
            yield layer_file(index), layer
            if optimizer is not None:
                tied = index == 0 and model.embedding_is_tied
                own = [name for name, _ in meta_layer(model, index).named_parameters()]
                names = ["tied_modules.embedding.weight"] if tied else [f"{index}.{name}" for name in own]
                places.update(dict.fromkeys(names, Place(stage)))
                yield state_file(stage, 0, 1), weights.state_of(names)
        if places:
            yield INDEX_FILE, index_text(places.items())

    return _write_checkpoint(output, info, files()), weights.no_states


def _write_checkpoint(output: Path, info: CheckpointInfo, files: Iterable[tuple[str, Any]]) -> Path:
    """Write a checkpoint from its files, texts, bytes or objects, each made when the one before is written."""
    checkpoint = output / checkpoint_tag(info.iteration)
    partial = checkpoint.with_name(checkpoint.name + ASIDE)
    rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    facts: dict[str, FileFacts] = {}
    texts: dict[str, str | bytes] = {RUN_FILE: info.text()}
    for name, content in files:
        if isinstance(content, str | bytes):
            texts[name] = content
            continue
        with DurableFile(partial / name) as file:
            torch.save(content, file)
        facts[name] = file.facts
    complete(partial, checkpoint, facts, texts)
    return checkpoint


def _layers(
    model: ModelConfig, weights: SavedWeights | FolderWeights, dtype: str | None, progress: Progress
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the index and the weights [...] of each pipeline layer, in the type that `--dtype` names."""
    indices = layers_with_weights(model)
    for number, index in enumerate(indices):
        progress(number / len(indices))
        meta = meta_layer(model, index)
        # Buffers stay as they are, in fp32.
        types = {name: dtype for name, _ in meta.named_parameters()}
        layer = weights.whole(index, meta)
        yield index, {name: _converted(f"{index}.{name}", each, types.get(name)) for name, each in layer.items()}


VERIFIED = 0.3
"""Share of the time after which a checkpoint has been verified, about."""


def _verified_layers(
    directory: Path, info: CheckpointInfo, model: ModelConfig, dtype: str | None, progress: Progress
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Verify the weights of a checkpoint, and return its layers as `_layers` does."""
    verify_weights(directory, info, model, lambda share: progress(VERIFIED * share))
    weights = weights_of(directory, info)
    return _layers(model, weights, dtype, lambda share: progress(VERIFIED + (1 - VERIFIED) * share))


def export_checkpoint(
    directory: Path,
    output: Path,
    *,
    family: str | None = None,
    dtype: str | None = None,
    eod: int | None = None,
    progress: Progress = no_progress,
) -> tuple[list[str], list[str]]:
    """Write a checkpoint as a model of Hugging Face, and read it back.

    Returns the names of the files beside the weights, and remarks, a sentence each.

    Args:
        family: name of the family to write it as; None for the one that it was imported from, or else for the first
            that can express it.
        dtype: type of the weights; None as they were saved.
        eod: id of the token that ends a document, for a checkpoint without files of Hugging Face; None if unknown.
    """
    info = checkpoint_info(directory).of_gpt(directory)
    model = ModelConfig(**info.model)
    chosen = _chosen_family(model, family, info.family)
    unnamed = model.mtp_num_layers - (model := chosen.with_named_layers(model)).mtp_num_layers
    layers = _verified_layers(directory, info, model, dtype, progress)
    output.mkdir(parents=True, exist_ok=True)
    tensors = _split_layers(model, chosen, layers)
    first_name, first = next(tensors)
    write_tensors(output, chain([(first_name, first)], tensors))
    ends = ids_of_ends(directory, chosen.name)
    if ends is None:
        # Null where it is unknown: the default of a family may not be in the vocabulary.
        ends = {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": None}
        _write_json(output / GENERATION_FILE, ends | {"_from_model_config": True})
    settings = chosen.write(model) | ends | {"dtype": str(first.dtype).removeprefix("torch.")}
    _write_json(output / "config.json", settings | {"torch_dtype": settings["dtype"]})
    remarks = [*_remarks(model, chosen), *check_export(output, model.mtp_num_layers)]
    if unnamed:
        remarks.append(f"{unnamed} of the layers that predict further tokens left out: {chosen.name} has no names")
    return export_files(directory, info.tokenizer, output), remarks


def check_export(directory: Path, mtp_num_layers: int = 0) -> list[str]:
    """Read a folder again; return why a transformers that is installed does not read it, or nothing.

    Raises a `CheckpointError` if it has not the tensors that its description promises, or not the weights of the class
    of transformers.
    """
    family, model = read_model(directory, "--output")
    FolderWeights(directory, family, replace(model, mtp_num_layers=mtp_num_layers)).check()
    if find_spec("transformers") is None:
        return []
    tensors, further = SavedTensors(directory), family.names(model).further
    names = (name for name in tensors.names if further is None or further.depth_of(name) is None)
    return check_class(directory, family.architecture, {name: tensors.shape(name) for name in names})


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


def _split_layers(
    model: ModelConfig, family: Family, layers: Iterable[tuple[int, dict[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors [...] of layers by name, and the copies of the embedding and the output layer in such files."""
    names, further = family.names(model), family.names(model).further
    words, output = f"{names.prefix}{names.words}.weight", f"{names.output}.weight"
    original = {"words": words, "output": output if model.untie_embeddings_and_output_weights else words}
    copies = (
        []
        if further is None
        else [
            (original[weight], f"{further.begin.format(further.first + depth)}{name}.weight")
            for name, weight in further.copies.items()
            for depth in range(model.mtp_num_layers)
        ]
    )
    for index, layer in layers:
        split = split_layer(rules_of(model, family, index), layer)
        yield from split.items()
        if index == 0 and model != family.written(model):
            yield output, split[words].clone()
        yield from ((copy, split[name].clone()) for name, copy in copies if name in split)


def _remarks(model: ModelConfig, family: Family) -> Iterator[str]:
    """Yield the differences of an export, and the versions of transformers that read it."""
    if model != family.written(model):
        yield f"{family.name} ties no weights: the output layer is a copy of the embedding, and each is trained further"
    if model.moe_expert_capacity_factor is not None:
        yield (
            f"--moe-expert-capacity-factor {model.moe_expert_capacity_factor:g} is not in the export: it drops no "
            "tokens, and its logits differ where training drops some"
        )
    yield from family.remarks(model)


def _chosen_family(model: ModelConfig, requested: str | None, origin: str | None) -> Family:
    """The family of the flag, or the one that the model was imported from, or the first that can express it."""
    if requested is None:
        return family_of(model, origin)
    if requested not in FAMILIES:
        raise ConfigError(f"--family {requested} is unknown: choose {one_of(list(FAMILIES))}")
    check_expressible(FAMILIES[requested], model)
    return FAMILIES[requested]


def _converted(name: str, weight: Tensor, dtype: str | None) -> Tensor:
    """Return a weight [...] in the type that `--dtype` names; refuse NaN and infinity, as the trainer does."""
    converted = weight if dtype is None else weight.to(DTYPES[dtype])
    if not are_finite([converted]).item():
        remedy = f"do without --dtype {dtype}" if are_finite([weight]).item() else "convert another"
        raise NumbersError(f"--load has NaN or infinity in weight {name}: {remedy}")
    return converted


def export_megatron(
    directory: Path, output: Path, *, dtype: str | None = None, progress: Progress = no_progress
) -> Path:
    """Write the weights of a checkpoint as one of Megatron-LM, in its format `torch_dist`, and return its directory.

    Args:
        dtype: type of the weights; None as they were saved.
    """
    info = checkpoint_info(directory).of_gpt(directory)
    model = ModelConfig(**info.model)
    if model.num_experts is not None:
        raise ConfigError(
            f"--load {directory} has experts, and only dense models are written in the format of Megatron-LM: convert "
            "it to-huggingface"
        )
    check_expressible(MEGATRON, model)
    layers = _verified_layers(directory, info, model, dtype, progress)
    iteration = output / (f"iter_{info.iteration:07d}" if info.iteration else MEGATRON_RELEASE)
    iteration.mkdir(parents=True)
    writer, rows = DistributedWriter(iteration, model), model.padded_vocab_size()
    # The rows that pad the vocabulary belong to the tensors there.
    padded = replace(model, vocab_size=rows)
    for index, layer in layers:
        writer.write(split_layer(rules_of(padded, MEGATRON, index), layer))
    sizes = {"padded_vocab_size": rows, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    samples = {"consumed_train_samples": info.consumed_samples, "iteration": info.iteration}
    writer.finish(Namespace(**MEGATRON.write(model), **sizes, **samples), info.iteration)
    return iteration


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n")
