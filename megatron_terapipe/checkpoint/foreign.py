"""Checkpoints of other trainers, recognised by the names of their files."""

from pathlib import Path

from megatron_terapipe.checkpoint.info import RUN_FILE
from megatron_terapipe.checkpoint.manifest import MANIFEST_FILE
from megatron_terapipe.errors import CheckpointError

ORIGINS = {
    "DeepSpeed's universal format": ("latest_universal", "zero/*/fp32.pt", "*/zero/*/fp32.pt"),
    "GPT-NeoX": ("*/configs/*.yml", "configs/*.yml"),
    "Megatron-DeepSpeed": ("*/mp_rank_*_model_states.pt", "mp_rank_*_model_states.pt"),
    "Megatron-LM": (
        *("latest_checkpointed_iteration.txt", "iter_*/mp_rank_*/model_optim_rng.pt", "iter_*/common.pt"),
        *("mp_rank_*/model_optim_rng.pt", "common.pt"),
    ),
    "nanotron": ("*/checkpoint_metadata.json", "checkpoint_metadata.json"),
    "torchtitan": ("step-*/.metadata", ".metadata"),
}
"""Files by the trainer that writes them, in a directory of its checkpoints or in one checkpoint. The first that match
decide: Megatron-DeepSpeed writes a file of Megatron-LM, too, and GPT-NeoX those of DeepSpeed."""


def foreign_origin(directory: str | Path) -> str | None:
    """Return the trainer whose checkpoints are in a directory; None if they are ours, or if there are none."""
    path = Path(directory)
    if any(any(path.glob(each)) for name in (RUN_FILE, MANIFEST_FILE) for each in (name, f"*/{name}")):
        return None
    return next((name for name, files in ORIGINS.items() if any(any(path.glob(file)) for file in files)), None)


def refuse_foreign(flag: str, directory: str | Path) -> None:
    """Refuse a directory with checkpoints of another trainer, given by a flag.

    A run would start from new weights, and its file `latest` would replace that of the other trainer.
    """
    if (origin := foreign_origin(directory)) is not None:
        way = "name another directory" if flag == "--save" else "export it to a folder of Hugging Face, and load that"
        raise CheckpointError(f"{flag} {directory} holds checkpoints of {origin}, which are not read here: {way}")
