"""The section that says what is saved, and what a run goes on from."""

from dataclasses import dataclass

from megatron_terapipe.config.options import check_positive, option
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints.

    Raises:
        ConfigError: if a flag has no effect without another that is not given.
    """

    save: str | None = option(None, metavar="DIR")
    """Directory to save checkpoints in, at the end and every `--save-interval`."""

    load: str | None = option(None, metavar="DIR")
    """Directory to continue from. If it holds no checkpoint, training starts afresh."""

    save_interval: int | None = None
    """Iterations between checkpoints. Left out, only the end is saved."""

    finetune: bool = False
    """Load the weights alone, and start at iteration 0."""

    no_load_optim: bool = False
    """Do not load the state of the optimizer."""

    no_load_rng: bool = False
    """Do not load the state of the random generators."""

    exit_on_missing_checkpoint: bool = False
    """Fail if `--load` holds no checkpoint."""

    def __post_init__(self) -> None:
        """Check the flags that need another."""
        check_positive(self, "save_interval")
        if self.save_interval is not None and self.save is None:
            raise ConfigError(f"--save-interval {self.save_interval} does not say where to save: add --save")
        if self.load is None:
            for name in ("finetune", "exit_on_missing_checkpoint"):
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} has nothing to load: add --load, or drop it")
