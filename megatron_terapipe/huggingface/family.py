"""The protocol of a family of models: its `config.json`, and the names of its weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.weight_rules import WeightRule


class Family(Protocol):
    """An architecture of Hugging Face's library."""

    name: str
    """Its name in `model_type`."""

    def requirements(self, model: ModelConfig) -> Sequence["Requirement"]:
        """Conditions under which a model of ours can be written as one of this family."""

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """Contents of `config.json`, without what says only how to sample."""

    def model(self, settings: Mapping[str, Any]) -> ModelConfig:
        """The model that `config.json` describes.

        Raises:
            ConfigError: if it asks for what our models do not have.
        """

    def rules(self, model: ModelConfig) -> Mapping[int, Sequence[WeightRule]]:
        """Rules of the weights, by our pipeline layer."""

    def is_ignored(self, tensor: str, model: ModelConfig) -> bool:
        """Whether a tensor of their file is no weight: a mask, or a copy of another one.

        Args:
            tensor: its name there.
            model: the model section.
        """

    def canonical(self, tensor: str) -> str:
        """The name that `rules` has for a tensor, which may stand there without the prefix of the whole model."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A condition that a model must meet.

    Attributes:
        met: whether it is.
        flag: flag that decides it, and its value.
        wanted: property of the family.
    """

    met: bool
    flag: str
    wanted: str


def check_requirements(family: str, requirements: Iterable[Requirement]) -> None:
    """Refuse a model that a family cannot express.

    Args:
        family: name of the family.
        requirements: its conditions.

    Raises:
        ConfigError: naming the first condition that the model does not meet.
    """
    for each in requirements:
        if not each.met:
            raise ConfigError(
                f"the model has {each.flag}, and Hugging Face's {family} has {each.wanted}: it cannot be written in "
                "their files without becoming another model, so keep it in ours"
            )


def expect(settings: Mapping[str, Any], name: str, accepted: Iterable[Any], default: Any = None) -> Any:
    """A setting of `config.json` that our models have one or a few values of.

    Args:
        settings: contents of the file.
        name: the setting.
        accepted: values that our models can have.
        default: its value where it is left out.

    Raises:
        ConfigError: if it is something else.
    """
    value = settings.get(name, default)
    accepted = tuple(accepted)
    if value not in accepted:
        choices = " or ".join(str(each) for each in accepted)
        raise ConfigError(f"config.json sets {name} to {value}, and our models have {choices}: convert another model")
    return value
