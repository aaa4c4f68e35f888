"""The section of checkpoints: when they are saved, and the one that a run continues from."""

from dataclasses import dataclass

from megatron_terapipe.config.options import check, option
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = option(None, metavar="DIR")
    """Directory to save checkpoints in, at the end and every `--save-interval`."""

    load: str | None = option(None, metavar="DIR")
    """Directory to continue from, of this trainer or of Megatron-LM. If it holds no checkpoint, training starts from
    the beginning. It may be a folder of Hugging Face with config.json and safetensors: the model, its weights and,
    unless flags name another, its tokenizer are then taken from there, and training starts at iteration 0. From both,
    a run that has saved to `--save` continues from the newest checkpoint there."""

    save_interval: int | None = option(None, aliases=("--persistent-save-interval",), least=1, most=10**9)
    """Iterations between checkpoints in `--save`. Default: only the end is saved."""

    extra_save_iterations: tuple[int, ...] | None = option(None, metavar="N", needs=("save",), least=0, most=10**9)
    """More iterations after which a checkpoint is saved; 0 is the start of training, with the initial weights."""

    keep_last_n_checkpoints: int | None = option(None, needs=("save",), least=1, most=10**9)
    """Number of newest whole checkpoints to keep. Default: all."""

    async_save: bool = option(False, needs=("save",))
    """Continue training as soon as a checkpoint is copied to the host's memory. It is written, synced and named in
    the background, one at a time; the end of the run waits for the last."""

    train_on_if_save_fails: bool = option(False, needs=("save",))
    """Continue training when a checkpoint cannot be saved, with a warning. Default: the run ends. A failure to save the
    last checkpoint always ends it with an error."""

    no_verify_checkpoint: bool = option(False, needs=("load",))
    """Do not read a checkpoint once more to compare each file with its checksum. Names and sizes are checked in any
    case."""

    load_previous_if_damaged: bool = option(False, needs=("load",))
    """If the checkpoint to load is damaged, continue from the newest before it that is whole. The damaged one is kept
    aside."""

    load_tag: str | None = option(None, metavar="TAG", needs=("load",))
    """Checkpoint to load from `--load`, such as `global_step100`. Default: the newest."""

    ckpt_step: int | None = option(None, needs=("load",), excludes=("load_tag",), least=1, most=10**9)
    """Iteration whose checkpoint to load, instead of `--load-tag`."""

    use_checkpoint_args: bool = option(False, needs=("load",), aliases=("--use-checkpoint-shape",))
    """Take the model from the checkpoint instead of from flags. Flags may still change settings that no weight shape
    depends on."""

    finetune: bool = option(False, needs=("load",))
    """Load only the weights, and start at iteration 0."""

    extend_positions: bool = option(False, needs=("load",))
    """Let the flags of rotations (`--rotary-base`, `--rotary-scaling` and those with it) differ from the model of
    `--load`, to train on with longer sequences. Only weights can be loaded so: with `--finetune`, or from a folder of
    Hugging Face."""

    no_load_optim: bool = False
    """Do not load the optimizer state."""

    no_save_optim: bool = False
    """Do not save the optimizer state. Such a checkpoint loads with `--finetune` or `--no-load-optim`."""

    exit_on_missing_checkpoint: bool = option(False, needs=("load",))
    """Fail if `--load` holds no checkpoint."""

    def __post_init__(self) -> None:
        check(self)
        if self.extra_save_iterations == ():
            raise ConfigError("--extra-save-iterations (empty) is not a list of iterations: give numbers from 0 on")

    def saves_after(self, iteration: int) -> bool:
        """Whether a checkpoint is due when so many iterations are done; the last one of a run always is."""
        if iteration in (self.extra_save_iterations or ()):
            return True
        return iteration > 0 and self.save_interval is not None and iteration % self.save_interval == 0

    @property
    def weights_only(self) -> bool:
        """Whether the optimizer state is not loaded."""
        return self.finetune or self.no_load_optim

    @property
    def tag(self) -> str | None:
        """Checkpoint to load; None for the newest."""
        return self.load_tag if self.ckpt_step is None else checkpoint_tag(self.ckpt_step)


def checkpoint_tag(iteration: int) -> str:
    """Name of the checkpoint of an iteration."""
    return f"global_step{iteration}"
