"""All families, and the one that a file or a model belongs to; the tokenizer of a folder of Hugging Face."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families import hybrids, latent, layernorm, llama, mixtures, sigmoid_mixtures
from megatron_terapipe.huggingface.families.family import Family, check_expressible
from megatron_terapipe.huggingface.families.settings import CONFIG_FILE, WORD, SettingsFile

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for module in (layernorm, llama, mixtures, latent, sigmoid_mixtures, hybrids)
        for family in vars(module).values()
        if isinstance(family, Family)
    }
)
"""By the `model_type` of their `config.json`. A model that several can express is written as the one defined first."""


_SAME = {"kimi_k2": "deepseek_v3"}
"""Families by other names of theirs, which transformers does not have."""

_INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Types whose attention reads only the keys that an indexer chooses among all earlier ones."""


def read_model(path: str | Path, flag: str) -> tuple[Family, ModelConfig]:
    """Return the family and the model of a `config.json`; its sequences are as long as it has positions."""
    family, file = _read(path, flag)
    return family, family.read(file)


def read_fields(path: str | Path, flag: str) -> tuple[str, dict[str, Any]]:
    """Return the family and the fields of the model section that a `config.json` sets, without a sequence length."""
    family, file = _read(path, flag)
    family.read(file)
    return family.name, family.fields(file)


def _read(path: str | Path, flag: str) -> tuple[Family, SettingsFile]:
    file = SettingsFile.read(path, flag)
    return family_named(file.value("model_type", WORD), file.where), file


def is_model_folder(path: str | Path) -> bool:
    """Whether a folder holds a model of Hugging Face, and so a `config.json`."""
    return (Path(path) / CONFIG_FILE).is_file()


def family_named(name: str, where: str) -> Family:
    """Return a family by its `model_type`."""
    name = _SAME.get(name, name)
    if name in _INDEXED:
        raise ConfigError(
            f"{where} is a model of type {name}, whose attention chooses its keys by an indexer: train it as layers of "
            "your own (docs/how-to/own-models.md)"
        )
    if name not in FAMILIES:
        raise ConfigError(
            f"{where} is a model of type {name}, which is none of the {len(FAMILIES)} families of "
            "docs/how-to/huggingface.md: train it as layers of your own (docs/how-to/own-models.md), a class "
            "of transformers by examples/pretrain_huggingface_model.py, which checks whether it can"
        )
    return FAMILIES[name]


def family_of(model: ModelConfig, origin: str | None = None) -> Family:
    """Return the family that a model began with, or else the first that can express it; a `ConfigError` if none can."""
    if origin in FAMILIES and not _number_of_differences(FAMILIES[origin], model):
        return FAMILIES[origin]
    differences = {family.name: _number_of_differences(family, model) for family in FAMILIES.values()}
    nearest = FAMILIES[min(differences, key=lambda name: differences[name])]
    check_expressible(nearest, model)
    return nearest


def _number_of_differences(family: Family, model: ModelConfig) -> float:
    try:
        return len(family.differences(model))
    except ConfigError:  # The written file is not a valid model.
        return float("inf")


SETTINGS_FILE = "tokenizer_config.json"
FILES: Mapping[str, Mapping[str, str]] = {
    "HuggingFaceTokenizer": {"tokenizer_model": "tokenizer.json"},
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
}
"""Files of a folder by type of tokenizer and by their fields in our settings; the first type that is there counts."""

_GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")


def tokenizer_of(directory: Path) -> dict[str, str]:
    """Return the tokenizer of a model's folder, as fields of the data section; empty if there is no known one.

    A vocabulary with merges is GPT-2's unless `tokenizer_class` is another one: Qwen has such files, and splits
    text in another way.
    """
    for kind, names in FILES.items():
        files = {field: directory / name for field, name in names.items()}
        if all(file.is_file() for file in files.values()):
            if kind != "GPT2BPETokenizer" or _tokenizer_class(directory) in _GPT2_CLASSES:
                return {"tokenizer_type": kind, **{field: str(file) for field, file in files.items()}}
    return {}


def _tokenizer_class(directory: Path) -> str | None:
    """The class that the settings of a tokenizer name; None if they name none."""
    path = directory / SETTINGS_FILE
    settings = read_json(str(path), "--load", unbounded=True) if path.is_file() else {}
    return settings.get("tokenizer_class") if isinstance(settings, Mapping) else None
