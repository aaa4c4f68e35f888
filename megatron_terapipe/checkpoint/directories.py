"""The directory of a checkpoint. Needs no torch, so that flags can use it."""

from pathlib import Path

from megatron_terapipe.checkpoint.file_names import LATEST
from megatron_terapipe.checkpoint.info import RUN_FILE
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.families.registry import is_model_folder


def latest_checkpoint(load: str | Path) -> Path | None:
    """Directory of the newest whole checkpoint, or None if there is none.

    Raises:
        CheckpointError: if it is no directory, or `latest` names one that is gone.
    """
    if Path(load).exists() and not Path(load).is_dir():
        raise CheckpointError(f"--load {load} is a file: give the directory that a run saved to")
    latest = Path(load) / LATEST
    if not latest.exists():
        return None
    directory = Path(load) / latest.read_text().strip()
    if not directory.is_dir():
        raise CheckpointError(f"{latest} names {directory.name}, which is not there: write an existing tag into it")
    return directory


def names_model_folder(load: str | Path) -> bool:
    """Whether `--load` names a folder of Hugging Face, and not a directory of checkpoints of ours."""
    return is_model_folder(load) and latest_checkpoint(load) is None


def tagged_checkpoint(load: str | Path, tag: str | None) -> Path | None:
    """Directory of the checkpoint with a tag, or of the newest whole one.

    Args:
        load: directory that runs saved to.
        tag: name of the checkpoint; None for the newest.

    Raises:
        CheckpointError: if there is none of that tag.
    """
    if tag is None:
        return latest_checkpoint(load)
    directory = Path(load) / tag
    if not directory.is_dir():
        found = sorted(path.parent.name for path in Path(load).glob(f"*/{RUN_FILE}")) or ["none"]
        raise CheckpointError(f"there is no checkpoint {tag} in {load}: name one that is there ({', '.join(found)})")
    return directory


def existing_checkpoint(load: str | Path, tag: str | None) -> Path:
    """Directory of the checkpoint with a tag, or of the newest whole one, where there must be one.

    Args:
        load: directory that runs saved to.
        tag: name of the checkpoint; None for the newest.

    Raises:
        CheckpointError: if there is none.
    """
    directory = tagged_checkpoint(load, tag)
    if directory is None:
        raise CheckpointError(f"--load {load} holds no checkpoint: give a directory that a run saved to")
    return directory
