"""The sections that say how the model is trained: batch, iterations, optimizer, precision."""

from dataclasses import dataclass
from math import log2
from typing import Literal

from megatron_terapipe.config.options import (
    check_choices,
    check_not_negative,
    check_positive,
    flag,
    option,
)
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch: sequences per optimizer step.

    Raises:
        ConfigError: if a size is not positive, or one not a multiple of the other.
    """

    micro_batch_size: int
    """Sequences that go through the pipeline together."""

    global_batch_size: int | None = None
    """Sequences of one optimizer step, over all data-parallel ranks. Left out, one micro-batch on each."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        check_positive(self, "micro_batch_size", "global_batch_size")
        self._check_multiple(self.micro_batch_size, f"--micro-batch-size {self.micro_batch_size}")

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step.

        Raises:
            ConfigError: if the global batch cannot be dealt evenly.
        """
        sequences = self.micro_batch_size * data_parallel_size
        self._check_multiple(
            sequences,
            f"--micro-batch-size {self.micro_batch_size} x data-parallel size {data_parallel_size} = {sequences}",
        )
        return (self.global_batch_size or sequences) // sequences

    def _check_multiple(self, of: int, described: str) -> None:
        if self.global_batch_size is not None and self.global_batch_size % of:
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of {described}: "
                f"give a multiple, such as {-(-self.global_batch_size // of) * of}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Training: how long, from which seed, and what to recompute.

    Raises:
        ConfigError: if a value is out of range.
    """

    train_iters: int
    """Optimizer steps of the whole run."""

    seed: int = 1234
    """Seed of the weights and of the order of the data."""

    exit_interval: int | None = None
    """Stop after the next iteration that is a multiple of this."""

    recompute_granularity: Literal["none", "full"] = option(
        "none",
        shorthands=dict.fromkeys(
            (
                "--recompute-activations",
                "--checkpoint-activations",
                "--deepspeed-activation-checkpointing",
            ),
            "full",
        ),
    )
    """Activations to recompute in the backward instead of keeping: `none`, or `full` for whole layers."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_choices(self)
        check_positive(self, "train_iters", "exit_interval")
        check_not_negative(self, "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer and learning rate.

    Raises:
        ConfigError: if a value is out of range, or two contradict each other.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    """Rule of the update. `adam` decays weights apart from the gradient (AdamW), as Megatron's does."""

    lr: float
    """Highest learning rate."""

    min_lr: float = 0.0
    """Learning rate at the end of the decay, and a floor from there on."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "linear"
    """Shape of the decay after the warmup."""

    lr_decay_iters: int | None = None
    """Iteration at which the decay ends. Left out, the last."""

    lr_warmup_iters: int = 0
    """Iterations in which the learning rate rises from 0, on a line."""

    lr_warmup_fraction: float | None = None
    """Length of the warmup as a part of the iterations until the decay ends, instead of `--lr-warmup-iters`."""

    weight_decay: float = 0.01
    """Decay of the weights. Biases and norms do not decay."""

    clip_grad: float = 1.0
    """Gradients are scaled down to this global norm. 0 = never."""

    adam_beta1: float = 0.9
    """Decay of Adam's mean of gradients."""

    adam_beta2: float = 0.999
    """Decay of Adam's mean of squared gradients."""

    adam_eps: float = 1e-8
    """Added to the denominator of Adam's update."""

    sgd_momentum: float = 0.9
    """Momentum of SGD."""

    zero_stage: Literal[0, 1] = 1
    """ZeRO stage: 1 spreads the optimizer state over the data-parallel ranks, 0 repeats it on each."""

    def __post_init__(self) -> None:
        """Check the ranges and the pairs."""
        # The general line would not say why DeepSpeed's other two stages are not on offer.
        if self.zero_stage in (2, 3):
            raise ConfigError(
                f"--zero-stage {self.zero_stage}: DeepSpeed cannot combine ZeRO 2 or 3 with pipelines: use 0 or 1"
            )
        check_choices(self)
        check_positive(self, "lr", "lr_decay_iters", "adam_eps")
        check_not_negative(self, "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum", "lr_warmup_fraction"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(f"{flag(name)} {value} is out of range: give 0 or more, below 1")
        if self.min_lr > self.lr:
            raise ConfigError(f"--min-lr {self.min_lr} is above --lr {self.lr}: give {self.lr} or less")
        if self.lr_warmup_iters and self.lr_warmup_fraction is not None:
            raise ConfigError(
                f"--lr-warmup-iters {self.lr_warmup_iters} and --lr-warmup-fraction "
                f"{self.lr_warmup_fraction} both say how long the warmup is: drop one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Precision: fp32 unless one of the flags says otherwise.

    Raises:
        ConfigError: if two types are asked for, or a value is out of range.
    """

    fp16: bool = False
    """Train in fp16, with a scaled loss. Needs ZeRO stage 1."""

    bf16: bool = False
    """Train in bf16."""

    loss_scale: float | None = None
    """Fixed scale of the loss in fp16. Left out, it adapts."""

    # Megatron starts at 2**32, but the largest fp16 number is 65504: the first iterations would all be skipped.
    initial_loss_scale: float = 65536.0
    """First adaptive loss scale, a power of 2."""

    min_loss_scale: float = 1.0
    """Least adaptive loss scale, a whole number."""

    loss_scale_window: int = 1000
    """Iterations without overflow after which the loss scale doubles."""

    hysteresis: int = 2
    """Overflows before the loss scale halves."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Add up and reduce gradients in fp32. In bf16 with ZeRO stage 1 that is always so."""

    def __post_init__(self) -> None:
        """Check the pair and the ranges."""
        if self.fp16 and self.bf16:
            raise ConfigError("--fp16 and --bf16 exclude each other: drop one of them")
        check_positive(
            self,
            "loss_scale",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
        )
        if not log2(self.initial_loss_scale).is_integer():
            raise ConfigError(
                f"--initial-loss-scale {self.initial_loss_scale} is not a power of 2: give one, such as 65536"
            )
        if not self.min_loss_scale.is_integer():
            raise ConfigError(f"--min-loss-scale {self.min_loss_scale} is not a whole number: give one, such as 1")

    @property
    def dtype(self) -> Literal["fp32", "fp16", "bf16"]:
        """Type of the parameters and of what flows between stages."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"
