"""Recovery of a run: what it prints and keeps when a rank is lost, and how a restarted run resumes.

Imported before torch: a launcher that dies while torch loads is noticed, too. `torchrun --max-restarts N` starts the
same command again when a rank has died. What the command loads at its first start need not be what it has saved since,
so the flags are read differently then.
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
"""Variable with which torchrun makes a new store for every start. One store for all keeps addresses of the last."""


def after_restart(config: CheckpointConfig, environment: Mapping[str, str] = os.environ) -> CheckpointConfig:
    """Return the section of a run that its launcher may start again, or has."""
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
        raise ConfigError(f"--max-restarts {restarts} has no checkpoints to go on from: add --save, or drop it")
    if hosts > 1 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise ConfigError(
            f"--max-restarts {restarts} on {hosts} hosts: ranks that are started again would find old addresses of "
            f"each other: start torchrun with --rdzv-backend c10d and the variable {OWN_STORE}=1"
        )
    saved = latest_checkpoint(config.save)
    if saved is None or (config.load is not None and names_model_folder(config.load)) or _goes_on(config, saved):
        return config
    # On several hosts the launchers of some may not count a start that another's failure brought about.
    if restart == 0 or hosts > 1:
        raise ConfigError(
            f"--save {config.save} holds {saved.name}, from which this run does not go on, and after a restart it "
            f"would be taken for the run's own: add --load {config.save}, or save in an empty directory"
        )
    return replace(config, load=config.save, load_tag=None, ckpt_step=None, finetune=False, no_load_optim=False)


def _goes_on(config: CheckpointConfig, saved: Path) -> bool:
    """Whether the flags say to go on from the newest checkpoint of this run, whatever it is."""
    if config.load is None or config.save is None or Path(config.load).resolve() != Path(config.save).resolve():
        return False
    return not config.weights_only and config.tag in (None, saved.name)


class LostRank(Exception):
    """The end of this rank because another one is gone, which has been said."""


def watch_over(
    launch: LaunchEnvironment, config: Config, ending: Callable[[str, bool], object] = lambda why, failed: None
) -> RankWatch:
    """Return the watch of this rank. Call it before torch is imported.

    Args:
        ending: told why the run ends, and whether something is wrong, before this process leaves at once; by the first
            rank, or one that speaks for it.
    """
    # Read when torch is imported. Torch's store would print a stack of its own wherever its keeper is gone.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return watch_rank(launch, remedy=lambda: remedy(config.checkpoint.save), ending=ending)


def remedy(save: str | None) -> str:
    """Return what a user can do once a run has died."""
    try:
        found = None if save is None else latest_checkpoint(save)
    except CheckpointError:
        return f"see to the checkpoints in {save}, and resume with --load {save}"
    if found is None:
        return "no checkpoint was saved, so start again"
    return f"resume with --load {save}, which goes on from {found.name}"


def keep_traceback(error: BaseException, directory: Path, rank: int) -> None:
    """Write the traceback of an error beside the ledgers, where it is read by those who look for more than one line."""
    directory.mkdir(parents=True, exist_ok=True)
    text = "".join(traceback.format_exception(error))
    (directory / f"traceback_rank{rank}.txt").write_text(text, encoding="utf-8")
