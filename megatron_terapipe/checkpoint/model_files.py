"""Files beside the weights of a model: its tokenizer, settings of generation, chat template, licence and card.

A checkpoint has them in a folder of its own, so that they are there where it is moved to, and an export gets them back.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.text_files import bounded_bytes
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.huggingface.families.registry import FILES, SETTINGS_FILE
from megatron_terapipe.huggingface.families.settings import CONFIG_FILE

MODEL_FILES = "model_files"
"""Folder of these files in the directory of a checkpoint."""
GENERATION_FILE = "generation_config.json"
_KEPT = {**FILES, "TikTokenizer": {"tokenizer_model": "tokenizer.tiktoken"}}
"""The same, with a type for which there is no name in folders of Hugging Face."""
_COMPANIONS = (SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files beside a `tokenizer.json` that belong to it."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""Ends of the names of weights, and of their indices."""
_MOST_BYTES = 2**26

_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of the tokens that begin and end a text, and that fill a batch."""


def files_beside(folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the files beside the weights of a folder by name, and the names of its other files that are not kept.

    Folders, unreadable files and files above 64 MiB are not kept. Weights are in neither.
    """
    found: dict[str, bytes] = {}
    left: list[str] = []
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if path.name.startswith(".") or path.name.endswith(_WEIGHTS):
            continue
        try:
            if not path.is_file():  # A pipe might never be read.
                raise ValueError
            found[path.name] = bounded_bytes(path, _MOST_BYTES)
        except (OSError, ValueError):  # The latter also of one that is larger.
            left.append(path.name)
    return found, left


def files_of_run(source: Path | None, tokenizer: Mapping[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that a run keeps in its checkpoints by name, and the names of the source's that it does not.

    With another tokenizer than the source's its files take the place of these, and ids of tokens are left out.

    Args:
        source: folder of Hugging Face or checkpoint that the run loads; None for none.
    """
    found: dict[str, bytes] = {}
    left: list[str] = []
    if source is not None:
        found, left = files_beside(source if (source / CONFIG_FILE).is_file() else source / MODEL_FILES)
    own = _files_of(tokenizer)
    if all(found.get(name) == content for name, content in own.items()):
        return found, left
    of_tokenizers = {name for names in _KEPT.values() for name in names.values()}
    of_other = found.keys() & {*of_tokenizers, *_COMPANIONS, CONFIG_FILE, GENERATION_FILE}
    kept = {name: content for name, content in found.items() if name not in of_other}
    return kept | own, [*left, *sorted(of_other)]


def _files_of(settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a tokenizer by their names in a checkpoint; empty if it has none or they are gone."""
    kind = settings.get("tokenizer_type") or ""
    sources = {name: Path(str(settings.get(field))) for field, name in _KEPT.get(kind, {}).items()}
    more: dict[str, Path] = {}
    if kind == "HuggingFaceTokenizer":
        ((name, model),) = sources.items()
        sources = {name: model / name if model.is_dir() else model}
        more = {each: sources[name].with_name(each) for each in _COMPANIONS}
    if not all(path.is_file() for path in sources.values()):
        return {}
    return {name: bounded_bytes(path) for name, path in {**more, **sources}.items() if path.is_file()}


def in_checkpoint(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return files by their paths in the directory of a checkpoint."""
    return {f"{MODEL_FILES}/{name}": content for name, content in files.items()}


def tokenizer_in(checkpoint: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint's tokenizer, with the paths of the files in the checkpoint if it has them."""
    files = _KEPT.get(settings.get("tokenizer_type") or "", {})
    kept = {field: checkpoint / MODEL_FILES / name for field, name in files.items()}
    return {**settings, **{field: str(path) for field, path in kept.items() if path.is_file()}}


def export_files(checkpoint: Path, tokenizer: Mapping[str, Any], output: Path) -> list[str]:
    """Write the files beside the weights of a checkpoint into an export, but `config.json`, and return their names."""
    found = files_beside(checkpoint / MODEL_FILES)[0] or _files_of(tokenizer)
    if CONFIG_FILE not in found and {*FILES["GPT2BPETokenizer"].values()} <= found.keys():
        found[SETTINGS_FILE] = (json.dumps({"tokenizer_class": "GPT2Tokenizer"}, indent=2) + "\n").encode()
    names = [name for name in found if name not in (CONFIG_FILE, *_KEPT["TikTokenizer"].values())]
    for name in names:
        (output / name).write_bytes(found[name])
    return names


def ids_of_ends(checkpoint: Path, family: str) -> dict[str, Any] | None:
    """Return the ids of tokens in the `config.json` that a checkpoint keeps, by key; None if it keeps none.

    A key that it leaves out has the default of its own family, and is written for another one.
    """
    path = checkpoint / MODEL_FILES / CONFIG_FILE
    contents = read_json(str(path), "--load", infinite=True, unbounded=True) if path.is_file() else None
    if not isinstance(contents, Mapping):
        return None
    return {key: contents.get(key) for key in _ENDS if key in contents or contents.get("model_type") != family}
