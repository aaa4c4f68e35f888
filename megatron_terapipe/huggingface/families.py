"""The families of models that can be converted."""

from collections.abc import Mapping
from types import MappingProxyType

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.family import Family, check_requirements
from megatron_terapipe.huggingface.gpt2 import GPT2
from megatron_terapipe.huggingface.llama import Llama

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in (GPT2(), Llama())})
"""By the `model_type` of their `config.json`."""


def family_of(model: ModelConfig) -> Family:
    """The family that a model of ours belongs to.

    Raises:
        ConfigError: if it belongs to none, saying why not to the one that it is nearest to.
    """
    # Ties go to the first; so one that differs from both in one thing is said to be no GPT-2.
    nearest = min(FAMILIES.values(), key=lambda family: sum(not each.met for each in family.requirements(model)))
    check_requirements(nearest.name, nearest.requirements(model))
    return nearest


def family_named(model_type: object) -> Family:
    """The family of a `config.json`.

    Raises:
        ConfigError: if it is none that we know.
    """
    if model_type not in FAMILIES:
        raise ConfigError(f"config.json has model_type {model_type}: convert one of {', '.join(FAMILIES)}")
    return FAMILIES[str(model_type)]
