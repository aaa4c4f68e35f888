"""Files of a tokenizer in Hugging Face's format, and its name in our settings."""

from collections.abc import Mapping
from pathlib import Path

from megatron_terapipe.config.parsing import read_json

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
