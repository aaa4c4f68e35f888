"""Where a model comes from, if not from flags: a preset, a `config.json`, a checkpoint, a folder of Hugging Face."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_terapipe.checkpoint.directories import latest_checkpoint, no_checkpoint, readable_checkpoint
from megatron_terapipe.config.fields.options import flag
from megatron_terapipe.config.files.checkpoint import CheckpointConfig
from megatron_terapipe.config.presets import MODEL_PRESETS, find_preset
from megatron_terapipe.errors import CheckpointError, ConfigError
from megatron_terapipe.huggingface.families.registry import is_model_folder, read_fields
from megatron_terapipe.huggingface.families.settings_file import CONFIG_FILE
from megatron_terapipe.huggingface.tokenizer_files import tokenizer_of


def preset_settings(name_or_path: str) -> Mapping[str, Any]:
    """Return the fields of the model section that `--model-preset` stands for.

    Args:
        name_or_path: a name of the list, or a `config.json` of Hugging Face, or the folder that holds it.

    Raises:
        UserError: if it is neither, or our models cannot be such a model.
    """
    if name_or_path not in MODEL_PRESETS and ("/" in name_or_path or Path(name_or_path).exists()):
        if not Path(name_or_path).exists() and not name_or_path.endswith(".json"):
            raise ConfigError(
                f"--model-preset {name_or_path} is not here, and nothing is downloaded: download {CONFIG_FILE} of the "
                "model, and give its path"
            )
        return read_fields(name_or_path, "--model-preset")
    return find_preset(name_or_path).settings


def take_model_from_checkpoint(given: dict[str, Any]) -> None:
    """Fill in the model section. Where a flag says otherwise, the checkpoint is held against it when it is loaded."""
    checkpoint = CheckpointConfig(
        **{each.name: given[each.name] for each in fields(CheckpointConfig) if each.name in given}
    )
    found = readable_checkpoint(str(checkpoint.load), checkpoint.tag, or_previous=checkpoint.load_previous_if_damaged)
    if found is None:
        raise CheckpointError(no_checkpoint(str(checkpoint.load)))
    _, info = found
    if given.get("tokenizer_type") == "NullTokenizer" and info.tokenizer.get("vocab_size"):
        # Of the model it counts the end of a document, too.
        given.setdefault("vocab_size", info.tokenizer["vocab_size"])
    # A model that was imported has as many positions as it can process, and nobody chose to train on so many.
    left_out = () if info.was_trained else ("seq_length",)
    _fill_in(given, {name: value for name, value in info.model.items() if name not in left_out})


def _fill_in(given: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Take settings of a model that no flag says; but for those that follow from a scaling of rotations by flags."""
    scaled = given.keys() & {"rotary_scaling", "rotary_scaling_factor"}
    follow = {"rotary_attention_factor"} if scaled else set()
    if given.get("rotary_scaling", "longrope") != "longrope":
        follow |= {"rotary_short_factors", "rotary_long_factors"}
    if scaled and settings.get("rotary_scaling") == "none":
        follow |= {"rotary_scaling", "rotary_scaling_factor"}
    for name, value in settings.items():
        if name not in follow:
            given.setdefault(name, value)


def how_to_load_a_model(load: str) -> str:
    """Return how a run gets its model from `--load`, for a command line that gives no sizes of a model.

    Args:
        load: the directory, which is no folder of Hugging Face.
    """
    if latest_checkpoint(load) is not None:
        return f"--use-checkpoint-args takes the model from --load {load}"
    return (
        f"--load {load} holds no model: neither a checkpoint, nor {CONFIG_FILE} and weights of Hugging Face, which are "
        "not downloaded here"
    )


def take_model_folder(given: dict[str, Any]) -> None:
    """Begin with the model of the folder that `--load` names: its settings, its tokenizer, its weights alone.

    A run that has saved checkpoints already goes on from the newest, so that the same command starts it and starts it
    again; the folder then says what the model is, and the checkpoint is held against that.

    Raises:
        UserError: if the folder cannot be read, our models cannot be such a model, or other flags do not fit.
    """
    load, save = str(given["load"]), given.get("save")
    for name in ("load_tag", "ckpt_step"):
        if given.get(name) is not None:
            raise ConfigError(
                f"{flag(name)} {given[name]} names a checkpoint, and --load {load} is a model of Hugging Face: drop it"
            )
    if save is not None and is_model_folder(save):
        raise ConfigError(f"--save {save} holds a model of Hugging Face: name another directory for checkpoints")
    _fill_in(given, read_fields(load, "--load"))
    if not any(given.get(name) for name in ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")):
        _take_tokenizer(given, Path(load))
    given.pop("use_checkpoint_args", None)
    resumed = save is not None and latest_checkpoint(save) is not None
    given["load"], given["finetune"] = (save, False) if resumed else (load, True)


def _take_tokenizer(given: dict[str, Any], folder: Path) -> None:
    found = tokenizer_of(folder)
    if not found and not given.get("mock_data"):
        raise ConfigError(f"--load {folder} has no tokenizer that is known here: add --tokenizer-type and its files")
    given.update(found)
