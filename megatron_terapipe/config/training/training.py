"""The section that says how long training lasts, from which seed, and what it recomputes."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_terapipe.config.fields.options import check_bounds, check_choices, option
from megatron_terapipe.errors import ConfigError

SEEDS = 2**32
"""Seeds that the generator of the samples' order can start from, Megatron's, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Training: how long, from which seed, and what to recompute.

    Raises:
        ConfigError: if a value is out of range.
    """

    train_iters: int | None = option(None, least=1, most=10**9)
    """Optimizer steps of the whole run."""

    train_samples: int | None = option(None, least=1, most=10**13)
    """Samples of the whole run, instead of `--train-iters`. Decay and warmup are then also counted in samples."""

    train_tokens: int | None = option(None, least=1, most=10**18)
    """Tokens of the whole run. Alone, it stands for `--train-samples`, tokens / `--seq-length`. Beside `--train-iters`
    or `--train-samples`, the run ends with the first iteration that reaches it, as in Megatron-DeepSpeed; the order of
    the data and the learning rate follow from the other flag."""

    seed: int = option(1234, least=0, most=SEEDS - 1)
    """Seed of the weights and of the order of the data."""

    calculate_per_token_loss: bool = False
    """Let every token of a global batch that bears loss count the same. Default: every micro-batch counts the same,
    however many of its tokens bear loss."""

    deterministic_mode: bool = False
    """Make the run repeatable to the bit on the same devices: only deterministic algorithms of torch, cuBLAS and NCCL,
    which may be slower. What has none ends the run."""

    exit_interval: int | None = option(None, least=1, most=10**9)
    """Stop after the next iteration that is a multiple of this number. A checkpoint is saved, as with the other two
    exit flags."""

    exit_duration_in_mins: float | None = option(None, above=0, most=1e9)
    """Stop after the iteration in which this many minutes have passed."""

    exit_signal_handler: bool = False
    """Stop after the iteration in which any rank gets a SIGTERM, with exit code 0. Send it to the ranks, or to
    `deepspeed.launcher.launch` on each host; the `deepspeed` command above it does not pass it on."""

    skip_train: bool = False
    """Only evaluate on validation and test data."""

    dry_run: bool = False
    """Check everything that a run checks before it starts, print what would run, and exit. Devices and hosts are not
    looked at, so a login node can do it. Without a launcher, the number of ranks is that of `--hostfile`, or sequence
    x tensor x pipeline x `--data-parallel-size`, or the variable WORLD_SIZE."""

    dry_run_without_files: bool = False
    """Make a dry run where the tokenizer, the data, the checkpoints and the output directories of the run are not."""

    hostfile: str | None = option(None, metavar="FILE")
    """Hosts and slots of a dry run, which has a rank for each slot. A run has its ranks from its launcher."""

    recompute_granularity: Literal["none", "selective", "full", "stage"] = option(
        "none",
        shorthands={
            "--recompute-activations": "selective",
            "--checkpoint-activations": "full",
            "--deepspeed-activation-checkpointing": "full",
        },
        translations={"--activations-checkpoint-method": {"uniform": "full"}},
    )
    """Activations that the backward recomputes instead of keeping them: `none`; `selective`, which recomputes the cheap
    outputs of norms and of the activation function; `full`, which recomputes whole layers; `stage`, which keeps of a
    token slice the input of each stage, and keys and values, and recomputes whole stages. Attention scores are never
    kept."""

    key_value_gradients: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients of keys and values are kept between the backwards of token slices. Sums are computed in
    fp32 either way; `bf16` rounds them when they are stored, and halves their memory."""

    recompute_method: Literal["uniform", "block"] = "uniform"
    """Layers that `full` recomputes. `uniform`: all of them, `--recompute-num-layers` at a time. `block`: the first
    `--recompute-num-layers` transformer layers of each stage, one at a time; what is found for a run, as by
    `--token-slices auto`, still counts with all of them."""

    recompute_num_layers: int = option(1, aliases=("--checkpoint-num-layers",), least=1, most=10_000)
    """Layers between two activations that `uniform` keeps; layers of each stage that `block` recomputes."""

    offload_token_slices: bool = False
    """Let inputs of stages, keys and values that are not read for long wait in the memory of the host; with
    `--recompute-granularity stage`. The copies are planned for `--cluster`."""

    compile_pointwise: Literal["auto", "always", "never"] = "auto"
    """Where chains of pointwise operations (rotations, norms, gates, dropout with its residual) are compiled into one
    kernel: `auto` compiles on accelerators that have triton; `always` also on CPUs, where it takes seconds at every
    start; `never` compiles nothing."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_choices(self)
        check_bounds(self)
        if self.dry_run_without_files:
            object.__setattr__(self, "dry_run", True)
        if self.offload_token_slices and self.recompute_granularity != "stage":
            raise ConfigError(
                f"--offload-token-slices does not go with --recompute-granularity {self.recompute_granularity}, which "
                "keeps more than inputs, keys and values: add --recompute-granularity stage"
            )
        if self.hostfile is not None and not self.dry_run:
            raise ConfigError(
                f"--hostfile {self.hostfile} is for the launcher: write deepspeed --hostfile {self.hostfile} "
                "pretrain_gpt.py, or add --dry-run"
            )
        if self.train_iters is None and self.train_samples is None and self.train_tokens is None:
            raise ConfigError("neither --train-iters nor --train-samples is given: add one")
        if self.train_iters is not None and self.train_samples is not None:
            raise ConfigError(
                f"--train-iters {self.train_iters} and --train-samples {self.train_samples} both say how long the "
                "training is: drop one of them"
            )

    def for_sequences(self, seq_length: int) -> "TrainingConfig":
        """Return the section with `--train-tokens` turned into samples, if it is given alone.

        Raises:
            ConfigError: if they are not whole samples.
        """
        tokens = self.train_tokens
        if tokens is None or self.train_iters is not None or self.train_samples is not None:
            return self
        if tokens % seq_length:
            raise ConfigError(
                f"--train-tokens {tokens} is not a multiple of --seq-length {seq_length}: give "
                f"{-(-tokens // seq_length) * seq_length}"
            )
        return replace(self, train_samples=tokens // seq_length, train_tokens=None)

    @property
    def unit(self) -> Literal["iters", "samples"]:
        """Unit in which training length, decay and warmup are counted; their flags end in it."""
        return "samples" if self.train_iters is None else "iters"

    @property
    def length(self) -> int:
        """Iterations or samples of the whole run."""
        length = self.train_iters or self.train_samples
        assert length is not None
        return length
