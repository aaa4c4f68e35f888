"""A run that torch's elastic launcher starts again goes on from its own last checkpoint.

`torchrun --max-restarts N` starts the same command again when a rank has died. What the command loads at its first
start need not be what it has saved since, so the flags are read differently then.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron_terapipe.checkpoint.directories import latest_checkpoint, names_model_folder
from megatron_terapipe.config import CheckpointConfig
from megatron_terapipe.errors import ConfigError

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable with which torchrun makes a new store for every start. One store for all keeps addresses of the last."""


def going_on(config: CheckpointConfig, environment: Mapping[str, str] = os.environ) -> CheckpointConfig:
    """Return the section of a run that its launcher may start again, or has.

    Raises:
        ConfigError: if it could not go on from its own checkpoints, and from those alone.
    """
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
