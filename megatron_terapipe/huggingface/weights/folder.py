"""The weights of a folder of Hugging Face, each read as one of ours."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.families.family import Family
from megatron_terapipe.huggingface.weights.layer_rules import layer_rules
from megatron_terapipe.huggingface.weights.rules import WeightRule
from megatron_terapipe.huggingface.weights.tensor_files import SavedTensors
from megatron_terapipe.model.gpt import gpt_layers, layers_with_weights


class FolderWeights:
    """The weights of a folder, each read from its files when it is asked for.

    Raises:
        CheckpointError: if a file is missing or damaged, or lacks a tensor, or has one too many.
    """

    def __init__(self, directory: Path, family: Family, model: ModelConfig) -> None:
        self._directory, self._family, self._model = directory, family, model
        self._tensors = SavedTensors(directory)
        names, tied = family.names(model), not model.untie_embeddings_and_output_weights
        weights = (name for name in self._tensors.names if names.is_weight(name, tied=tied))
        # What a tensor is called by the rules, and how it is spelled in this file.
        self._spelled = {names.canonical(name): name for name in weights}
        self._rules = lru_cache(maxsize=1)(self._rules_of_layer)

    def weight(self, index: int, name: str, tensor_parallel_rank: int = 0) -> Tensor:
        """Return a weight [...] of a pipeline layer, whole.

        Args:
            tensor_parallel_rank: 0, since nobody has cut it.

        Raises:
            CheckpointError: if a file cannot be read.
        """
        rule = self._rules(index)[name]
        return rule.join([self._tensors.read(self._spelled[theirs]) for theirs in rule.theirs])

    def layer(self, index: int) -> dict[str, Tensor]:
        """Return all weights [...] of a pipeline layer by name.

        Raises:
            CheckpointError: if a file cannot be read.
        """
        return {name: self.weight(index, name) for name in self._rules(index)}

    def check(self) -> None:
        """See that the folder has every tensor of the model, each in its shape, and no other. No tensor is read.

        Raises:
            CheckpointError: naming the first that is not so.
        """
        expected: dict[str, torch.Size] = {}
        for index in layers_with_weights(self._model):
            shapes = dict(meta_layer(self._model, index).named_parameters())
            for name, rule in self._rules(index).items():
                parts = rule.split(shapes[name])
                expected |= {theirs: part.shape for theirs, part in zip(rule.theirs, parts, strict=True)}
        for missing in sorted(expected.keys() - self._spelled.keys()):
            raise CheckpointError(
                f"{self._directory} has no tensor {missing}, which its config.json asks for: get it again"
            )
        for extra in sorted(self._spelled.keys() - expected.keys()):
            raise CheckpointError(
                f"{self._directory} has a tensor {self._spelled[extra]}, for which a {self._family.name} of its "
                "config.json has no place: this model cannot be trained here"
            )
        for name, shape in expected.items():
            found = self._tensors.shape(self._spelled[name])
            if found != tuple(shape):
                raise CheckpointError(
                    f"{self._directory} has {name} {found}, which is not the {tuple(shape)} that its config.json "
                    "describes: get it again"
                )

    def _rules_of_layer(self, index: int) -> Mapping[str, WeightRule]:
        return {rule.ours: rule for rule in rules_of(self._model, self._family, index)}


def rules_of(model: ModelConfig, family: Family, index: int) -> list[WeightRule]:
    """Return the rules of the weights of a pipeline layer."""
    parameters = (name for name, _ in meta_layer(model, index).named_parameters())
    return layer_rules(model, family.names(model), index, parameters)


def meta_layer(model: ModelConfig, index: int) -> nn.Module:
    """Return a pipeline layer of shapes alone."""
    with torch.device("meta"):
        return gpt_layers(model)[index].build()
