"""The sections of the training recipe: length, recomputation, optimizer, learning rate, number types, NaN checks."""

from dataclasses import dataclass, replace
from math import log2
from typing import Literal

from megatron_terapipe.config.options import check, flag, option
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN, ConfigError

SEEDS = 2**32
"""Seeds that the generator of the samples' order can start from, Megatron's, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Training: length, seed, and recomputation."""

    train_iters: int | None = option(None, least=1, most=10**9)
    """Optimizer steps of the whole run."""

    train_samples: int | None = option(None, excludes=("train_iters",), least=1, most=10**13)
    """Samples of the whole run, instead of `--train-iters`. Decay and warmup are then also counted in samples."""

    train_tokens: int | None = option(None, least=1, most=10**18)
    """Tokens of the whole run. Without another length, it gives `--train-samples`, tokens / `--seq-length`. With
    `--train-iters` or `--train-samples`, the run ends with the first iteration that reaches it, as in
    Megatron-DeepSpeed; the order of the data and the learning rate follow from the other flag."""

    defaults: Literal["terapipe", "megatron"] = "terapipe"
    """Defaults of the flags that Megatron has other defaults for, dropout among them; flags and files win over them."""

    seed: int = option(1234, least=0, most=SEEDS - 1)
    """Seed of the weights and of the order of the data."""

    calculate_per_token_loss: bool = False
    """Let every token of a global batch that bears loss count the same. Default: every micro-batch counts the same,
    however many of its tokens bear loss."""

    deterministic_mode: bool = False
    """Make the run repeatable to the bit on the same devices: only deterministic algorithms of torch, cuBLAS and NCCL,
    which may be slower. An operation without such an algorithm ends the run."""

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
    """Check everything that a run checks before it starts, print the plan of the run, and exit. Devices and hosts are
    not checked, so a login node can do it. Without a launcher, the number of ranks is counted in `--hostfile`, or
    sequence x tensor x pipeline x `--data-parallel-size`, or the variable WORLD_SIZE."""

    dry_run_without_files: bool = False
    """Make a dry run where the tokenizer, the data, the checkpoints and the output directories of the run are not."""

    hostfile: str | None = option(None, metavar="FILE")
    """Hosts and slots of a dry run, which has a rank for each slot. A run has its ranks from its launcher."""

    recompute_granularity: Literal["none", "selective", "full", "stage"] = option(
        "none",
        also={
            "--recompute-activations": "selective",
            "--checkpoint-activations": "full",
            "--deepspeed-activation-checkpointing": "full",
            "--activations-checkpoint-method": {"uniform": "full"},
        },
    )
    """Activations that the backward recomputes instead of keeping them: `none`; `selective`, which recomputes the cheap
    outputs of norms and of the activation function; `full`, which recomputes whole layers; `stage`, which keeps of a
    token slice the input of each stage, and keys and values, and recomputes whole stages. Attention scores are never
    kept."""

    key_value_gradients: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients of keys and values are kept between the backwards of token slices. Sums are computed in
    fp32 either way; `bf16` rounds them when they are stored, and halves their memory."""

    latent_kept: Literal["expanded", "latent"] = "expanded"
    """Tensors that layers with latent attention keep of a token slice for later ones: keys and values of all heads
    (`expanded`), or latents (`latent`), from which each token slice computes keys and values of its whole reach."""

    recompute_method: Literal["uniform", "block"] = "uniform"
    """Layers that `full` recomputes. `uniform`: all of them, `--recompute-num-layers` at a time. `block`: the first
    `--recompute-num-layers` transformer layers of each stage, one at a time; searches for a run, as by
    `--token-slices auto`, still count with all of them."""

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
        check(self)
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

    def for_sequences(self, seq_length: int) -> "TrainingConfig":
        """Return the section with `--train-tokens` turned into samples, if it is the only length given."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer and learning rate."""

    optimizer: Literal["adam", "sgd"] = option(
        "adam", elsewhere=dict.fromkeys(("muon", "dist_muon", "lion"), TRAINING_CANNOT_BE_RUN)
    )
    """Optimizer. `adam` decays weights separately from the gradient (AdamW), as Megatron's does."""

    lr: float = option(above=0, most=100)
    """Highest learning rate."""

    min_lr: float = option(0.0, least=0, most=100)
    """Learning rate at the end of the decay, and after it."""

    decoupled_lr: float | None = option(None, least=0, most=100)
    """Highest learning rate of the word embedding and of the output layer, tied or not. Default: `--lr`."""

    decoupled_min_lr: float | None = option(None, needs=("decoupled_lr",), least=0, most=100)
    """Learning rate of these two at the end of the decay, and after it. Default: `--min-lr`."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after the warmup. `WSD` keeps the highest learning rate and decays only at the end."""

    lr_decay_iters: int | None = option(None, least=1, most=10**9)
    """Iteration at which the decay ends. Default: the last."""

    lr_decay_samples: int | None = option(None, excludes=("lr_decay_iters",), least=1, most=10**13)
    """Samples after which the decay ends, with `--train-samples`. Default: all."""

    lr_decay_tokens: int | None = option(None, excludes=("lr_decay_iters", "lr_decay_samples"), least=1, most=10**18)
    """Tokens after which the decay ends, instead of `--lr-decay-iters` or `--lr-decay-samples`: tokens / `--seq-length`
    samples, which need not be a whole number. Megatron-DeepSpeed counts them one iteration late."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay at the end of WSD."""

    lr_wsd_decay_iters: int | None = option(None, least=1, most=10**9)
    """Iterations of the decay at the end of WSD."""

    lr_wsd_decay_samples: int | None = option(None, least=1, most=10**13)
    """Samples of the decay at the end of WSD, with `--train-samples`."""

    lr_warmup_iters: int = option(0, least=0, most=10**9)
    """Iterations in which the learning rate rises linearly."""

    lr_warmup_samples: int = option(0, excludes=("lr_warmup_iters",), least=0, most=10**13)
    """Samples in which the learning rate rises linearly, with `--train-samples`."""

    lr_warmup_tokens: int | None = option(None, excludes=("lr_warmup_iters", "lr_warmup_samples"), least=0, most=10**18)
    """Tokens in which the learning rate rises linearly, instead of `--lr-warmup-iters` or `--lr-warmup-samples`."""

    lr_warmup_fraction: float | None = option(
        None, excludes=("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens"), least=0, below=1
    )
    """Length of the warmup as a fraction of the time until the decay ends, instead of `--lr-warmup-iters`."""

    lr_warmup_init: float = option(0.0, least=0, most=100)
    """Learning rate at the start of the warmup."""

    weight_decay: float = option(0.01, least=0, most=1000)
    """Weight decay. Biases and norms do not decay."""

    apply_wd_to_qk_layernorm: bool = option(
        False, also={"--no-weight-decay-cond-type": {"apply_wd_to_qk_layernorm": True}}
    )
    """Decay the norms of queries and keys, too."""

    start_weight_decay: float | None = option(None, least=0, most=1000)
    """Weight decay of the first iteration, if it increases."""

    end_weight_decay: float | None = option(None, least=0, most=1000)
    """Weight decay of the last iteration, if it increases."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape in which weight decay increases over the whole training."""

    clip_grad: float = option(1.0, least=0, most=1e9)
    """Scale gradients down to this global norm. 0 = never."""

    adam_beta1: float = option(0.9, least=0, below=1)
    """Decay rate of Adam's mean of gradients."""

    adam_beta2: float = option(0.999, least=0, below=1)
    """Decay rate of Adam's mean of squared gradients."""

    adam_eps: float = option(1e-8, above=0, most=1)
    """Number that is added to the denominator of Adam's update."""

    sgd_momentum: float = option(0.9, least=0, below=1)
    """Momentum of SGD."""

    zero_stage: Literal[0, 1] = 1
    """ZeRO stage: 1 distributes the optimizer state over the data-parallel ranks, 0 repeats it on each rank. 2 and 3
    of other trainers are run as 1, which trains the same with more memory."""

    def __post_init__(self) -> None:
        check(self)
        for name in ("min_lr", "lr_warmup_init"):
            if getattr(self, name) > self.lr:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} is above --lr {self.lr}: give {self.lr} or less")
        for name, value in (("--decoupled-min-lr", self.ends[1]), ("--lr-warmup-init", self.lr_warmup_init)):
            if value > self.ends[0]:
                raise ConfigError(f"{name} {value} is above --decoupled-lr {self.ends[0]}: give no more than that")
        self._check_rising_weight_decay()

    @property
    def ends(self) -> tuple[float, float]:
        """Highest and last learning rate of the word embedding and of the output layer."""
        highest = self.lr if self.decoupled_lr is None else self.decoupled_lr
        return highest, self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr

    def _check_rising_weight_decay(self) -> None:
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        if style == "constant":
            for name in ("start_weight_decay", "end_weight_decay"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{flag(name)} {getattr(self, name)} has no effect on a constant weight decay: add "
                        "--weight-decay-incr-style, or use --weight-decay"
                    )
        elif start is None or end is None:
            missing = "--start-weight-decay" if start is None else "--end-weight-decay"
            raise ConfigError(f"--weight-decay-incr-style {style} needs {missing}: add it, or use only --weight-decay")
        elif start > end:
            raise ConfigError(
                f"--weight-decay-incr-style {style} would fall from --start-weight-decay {start} to --end-weight-decay "
                f"{end}: give the second no less than the first"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSteps:
    """Lengths of the warmup, of the whole, and of the decay of WSD, in iterations or in samples."""

    warmup: float
    """Steps of the rise; not a whole number where it is given as a fraction or in tokens."""

    decay: float
    """Step at which the decay ends."""

    wsd_decay: int
    """0 without WSD."""

    @classmethod
    def of(cls, optimizer: OptimizerConfig, training: TrainingConfig, *, tokens_per_step: int) -> "LearningRateSteps":
        """Return the lengths, whether they are given in steps, as a fraction, or in tokens."""
        in_samples = training.unit == "samples"
        decay: float = (optimizer.lr_decay_samples if in_samples else optimizer.lr_decay_iters) or training.length
        if optimizer.lr_decay_tokens is not None:
            decay = optimizer.lr_decay_tokens / tokens_per_step
        warmup: float = optimizer.lr_warmup_samples if in_samples else optimizer.lr_warmup_iters
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        if optimizer.lr_warmup_tokens is not None:
            warmup = optimizer.lr_warmup_tokens / tokens_per_step
        wsd_decay = optimizer.lr_wsd_decay_samples if in_samples else optimizer.lr_wsd_decay_iters
        return cls(warmup=warmup, decay=decay, wsd_decay=wsd_decay or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Precision: fp32 unless a flag chooses another."""

    fp16: bool = False
    """Train in fp16, with a scaled loss. Needs ZeRO stage 1."""

    bf16: bool = option(False, excludes=("fp16",))
    """Train in bf16."""

    loss_scale: float | None = option(None, above=0, most=1e36)
    """Fixed scale of the loss in fp16. Default: the scale adapts."""

    # Megatron starts at 2**32, but the largest fp16 number is 65504: the first iterations would all be skipped.
    initial_loss_scale: float = option(65536.0, above=0, most=1e36)
    """First adaptive loss scale, a power of 2."""

    min_loss_scale: float = option(1.0, above=0, most=1e36)
    """Smallest adaptive loss scale, a whole number."""

    loss_scale_window: int = option(1000, least=1, most=10**9)
    """Iterations without overflow after which the loss scale doubles."""

    hysteresis: int = option(2, least=1, most=10**9)
    """Overflows before the loss scale halves."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Sum and reduce gradients in fp32. In bf16 with ZeRO stage 1 this is always so."""

    def __post_init__(self) -> None:
        check(self)
        if not log2(self.initial_loss_scale).is_integer():
            raise ConfigError(
                f"--initial-loss-scale {self.initial_loss_scale} is not a power of 2: give one, such as 65536"
            )
        if not self.min_loss_scale.is_integer():
            raise ConfigError(f"--min-loss-scale {self.min_loss_scale} is not a whole number: give one, such as 1")

    @property
    def needs_zero(self) -> bool:
        """Whether DeepSpeed trains so only under ZeRO 1.

        Without ZeRO, DeepSpeed 0.19 leaves the loss of fp16 unscaled, yet divides the gradients by the scale, and adds
        gradients of bf16 up in bf16.
        """
        return self.fp16 or (self.bf16 and self.accumulate_allreduce_grads_in_fp32)

    @property
    def dtype(self) -> Literal["fp32", "fp16", "bf16"]:
        """Type of the parameters and of the messages between stages."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class NumbersConfig:
    """Numbers: actions if a loss, a gradient or a weight is NaN or infinite, if a loss jumps, or if copies differ."""

    bad_numbers: Literal["stop", "skip", "ignore"] = option(
        "stop",
        also={
            "--check-for-nan-in-loss-and-grad": "stop",
            "--no-check-for-nan-in-loss-and-grad": "ignore",
        },
    )
    """Action if the loss or the gradient of an iteration is NaN or infinite; its update never reaches the weights.
    `stop` saves the iteration before and ends the run; `skip` continues with the next batch. Both name rank, layer,
    micro-batch and token slice in which it began. `ignore` reports no such iteration. In fp16 with an adaptive loss
    scale this is for overflows that the scale cannot cure: those before lower it, as usual."""

    max_bad_numbers_in_a_row: int = option(10, least=0, most=10**9)
    """Iterations in a row that `--bad-numbers skip` leaves out before it ends the run."""

    spiky_loss: Literal["note", "stop", "ignore"] = option("note", also={"--check-for-spiky-loss": "note"})
    """Action if the loss of an iteration is above its median over the last 100 by more than 7 times their spread,
    and by more than 7 %: `note` reports it in the log and in `--metrics-file`, `stop` also ends the run."""

    large_grads: Literal["note", "stop", "ignore"] = option("ignore", also={"--check-for-large-grads": "note"})
    """Action if the norm of the gradient is above its median over the last 100 iterations by more than 7 times
    their spread, and more than three times the median; as for `--spiky-loss`."""

    check_consistency: int | None = option(
        None, metavar="N", aliases=("--check-weight-hash-across-dp-replicas-interval",), least=1, most=10**9
    )
    """Compare copies every N iterations, by a hash: weights of replicas, and their optimizer states where each has
    all; tied weights; weights and states that tensor parallelism does not cut. Copies that differ end the run, and
    nothing is saved from then on."""

    def __post_init__(self) -> None:
        check(self)
