"""Files of a tokenizer in Hugging Face's format, and its name in our settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile

from megatron_terapipe.config.parsing import read_json

SETTINGS_FILE = "tokenizer_config.json"
FILES: Mapping[str, Mapping[str, str]] = {
    "HuggingFaceTokenizer": {"tokenizer_model": "tokenizer.json"},
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
}
"""Files of a folder by type of tokenizer and by their fields in our settings; the first type that is there counts."""

_GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")


def export_tokenizer(settings: Mapping[str, str | None], output: Path) -> list[str]:
    """Copy the files of a tokenizer, if it has any and they are there, and return their names in the output."""
    kind = settings.get("tokenizer_type")
    sources = {name: Path(str(settings[field])) for field, name in FILES.get(kind or "", {}).items()}
    if kind == "HuggingFaceTokenizer":
        ((name, model),) = sources.items()
        file = model / name if model.is_dir() else model
        sources = {name: file, SETTINGS_FILE: file.with_name(SETTINGS_FILE)}
    copied = [name for name, source in sources.items() if _copied(source, output / name)]
    if kind == "GPT2BPETokenizer":
        if len(copied) < len(sources):
            return []
        (output / SETTINGS_FILE).write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}, indent=2) + "\n")
        copied.append(SETTINGS_FILE)
    return copied


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


def import_tokenizer(directory: Path, output: Path) -> dict[str, str | None]:
    """Copy the files of the tokenizer of a directory, and return a checkpoint's settings of it; empty for none."""
    found = tokenizer_of(directory)
    if not found:
        return {}
    files = {field: Path(path).name for field, path in found.items() if field != "tokenizer_type"}
    output.mkdir(parents=True, exist_ok=True)
    for name in (*files.values(), SETTINGS_FILE):
        _copied(directory / name, output / name)
    paths = {field: str((output / name).absolute()) for field, name in files.items()}
    return {**found, **dict.fromkeys(("vocab_file", "merge_file", "tokenizer_model")), **paths}


def _tokenizer_class(directory: Path) -> str | None:
    """The class that the settings of a tokenizer name; None if they name none."""
    path = directory / SETTINGS_FILE
    settings = read_json(str(path), "--load", unbounded=True) if path.is_file() else {}
    return settings.get("tokenizer_class") if isinstance(settings, Mapping) else None


def _copied(source: Path, target: Path) -> bool:
    if not source.is_file():
        return False
    copyfile(source, target)
    return True
