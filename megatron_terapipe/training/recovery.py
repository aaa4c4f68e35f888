"""Recovery of a run: remedies and tracebacks after the loss of a rank, and the checkpoint of a restarted run.

Imported before torch, so that the death of a launcher is detected also while torch loads. `torchrun --max-restarts N`
starts the same command again when a rank has died. Its `--load` may then be older than its own checkpoints in `--save`,
so a restarted run loads the latter.
"""

import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from deepspeed_ext.runtime.health.rank_watch import RankWatch, watch_rank
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.checkpoint.directories import latest_checkpoint, names_model_folder
from megatron_terapipe.config import CheckpointConfig, Config
from megatron_terapipe.errors import CheckpointError, ConfigError

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable with which torchrun makes a new store for every start. A shared store has addresses of the last start."""


def after_restart(config: CheckpointConfig, environment: Mapping[str, str] = os.environ) -> CheckpointConfig:
    """Return the section of a run, changed if the launcher has started the run again."""
    restarts, restart, hosts = (
        int(environment.get(name, least))
        for name, least in (
            ("TORCHELASTIC_MAX_RESTARTS", 0),
            ("TORCHELASTIC_RESTART_COUNT", 0),
            ("GROUP_WORLD_SIZE", 1),
        )
    )
    if restarts == 0:
        return config
    if config.save is None:
        raise ConfigError(f"--max-restarts {restarts} has no checkpoints to resume from: add --save, or drop it")
    if hosts > 1 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise ConfigError(
            f"--max-restarts {restarts} on {hosts} hosts: ranks that are started again would find old addresses of "
            f"each other: start torchrun with --rdzv-backend c10d and the variable {OWN_STORE}=1"
        )
    saved = latest_checkpoint(config.save)
    if saved is None or (config.load is not None and names_model_folder(config.load)) or _resumes(config, saved):
        return config
    # On several hosts a launcher may not count a start that a failure on another host caused.
    if restart == 0 or hosts > 1:
        raise ConfigError(
            f"--save {config.save} has {saved.name} of another run, from which a restart of this run would resume: add "
            f"--load {config.save}, or save in an empty directory"
        )
    return replace(config, load=config.save, load_tag=None, ckpt_step=None, finetune=False, no_load_optim=False)


def _resumes(config: CheckpointConfig, saved: Path) -> bool:
    """Whether the flags resume the run from its own newest checkpoint."""
    if config.load is None or config.save is None or Path(config.load).resolve() != Path(config.save).resolve():
        return False
    return not config.weights_only and config.tag in (None, saved.name)


class LostRank(Exception):
    """The end of this rank because another one has died, which has been printed."""


def watch_over(
    launch: LaunchEnvironment, config: Config, ending: Callable[[str, bool], object] = lambda why, failed: None
) -> RankWatch:
    """Return the watch of this rank. Call it before torch is imported.

    Args:
        ending: called with the reason of the end of the run, and whether it is a failure, before this process exits; on
            the first rank, or another one in its place.
    """
    # Read when torch is imported. Torch's store would print a stack when the rank with the store has died.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return watch_rank(launch, remedy=lambda: remedy(config.checkpoint.save), ending=ending)


def remedy(save: str | None) -> str:
    """Return the remedy of a run that died, for its error."""
    try:
        found = None if save is None else latest_checkpoint(save)
    except CheckpointError:
        return f"check the checkpoints in {save}, and resume with --load {save}"
    if found is None:
        return "no checkpoint was saved, so start again"
    return f"resume with --load {save}, from {found.name}"


def keep_traceback(error: BaseException, directory: Path, rank: int) -> None:
    """Write the traceback of an error into the directory of the ledgers."""
    directory.mkdir(parents=True, exist_ok=True)
    text = "".join(traceback.format_exception(error))
    (directory / f"traceback_rank{rank}.txt").write_text(text, encoding="utf-8")
