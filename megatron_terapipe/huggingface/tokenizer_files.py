"""Files of a tokenizer in Hugging Face's format, and its name in our settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile

GPT2_FILES = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
HUGGING_FACE_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
SENTENCE_PIECE_FILE = "tokenizer.model"


def export_tokenizer(settings: Mapping[str, str | None], output: Path) -> list[str]:
    """Copy the files of a tokenizer under the names they have there.

    Args:
        settings: tokenizer settings of the checkpoint.
        output: directory to copy to.

    Returns:
        Names of the files written; none if the tokenizer has no files, or they are gone.
    """
    kind = settings.get("tokenizer_type")
    if kind == "GPT2BPETokenizer":
        copied = [_copied(Path(str(settings[field])), output / name) for field, name in GPT2_FILES.items()]
        if all(copied):
            (output / SETTINGS_FILE).write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}, indent=2) + "\n")
            return [*GPT2_FILES.values(), SETTINGS_FILE]
        return []
    model = Path(str(settings.get("tokenizer_model")))
    if kind == "HuggingFaceTokenizer":
        folder = model if model.is_dir() else model.parent
        file = model / HUGGING_FACE_FILE if model.is_dir() else model
        pairs = [(file, HUGGING_FACE_FILE), (folder / SETTINGS_FILE, SETTINGS_FILE)]
        return [name for source, name in pairs if _copied(source, output / name)]
    if kind == "SentencePieceTokenizer":
        return [SENTENCE_PIECE_FILE] if _copied(model, output / SENTENCE_PIECE_FILE) else []
    return []


def import_tokenizer(directory: Path, output: Path) -> dict[str, str | None]:
    """Copy the files of the tokenizer of a directory.

    Args:
        directory: directory of a model there.
        output: directory to copy to, made if there is something to copy.

    Returns:
        What a checkpoint says of its tokenizer; empty if there is none that we know.
    """
    files: dict[str, str]
    if all((directory / name).is_file() for name in GPT2_FILES.values()):
        kind, files = "GPT2BPETokenizer", dict(GPT2_FILES)
    elif (directory / HUGGING_FACE_FILE).is_file():
        kind, files = "HuggingFaceTokenizer", {"tokenizer_model": HUGGING_FACE_FILE}
    elif (directory / SENTENCE_PIECE_FILE).is_file():
        kind, files = "SentencePieceTokenizer", {"tokenizer_model": SENTENCE_PIECE_FILE}
    else:
        return {}
    output.mkdir(parents=True, exist_ok=True)
    for name in (*files.values(), SETTINGS_FILE):
        _copied(directory / name, output / name)
    paths = {field: str((output / name).absolute()) for field, name in files.items()}
    return {"tokenizer_type": kind, **dict.fromkeys(("vocab_file", "merge_file", "tokenizer_model")), **paths}


def _copied(source: Path, target: Path) -> bool:
    if not source.is_file():
        return False
    copyfile(source, target)
    return True
