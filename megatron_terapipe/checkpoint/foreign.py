"""Checkpoints of other trainers, recognised by the names of their files; only Megatron-LM's are read."""

import re
from pathlib import Path

from deepspeed_ext.plan.text_files import bounded_text
from megatron_terapipe.checkpoint.info import RUN_FILE
from megatron_terapipe.checkpoint.manifest import ASIDE, MANIFEST_FILE
from megatron_terapipe.errors import CheckpointError

MEGATRON = "Megatron-LM"
MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
MEGATRON_RELEASE = "release"
"""Directory of a model at iteration 0, and the content of that file: Megatron-LM refuses the number 0."""
MEGATRON_COMMON_FILE, MEGATRON_RANK_FILE = "common.pt", "model_optim_rng.pt"
"""Files with the arguments of a run: of its format torch_dist, and of each rank in its format torch."""
_MEGATRON_FILES = (f"mp_rank_*/{MEGATRON_RANK_FILE}", MEGATRON_COMMON_FILE)
ORIGINS = {
    "DeepSpeed's universal format": ("latest_universal", "zero/*/fp32.pt", "*/zero/*/fp32.pt"),
    "GPT-NeoX": ("*/configs/*.yml", "configs/*.yml"),
    "Megatron-DeepSpeed": ("*/mp_rank_*_model_states.pt", "mp_rank_*_model_states.pt"),
    MEGATRON: (MEGATRON_LATEST, *_MEGATRON_FILES, *(f"iter_*/{file}" for file in _MEGATRON_FILES)),
    "nanotron": ("*/checkpoint_metadata.json", "checkpoint_metadata.json"),
    "torchtitan": ("step-*/.metadata", ".metadata"),
}
"""Files by the trainer that writes them, in a directory of its checkpoints or in one checkpoint. The first that match
decide: Megatron-DeepSpeed writes a file of Megatron-LM, too, and GPT-NeoX writes DeepSpeed's files."""
_LONGEST = 40
"""Bytes of the file with the newest iteration."""


def foreign_origin(directory: str | Path) -> str | None:
    """Return the trainer whose checkpoints are in a directory; None if they are ours, or if there are none."""
    path = Path(directory)
    if any(path.glob(f"global_step*{ASIDE}")):  # The first save, which is being written, or was when its run died.
        return None
    if any(any(path.glob(each)) for name in (RUN_FILE, MANIFEST_FILE) for each in (name, f"*/{name}")):
        return None
    return next((name for name, files in ORIGINS.items() if any(any(path.glob(file)) for file in files)), None)


def refuse_foreign(flag: str, directory: str | Path) -> str | None:
    """Refuse a directory with checkpoints of another trainer, given by a flag; return the origin of `--load`.

    A run would start from new weights, and its file `latest` would replace theirs. `--load` takes Megatron-LM's.
    """
    origin = foreign_origin(directory)
    if origin is None or (flag == "--load" and origin == MEGATRON):
        return origin
    if flag == "--save":
        raise CheckpointError(f"--save {directory} holds checkpoints of {origin}: name another directory")
    raise CheckpointError(
        f"{flag} {directory} holds checkpoints of {origin}, which are not read here: export it to a folder of Hugging "
        "Face, and load that"
    )


def is_megatron(directory: Path) -> bool:
    """Whether a directory is one checkpoint of Megatron-LM. Our own are not listed, since many ranks call it."""
    if not re.fullmatch(rf"iter_\d{{1,18}}|{MEGATRON_RELEASE}", directory.name):
        return False
    return (directory / ".metadata").exists() or any(any(directory.glob(file)) for file in _MEGATRON_FILES)


def megatron_checkpoint(load: str | Path, tag: str | None) -> Path:
    """Return the directory of a checkpoint of Megatron-LM, in a directory of its checkpoints.

    Args:
        tag: its directory or, as here, `global_step` and the iteration; None for the newest.
    """
    path = Path(load)
    if is_megatron(path) and tag is None:
        return path
    if tag is None:
        try:
            tag = bounded_text(path / MEGATRON_LATEST, _LONGEST).strip()
        except (OSError, ValueError):
            tag = max((each.name for each in path.glob("iter_*")), default="")
    number = re.fullmatch(r"(?:global_step|iter_)?(\d{1,18})", tag)
    directory = path / (f"iter_{int(number[1]):07d}" if number else tag)
    if directory.parent != path or not is_megatron(directory):
        found = sorted(each.name for each in path.iterdir() if is_megatron(each)) or ["none"]
        raise CheckpointError(
            f"there is no checkpoint {directory.name} of Megatron-LM in {load}: name one that is there "
            f"({', '.join(found)}) with --load-tag"
        )
    return directory
