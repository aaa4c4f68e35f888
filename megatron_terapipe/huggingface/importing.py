"""Import files of Hugging Face as a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.save import PARTIAL, put_in_place
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.checkpoint import checkpoint_tag
from megatron_terapipe.config.json_files import read_json
from megatron_terapipe.errors import CheckpointError, ConfigError
from megatron_terapipe.huggingface.families import family_named
from megatron_terapipe.huggingface.family import Family
from megatron_terapipe.huggingface.tokenizer_files import import_tokenizer
from megatron_terapipe.huggingface.weight_files import DTYPES, SavedTensors
from megatron_terapipe.huggingface.weight_rules import WeightRule
from megatron_terapipe.inference.whole_model import WholeModel


def import_model(directory: Path, output: Path, *, dtype: str | None = None) -> Path:
    """Write a model of Hugging Face as a checkpoint at iteration 0.

    Args:
        directory: holds `config.json` and the weights as safetensors.
        output: directory of checkpoints to write to.
        dtype: type of the weights; None as they are there.

    Returns:
        Directory of the checkpoint.

    Raises:
        UserError: if a file is missing or damaged, or our models cannot be such a model.
    """
    settings = read_json(str(directory / "config.json"), "--load")
    if not isinstance(settings, Mapping):
        raise ConfigError(f"--load {directory}/config.json is not a JSON object: give a model's")
    family = family_named(settings.get("model_type"))
    model = family.model(settings)
    theirs = SavedTensors(directory)
    # What a tensor is called by the rules, and how it is spelled in this file.
    spelled = {family.canonical(name): name for name in theirs.names if not family.is_ignored(name, model)}
    _check_names(family, model, spelled, directory)
    checkpoint = output / checkpoint_tag(0)
    partial = checkpoint.with_name(checkpoint.name + PARTIAL)
    info = CheckpointInfo(
        iteration=0,
        consumed_samples=0,
        model=asdict(model),
        layout=asdict(ParallelLayout()),
        optimizer=None,
        partitioned=False,
        tokenizer=import_tokenizer(directory, output / "tokenizer"),
    )
    info.write(partial)
    with torch.device("meta"):
        layers = WholeModel(model).layers
    for index, rules in family.rules(model).items():
        expected = layers[str(index)].state_dict()
        weights = {}
        for rule in rules:
            weight = _joined(rule, [theirs.read(spelled[name]) for name in rule.theirs], expected[rule.ours].shape)
            weights[rule.ours] = weight if dtype is None else weight.to(DTYPES[dtype])
        torch.save(weights, partial / layer_file(index))
    put_in_place(partial, checkpoint)
    return checkpoint


def _check_names(family: Family, model: ModelConfig, spelled: Mapping[str, str], directory: Path) -> None:
    expected = {name for rules in family.rules(model).values() for rule in rules for name in rule.theirs}
    for missing in sorted(expected - spelled.keys()):
        raise CheckpointError(f"{directory} has no tensor {missing}, which its config.json asks for: get it again")
    for extra in sorted(spelled.keys() - expected):
        raise CheckpointError(
            f"{directory} has a tensor {spelled[extra]}, for which a {family.name} of its config.json has no place: "
            "convert another model"
        )


def _joined(rule: WeightRule, tensors: list[Tensor], expected: torch.Size) -> Tensor:
    try:
        weight = rule.join(tensors)
        fits = weight.shape == expected
    except (RuntimeError, ValueError):  # what torch raises where tensors do not go together
        fits = False
    if not fits:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(rule.theirs, tensors, strict=True))
        raise CheckpointError(f"the model has {shapes}, which is not what its config.json describes: get it again")
    return weight
